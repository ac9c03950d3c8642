"""Why an attempt may not be trained, as far as the tape alone can say; ``reasons.py`` says what each means."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema import reasons
from rolltape.schema.fold_inputs import KindRows
from rolltape.schema.fold_layout import FROM_REWRITE, FROM_START
from rolltape.schema.fold_parts import Parts
from rolltape.schema.fold_ranges import (
    Bools,
    Ints,
    Lists,
    bools_of,
    exclusive_cumsum,
    ints_of,
    list_array,
    lists_of,
    sum_by,
    valid_of,
)
from rolltape.schema.fold_schema import CONFLICT, EARNED, INVALID, REWARD_STATES
from rolltape.schema.fold_standing import Standing, Verdict
from rolltape.schema.fold_timeline import ACTION, OBSERVATION
from rolltape.schema.fold_tokens import support_is_known


def untrainable(parts: Parts, end: Mapping[str, pa.Array], standing: Standing, verdict: Verdict) -> dict[str, Bools]:
    """For each reason the attempts that it holds for; ``end`` has the columns of ``rollout_ended``."""
    is_open, is_dropped = standing.is_open, standing.is_dropped
    rewards, versions, attempts = parts.rewards, parts.versions, parts.attempts
    worst = np.maximum(rewards.state, rewards.token_state)
    conflict, invalid = REWARD_STATES.index(CONFLICT), REWARD_STATES.index(INVALID)
    earned = rewards.state == REWARD_STATES.index(EARNED)
    settled = (worst == conflict) | (worst == invalid)
    return {
        reasons.OPEN: is_open & ~attempts.abandoned,
        reasons.DROPPED: is_dropped,
        reasons.ABANDONED: attempts.abandoned,
        reasons.SUPERSEDED: ~attempts.abandoned & ~attempts.current,
        reasons.ENV_FAILED: bools_of(pc.equal(end["status"], "env_failed")),
        reasons.ABORTED: bools_of(pc.equal(end["status"], "aborted")),
        reasons.EVENT_CONFLICT: parts.conflict,
        reasons.CHECKSUM_MISMATCH: _check_sums_differ(parts, end) & ~is_open & ~is_dropped,
        reasons.NO_TOKEN_IDS: _without_ids(parts),
        reasons.NO_LOG_PROBS: _any(parts, parts.no_log_probs),
        reasons.UNKNOWN_VERSION: versions.unknown,
        reasons.MIXED_POLICIES: versions.policy.mixed,
        reasons.ABORTED_VERSION: versions.aborted,
        reasons.UNKNOWN_LOGPROBS_MODE: parts.logprobs_mode.unknown,
        reasons.MIXED_LOGPROBS_MODE: parts.logprobs_mode.mixed,
        reasons.UNKNOWN_TEMPERATURE: parts.temperature.unknown,
        reasons.MIXED_TEMPERATURE: parts.temperature.mixed,
        reasons.UNKNOWN_SUPPORT: _without_support(parts),
        reasons.PREFIX_MISMATCH: verdict.differs,
        reasons.PREFIX_UNKNOWN: verdict.unproved,
        reasons.REWARD_CONFLICT: worst == conflict,
        reasons.REWARD_INVALID: worst == invalid,
        reasons.REWARD_MISSING: ~earned & ~settled,
        reasons.MASK_UNRESOLVED: parts.masks.unresolved & ~is_open,
    }


def _any(parts: Parts, events: Bools) -> Bools:
    """Attempts with at least one of the token events chosen."""
    found = np.zeros(parts.keys.num_keys, np.bool_)
    found[parts.layout.events.key[events]] = True
    return found


def _without_ids(parts: Parts) -> Bools:
    """Attempts with an event, or a context that an event spells out, whose ids are not on the tape."""
    layout, kinds = parts.layout, parts.kinds
    is_action = layout.is_action
    absent = np.zeros(len(is_action), np.bool_)
    for chosen, name in ((is_action, "action_sampled"), (~is_action, "observation_received")):
        if chosen.any():
            absent[chosen] = ~_has_ids(kinds[name])[layout.events.row[chosen]]
    found = _any(parts, absent)
    spelled = (layout.context == FROM_START) | (layout.context == FROM_REWRITE)
    found[layout.key[spelled & ~parts.contexts.known]] = True
    return found


def _has_ids(rows: KindRows) -> Bools:
    """Which rows have a list of ids without nulls."""
    lists: Lists = lists_of(rows.column("token_ids"))
    if not lists.values.null_count:
        return lists.valid
    nulls = np.concatenate([[0], np.cumsum(~valid_of(lists.values))])
    complete: Bools = lists.valid & (nulls[lists.starts + lists.lengths] == nulls[lists.starts])
    return complete


def _without_support(parts: Parts) -> Bools:
    actions, layout = parts.kinds["action_sampled"], parts.layout
    if not actions.num_rows:
        return np.zeros(parts.keys.num_keys, np.bool_)
    acts = parts.tokens.sampled.counts > 0
    unknown = np.zeros(len(acts), np.bool_)
    unknown[acts] = ~support_is_known(actions)[layout.events.row[acts]]
    return _any(parts, unknown)


def _check_sums_differ(parts: Parts, end: Mapping[str, pa.Array]) -> Bools:
    """Attempts whose end names other counts, or another last index, than their own events have."""
    pairs = (
        (ints_of(end["num_action_tokens"]), _recorded_tokens(parts, ACTION, "action_sampled")),
        (ints_of(end["num_observation_tokens"]), _recorded_tokens(parts, OBSERVATION, "observation_received")),
        (ints_of(end["event_index"]), parts.coverage.last),
        (ints_of(end["last_event_index"]), parts.coverage.last),
    )
    differ: Bools = np.zeros(parts.keys.num_keys, np.bool_)
    for told, found in pairs:
        differ |= (told >= 0) & (told != found)
    return differ


def _recorded_tokens(parts: Parts, code: int, kind: str) -> Ints:
    """Tokens of one kind that each attempt recorded itself, injected ones among them."""
    own = parts.own.select(parts.own.kind == code)
    lengths = lists_of(parts.kinds[kind].column("token_ids")).lengths
    return sum_by(own.key, lengths[own.row], parts.keys.num_keys)


def reason_lists(found: Mapping[str, Bools]) -> pa.Array:
    """For each attempt the sorted names of the reasons that hold for it.

    >>> reason_lists({"open": np.array([True, False]), "aborted": np.array([True, False])}).to_pylist()
    [['aborted', 'open'], []]
    """
    names = sorted(found)
    matrix = np.stack([found[name] for name in names], axis=1)
    _, columns = np.nonzero(matrix)
    values = pa.array(names, pa.string()).take(pa.array(columns, pa.int64()))
    return list_array(exclusive_cumsum(matrix.sum(axis=1)), values)
