"""The table of trajectories: one row for each attempt."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rolltape.schema.columns import INT32
from rolltape.schema.fold_facts import end_columns, log_offsets
from rolltape.schema.fold_parts import Parts, int32_array
from rolltape.schema.fold_ranges import Ints, bool_array, count_by, exclusive_cumsum, list_array, sum_by, take_or_null
from rolltape.schema.fold_reasons import reason_lists, untrainable
from rolltape.schema.fold_schema import EARNED, REWARD_STATES, TRAJECTORY_SCHEMA
from rolltape.schema.fold_standing import standing_of, verdict_of
from rolltape.schema.fold_timeline import Coverage
from rolltape.schema.fold_tokens import count_untrusted


def trajectory_table(parts: Parts, identity: Mapping[str, pa.Array]) -> pa.Table:
    """All attempts; ``identity`` holds the columns that say who was asked."""
    keys, coverage, layout, tokens = parts.keys, parts.coverage, parts.layout, parts.tokens
    num_keys = keys.num_keys
    end = end_columns(parts.kinds, num_keys)
    standing, verdict = standing_of(parts), verdict_of(parts)
    counts = count_by(layout.key, num_keys)
    token_key = layout.events.key
    first, last = log_offsets(parts.kinds, num_keys)
    untrusted = count_untrusted(layout, tokens.log_probs, tokens.sampled, num_keys)
    rewards = parts.rewards
    earned = rewards.state == REWARD_STATES.index(EARNED)
    columns = {
        **identity,
        "run_id": keys.run_ids,
        "trajectory_id": keys.trajectory_ids,
        "attempt": pa.array(keys.attempts, pa.int64()).cast(INT32),
        "is_current": bool_array(parts.attempts.current),
        "state": standing.state,
        "status": end["status"],
        "cause": end["cause"],
        "num_events": int32_array(coverage.num_events),
        "last_event_index": int32_array(coverage.last, coverage.last < 0),
        "missing_event_indexes": _missing(coverage, num_keys),
        "num_segments": int32_array(counts),
        "num_prompt_tokens": int32_array(_first_contexts(parts)),
        "num_action_tokens": pa.array(sum_by(token_key, tokens.sampled.counts, num_keys)),
        "num_observation_tokens": pa.array(
            sum_by(token_key, np.where(layout.is_action, 0, layout.length), num_keys),
        ),
        "num_untrusted_tokens": pa.array(untrusted),
        "policy_id": parts.versions.policy.value,
        "min_version": pa.array(parts.versions.oldest, mask=parts.versions.oldest < 0),
        "max_version": pa.array(parts.versions.newest, mask=parts.versions.newest < 0),
        "logprobs_mode": parts.logprobs_mode.value,
        "temperature": parts.temperature.value,
        "reward": pa.array(np.where(earned, rewards.reward, 0.0), mask=~earned),
        "reward_state": take_or_null(pa.array(REWARD_STATES), np.maximum(rewards.state, rewards.token_state)),
        "reward_event_ids": rewards.event_ids,
        "token_rewards": rewards.token_rewards,
        "mask_event_ids": parts.masks.event_ids,
        "tito_ok": verdict.tito_ok,
        "tito_first_difference": verdict.first_difference,
        "prefix_source": verdict.source,
        "untrainable_reasons": reason_lists(untrainable(parts, end, standing, verdict)),
        "log_offset_first": first,
        "log_offset_last": last,
    }
    return pa.table([columns[name] for name in TRAJECTORY_SCHEMA.names], schema=TRAJECTORY_SCHEMA)


def _missing(coverage: Coverage, num_keys: int) -> pa.Array:
    lengths = np.zeros(num_keys, np.int64)
    for key, gaps in coverage.missing.items():
        lengths[key] = len(gaps)
    values = [index for key in sorted(coverage.missing) for index in coverage.missing[key]]
    return list_array(exclusive_cumsum(lengths), pa.array(values, INT32))


def _first_contexts(parts: Parts) -> Ints:
    """Context tokens of segment 0 of each attempt."""
    lengths = np.zeros(parts.keys.num_keys, np.int64)
    first = parts.layout.index == 0
    lengths[parts.layout.key[first]] = parts.contexts.lengths[first]
    return lengths
