"""All that is found out about some attempts and their tokens, before it is put into tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rolltape.schema.columns import INT32
from rolltape.schema.fold_attempts import Attempts, judge_attempts, take_over
from rolltape.schema.fold_inputs import Keys, KindRows
from rolltape.schema.fold_labels import ActionPlaces, Masks, Rewards, apply_masks, judge_rewards
from rolltape.schema.fold_layout import Contexts, Layout, lay_out, read_contexts
from rolltape.schema.fold_proof import Proof, prove_contexts
from rolltape.schema.fold_ranges import Array, Bools, Ints, field_of, lists_of, single
from rolltape.schema.fold_timeline import Coverage, Timeline, cover, order_events
from rolltape.schema.fold_tokens import (
    LogProbs,
    Sampled,
    flat_ids,
    flat_log_probs,
    flat_versions,
    observation_tokens,
    owned_tokens,
    read_version_runs,
    sampled_tokens,
)
from rolltape.schema.fold_versions import Shared, Versions, judge_versions, sampling_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Flat arrays over the response tokens of all segments, each ``[N]``."""

    ids: Array
    log_probs: LogProbs
    sampled: Sampled
    observed: Bools
    trained: Bools
    versions: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that the two tables are made from.

    ``own`` are the events of each attempt, ``timeline`` those that it shows: what it took over, then its own.
    ``conflict`` (K) and ``no_log_probs`` (P) are named as the reasons that they become.
    """

    keys: Keys
    kinds: Mapping[str, KindRows]
    own: Timeline
    timeline: Timeline
    coverage: Coverage
    attempts: Attempts
    conflict: Bools
    layout: Layout
    contexts: Contexts
    tokens: Tokens
    no_log_probs: Bools
    proof: Proof
    rewards: Rewards
    masks: Masks
    versions: Versions
    logprobs_mode: Shared
    temperature: Shared


def fold_parts(keys: Keys, kinds: Mapping[str, KindRows], events: Mapping[str, pa.Table]) -> Parts:
    """Find out all about the attempts ``keys``; ``events`` holds the kinds that no attempt owns."""
    own, conflict = order_events(kinds, keys.num_keys)
    coverage = cover(own, kinds, _redriven(events), keys)
    attempts = judge_attempts(keys, kinds, own, coverage)
    timeline = take_over(own, keys, attempts)
    actions, observations = kinds["action_sampled"], kinds["observation_received"]
    action_ids, observation_ids = lists_of(actions.column("token_ids")), lists_of(observations.column("token_ids"))
    layout = lay_out(timeline, kinds, action_ids, observation_ids)
    ids = flat_ids(layout, action_ids, observation_ids)
    starts = lists_of(kinds["rollout_started"].field("prompt_token_ids"))
    rewrites = lists_of(kinds["context_rewritten"].field("context_token_ids"))
    contexts = read_contexts(layout, starts, rewrites, ids)
    sampled = sampled_tokens(layout, actions)
    log_probs, no_log_probs = flat_log_probs(layout, actions, action_ids, sampled)
    runs = read_version_runs(layout, actions)
    versions = flat_versions(layout, runs, sampled)
    places = ActionPlaces(layout, actions)
    masks = apply_masks(kinds["mask_assigned"], keys, attempts, layout, places)
    trained = owned_tokens(layout, sampled)
    tokens = Tokens(
        ids=ids,
        log_probs=log_probs,
        sampled=sampled,
        observed=observation_tokens(layout),
        trained=trained if masks.masked is None else trained & ~masks.masked,
        versions=versions,
    )
    return Parts(
        keys=keys,
        kinds=kinds,
        own=own,
        timeline=timeline,
        coverage=coverage,
        attempts=attempts,
        conflict=conflict,
        layout=layout,
        contexts=contexts,
        tokens=tokens,
        no_log_probs=no_log_probs,
        proof=prove_contexts(layout, contexts, ids, actions),
        rewards=judge_rewards(kinds["reward_assigned"], keys, layout, places),
        masks=masks,
        versions=judge_versions(layout, runs, versions, sampled, keys, events.get("weights_aborted")),
        logprobs_mode=sampling_values(layout, actions, sampled, "logprobs_mode", keys.num_keys),
        temperature=sampling_values(layout, actions, sampled, "temperature", keys.num_keys),
    )


def _redriven(events: Mapping[str, pa.Table]) -> pa.Array:
    """Ids of the dead letters that were repaired."""
    table = events.get("dead_letter_redriven")
    if table is None or not table.num_rows:
        return pa.array([], pa.string())
    struct = table["dead_letter_redriven"]
    return field_of(single(struct), "dead_letter_event_id")


def int32_array(values: Ints, mask: Bools | None = None) -> pa.Array:
    """Counts or indexes as an int32 column, null where ``mask`` is true."""
    return pa.array(values.astype(np.int32), INT32, mask=mask)
