"""Putting the fold together: from numbered attempts and their events to the two tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema import reasons
from rolltape.schema.columns import INT32
from rolltape.schema.fold_attempts import Attempts, judge_attempts, take_over
from rolltape.schema.fold_facts import RunFacts, end_columns, identity_columns, log_offsets
from rolltape.schema.fold_inputs import Keys, KindRows
from rolltape.schema.fold_labels import ActionPlaces, Masks, Rewards, apply_masks, judge_rewards
from rolltape.schema.fold_layout import FROM_REWRITE, FROM_START, Contexts, Layout, lay_out, read_contexts
from rolltape.schema.fold_proof import UNKNOWN_DIFFERENCE, Proof, prove_contexts
from rolltape.schema.fold_ranges import (
    Array,
    Bools,
    Ints,
    Lists,
    bool_array,
    bools_of,
    count_by,
    exclusive_cumsum,
    ints_of,
    list_array,
    lists_of,
    sum_by,
    take_or_null,
    valid_of,
)
from rolltape.schema.fold_reasons import reason_lists
from rolltape.schema.fold_schema import (
    ABANDONED,
    CONFLICT,
    DROPPED,
    EARNED,
    ENDED,
    EXECUTION,
    INVALID,
    OPEN,
    REWARD_STATES,
    SEGMENT_SCHEMA,
    SUMMARY,
    TRAJECTORY_SCHEMA,
)
from rolltape.schema.fold_timeline import ACTION, END, OBSERVATION, REWRITE, Coverage, Timeline, cover, order_events
from rolltape.schema.fold_tokens import (
    LogProbs,
    Sampled,
    count_untrusted,
    flat_ids,
    flat_log_probs,
    flat_versions,
    observation_tokens,
    owned_tokens,
    read_version_runs,
    sampled_tokens,
    support_is_known,
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
    """All that the two tables are assembled from."""

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


def assemble(keys: Keys, kinds: Mapping[str, KindRows], events: Mapping[str, pa.Table]) -> tuple[pa.Table, pa.Table]:
    """The trajectories and segments of some attempts; ``events`` holds the kinds that no attempt owns."""
    parts = _fold_parts(keys, kinds, events)
    identity = identity_columns(kinds, keys)
    purposes, revisions = RunFacts(events).columns(keys.run_ids, identity["run_epoch"])
    identity["purpose"] = pc.coalesce(identity["purpose"], purposes)
    return _trajectory_table(parts, identity), _segment_table(parts, identity, revisions)


def _fold_parts(keys: Keys, kinds: Mapping[str, KindRows], events: Mapping[str, pa.Table]) -> Parts:
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
    return pc.struct_field(struct, [struct.type.get_field_index("dead_letter_event_id")]).combine_chunks()


def _trajectory_table(parts: Parts, identity: Mapping[str, pa.Array]) -> pa.Table:
    keys, coverage, layout, tokens = parts.keys, parts.coverage, parts.layout, parts.tokens
    num_keys = keys.num_keys
    end, _ = end_columns(parts.kinds, num_keys)
    state, is_open, is_dropped = _states(parts)
    tito, difference, source, differs, unproved = _tito(parts)
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
        "state": state,
        "status": end["status"],
        "cause": end["cause"],
        "num_events": _int32(coverage.num_events),
        "last_event_index": _int32(coverage.last, coverage.last < 0),
        "missing_event_indexes": _missing(coverage, num_keys),
        "num_segments": _int32(counts),
        "num_prompt_tokens": _int32(_first_contexts(parts)),
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
        "tito_ok": tito,
        "tito_first_difference": difference,
        "prefix_source": source,
        "untrainable_reasons": reason_lists(_reasons(parts, end, is_open, is_dropped, differs, unproved)),
        "log_offset_first": first,
        "log_offset_last": last,
    }
    return pa.table([columns[name] for name in TRAJECTORY_SCHEMA.names], schema=TRAJECTORY_SCHEMA)


def _int32(values: Ints, mask: Bools | None = None) -> pa.Array:
    return pa.array(values.astype(np.int32), INT32, mask=mask)


def _states(parts: Parts) -> tuple[pa.Array, Bools, Bools]:
    """State names, and which attempts are open or dropped."""
    attempts, coverage = parts.attempts, parts.coverage
    dropped = coverage.dropped | attempts.dropped
    ended = np.zeros(parts.keys.num_keys, np.bool_)
    ended[parts.timeline.key[parts.timeline.kind == END]] = True
    incomplete = attempts.incomplete.copy()
    incomplete[list(coverage.missing)] = True
    is_open = ~dropped & (~ended | incomplete)
    codes = np.select([attempts.abandoned, dropped, is_open], [0, 1, 2], 3)
    return pa.array([ABANDONED, DROPPED, OPEN, ENDED]).take(pa.array(codes)), is_open, dropped


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


def _tito(parts: Parts) -> tuple[pa.Array, pa.Array, pa.Array, Bools, Bools]:
    """Proof of each attempt: verdict, first difference, weakest source; and which differ, which are unproved."""
    proof, num_keys = parts.proof, parts.keys.num_keys
    key = parts.layout.events.key[proof.event]
    differs, unproved, acted, submitted = (np.zeros(num_keys, np.bool_) for _ in range(4))
    acted[key] = True
    differs[key[proof.differs]] = True
    unproved[key[~proof.proved & ~proof.differs]] = True
    submitted[key[proof.submitted]] = True
    located = np.flatnonzero(proof.differs & (proof.first_difference != UNKNOWN_DIFFERENCE))[::-1]
    first = np.full(num_keys, UNKNOWN_DIFFERENCE)
    first[key[located]] = proof.first_difference[located]  # the earliest action is written last
    verdict = pa.array(~differs, mask=~acted | (unproved & ~differs))
    names = pa.array(["unknown", "submitted", "engine"])
    source = take_or_null(names, np.select([~acted, unproved, submitted], [-1, 0, 1], 2))
    return verdict, _int32(first, first < 0), source, differs, unproved


def _reasons(
    parts: Parts, end: Mapping[str, pa.Array], is_open: Bools, is_dropped: Bools, differs: Bools, unproved: Bools
) -> dict[str, Bools]:
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
        reasons.PREFIX_MISMATCH: differs,
        reasons.PREFIX_UNKNOWN: unproved,
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


def _segment_table(parts: Parts, identity: Mapping[str, pa.Array], revisions: pa.Array) -> pa.Table:
    layout, tokens, keys = parts.layout, parts.tokens, parts.keys
    rows = pa.array(layout.key)
    bounds = layout.bounds
    columns = {
        "run_id": keys.run_ids.take(rows),
        "trajectory_id": keys.trajectory_ids.take(rows),
        "attempt": _int32(keys.attempts[layout.key]),
        "is_current": bool_array(parts.attempts.current[layout.key]),
        "segment_index": _int32(layout.index),
        "segment_kind": pa.array([EXECUTION, SUMMARY]).take(pa.array(layout.is_summary.astype(np.int64))),
        "is_accepted": pa.array(_accepted(parts), mask=~layout.is_summary),
        "group_id": identity["group_id"].take(rows),
        "problem_id": identity["problem_id"].take(rows),
        "prompt_token_ids": list_array(
            parts.contexts.bounds, pa.array(parts.contexts.values, INT32), parts.contexts.known
        ),
        "response_token_ids": list_array(bounds, pa.array(tokens.ids, INT32)),
        "rollout_log_probs": list_array(bounds, tokens.log_probs.array()),
        "response_mask": list_array(bounds, bool_array(tokens.trained)),
        "observation_mask": list_array(bounds, bool_array(tokens.observed)),
        "policy_versions": list_array(bounds, pa.array(tokens.versions)),
        "sampling_config": _sampling(parts),
        "tokenizer_revision": revisions.take(rows),
    }
    return pa.table([columns[name] for name in SEGMENT_SCHEMA.names], schema=SEGMENT_SCHEMA)


def _sampling(parts: Parts) -> pa.Array:
    """Sampling configuration of the first action of each segment."""
    layout = parts.layout
    first = np.full(layout.num_segments, -1, np.int64)
    actions = np.flatnonzero(layout.is_action)[::-1]
    first[layout.segment[actions]] = layout.events.row[actions]  # the earliest action is written last
    return take_or_null(parts.kinds["action_sampled"].field("sampling"), first)


def _accepted(parts: Parts) -> Bools:
    """Summary segments of which a rewrite of the same attempt accepted an action."""
    layout = parts.layout
    accepted = np.zeros(layout.num_segments, np.bool_)
    if not layout.is_summary.any():
        return accepted
    rewrites = parts.kinds["context_rewritten"]
    named = rewrites.field("summary_event_id")
    shown = parts.timeline.select(parts.timeline.kind == REWRITE)
    places = ActionPlaces(layout, parts.kinds["action_sampled"])
    for key, row in zip(shown.key.tolist(), shown.row.tolist(), strict=True):
        event_id = named[row].as_py()
        place = places.find(key, event_id) if event_id else None
        if place is not None:
            accepted[place.segment] = True
    return accepted & layout.is_summary
