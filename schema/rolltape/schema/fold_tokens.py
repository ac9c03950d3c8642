"""The tokens of all segments as flat arrays: ids, log-probs, masks, policy versions. N is the number of tokens.

Where the token events lie on the tape in the order of the fold, the arrays are slices of the tape; nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.columns import FLOAT32
from rolltape.schema.fold_inputs import KindRows
from rolltape.schema.fold_layout import Layout
from rolltape.schema.fold_ranges import (
    Array,
    Bools,
    Ints,
    Lists,
    bools_of,
    constant,
    copy_ranges,
    count_by,
    expand_ranges,
    field_of,
    first_start,
    floats_of,
    ints_of,
    is_contiguous,
    lists_of,
    nullable_array,
    spread_ranges,
    valid_of,
)
from rolltape.schema.fold_schema import UNKNOWN_VERSION
from rolltape.schema.trust import MAX_LOG_PROB, SENTINELS, trusted_log_probs

_BLOCK: Final = 1 << 16  # log-probs that fit the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """float32 log-probs ``[N]``; ``valid`` is false where the tape has none, and the value there is 0.0 (None: all)."""

    values: Array
    valid: Bools | None

    def array(self) -> pa.Array:
        """As an Arrow array with nulls."""
        return nullable_array(self.values, self.valid, FLOAT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRuns:
    """Policy versions by run, only runs with tokens, in order; R in all.

    ``action`` is the token event of each run. ``version`` is :data:`UNKNOWN_VERSION` where it is null.
    """

    action: Ints
    start: Ints
    length: Ints
    version: Ints
    epoch: Ints
    policy: pa.Array


def flat_ids(layout: Layout, actions: Lists, observations: Lists) -> Array:
    """Int32 ``[N]``: ids of all token events."""
    is_action = layout.is_action
    rows = layout.events.row
    if is_action.all():
        begin = actions.starts[rows]
        if is_contiguous(begin, layout.length):
            return floats_of(actions.values.slice(first_start(begin, layout.length), layout.num_tokens))
    ids = np.empty(layout.num_tokens, np.int32)
    for chosen, lists in ((is_action, actions), (~is_action, observations)):
        if chosen.any():
            begin = lists.starts[rows[chosen]]
            copy_ranges(ids, layout.start[chosen], floats_of(lists.values), begin, layout.length[chosen])
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens that the policy sampled, as opposed to observed or injected ones.

    ``mask`` is ``[N]``, ``counts`` ``[P]`` says how many each token event has. ``whole`` says that every token of every
    action is sampled, ``everything`` that there are no other tokens.
    """

    mask: Bools
    counts: Ints
    whole: bool
    everything: bool


def sampled_tokens(layout: Layout, actions: KindRows) -> Sampled:
    """Which tokens the policy sampled: all of an action, or where its origin is declared only the runs called so."""
    is_action = layout.is_action
    counts = np.where(is_action, layout.length, 0)
    runs = lists_of(actions.field("origin_runs"))
    declared = np.flatnonzero(is_action)
    declared = declared[runs.lengths[layout.events.row[declared]] > 0]
    if is_action.all() and not len(declared):
        return Sampled(mask=constant(True, layout.num_tokens), counts=counts, whole=True, everything=True)
    mask = np.repeat(is_action, layout.length)
    for event in declared.tolist():
        row = int(layout.events.row[event])
        begin, length = int(layout.start[event]), int(layout.length[event])
        own = _sampled_of(runs.values.slice(int(runs.starts[row]), int(runs.lengths[row])), length)
        mask[begin : begin + length] = own
        counts[event] = int(own.sum())
    whole = not len(declared) or bool((counts == layout.length)[is_action].all())
    return Sampled(mask=mask, counts=counts, whole=whole, everything=whole and bool(is_action.all()))


def _sampled_of(runs: pa.Array, length: int) -> Bools:
    """Tokens of one action that lie in a run whose origin is ``sampled``."""
    own = np.zeros(length, np.bool_)
    for run in runs.to_pylist():
        if run is not None and run["origin"] == "sampled":
            low = min(max(run["start"] or 0, 0), length)
            own[low : low + max(run["length"] or 0, 0)] = True
    return own


def flat_log_probs(layout: Layout, actions: KindRows, ids: Lists, sampled: Sampled) -> tuple[LogProbs, Bools]:
    """Log-probs ``[N]`` of the sampled tokens, and which token events have none although they sampled some.

    A list whose length is not that of the ids says nothing about any token: it counts as absent.
    """
    events = np.flatnonzero(layout.is_action & (layout.length > 0))
    rows = layout.events.row[events]
    lists = lists_of(actions.column("rollout_log_probs"))
    usable = (lists.valid & (lists.lengths == ids.lengths))[rows]
    absent = np.zeros(len(layout.length), np.bool_)
    absent[events[~usable]] = sampled.counts[events[~usable]] > 0
    begin, length = lists.starts[rows], layout.length[events]
    if sampled.everything and usable.all() and is_contiguous(begin, length):
        found = lists.values.slice(first_start(begin, length), layout.num_tokens)
        return LogProbs(values=floats_of(found), valid=valid_of(found) if found.null_count else None), absent
    values = np.zeros(layout.num_tokens, np.float32)
    start, begin, length = layout.start[events[usable]], begin[usable], length[usable]
    copy_ranges(values, start, floats_of(lists.values), begin, length)
    complete = usable.all() and not lists.values.null_count
    if complete and sampled.whole:
        return LogProbs(values=values, valid=None if sampled.everything else sampled.mask), absent
    valid = np.zeros(layout.num_tokens, np.bool_)
    copy_ranges(valid, start, valid_of(lists.values), begin, length)
    valid &= sampled.mask
    values[~valid] = 0.0
    return LogProbs(values=values, valid=valid), absent


def read_version_runs(layout: Layout, actions: KindRows) -> VersionRuns:
    """Policy-version runs of all actions, cut to the tokens that they have."""
    events = np.flatnonzero(layout.is_action)
    lists = lists_of(actions.field("version_runs"))
    rows = layout.events.row[events]
    run_rows = expand_ranges(lists.starts[rows], lists.lengths[rows])
    action = np.repeat(events, lists.lengths[rows])
    runs = lists.values

    def of_run(name: str, null: int) -> Ints:
        return ints_of(field_of(runs, name), null=null)[run_rows]

    start = np.clip(of_run("start", 0), 0, layout.length[action])
    length = np.clip(of_run("length", 0), 0, layout.length[action] - start)
    kept = length > 0
    policy = field_of(runs, "policy_id").take(pa.array(run_rows[kept]))
    return VersionRuns(
        action=action[kept],
        start=layout.start[action[kept]] + start[kept],
        length=length[kept],
        version=np.maximum(of_run("version", UNKNOWN_VERSION)[kept], UNKNOWN_VERSION),
        epoch=of_run("run_epoch", -1)[kept],
        policy=policy,
    )


def flat_versions(layout: Layout, runs: VersionRuns, sampled: Sampled) -> Ints:
    """Int64 ``[N]``: policy version of each sampled token, :data:`UNKNOWN_VERSION` elsewhere."""
    versions: Ints = spread_ranges(runs.start, runs.length, runs.version, layout.num_tokens, UNKNOWN_VERSION)
    if not sampled.whole:
        versions[~sampled.mask] = UNKNOWN_VERSION
    return versions


def observation_tokens(layout: Layout) -> Bools:
    """Bool ``[N]``: tokens of observations."""
    if layout.is_action.all():
        return constant(False, layout.num_tokens)
    observed: Bools = np.repeat(~layout.is_action, layout.length)
    return observed


def owned_tokens(layout: Layout, sampled: Sampled) -> Bools:
    """Bool ``[N]``: sampled tokens that belong to the attempt that shows them."""
    if layout.events.owned.all():
        return sampled.mask
    owned: Bools = sampled.mask & np.repeat(layout.events.owned, layout.length)
    return owned


def count_untrusted(layout: Layout, log_probs: LogProbs, sampled: Sampled, num_keys: int) -> Ints:
    """Sampled tokens of each attempt whose log-prob may not be trusted."""
    counts = np.zeros(num_keys, np.int64)
    for low in range(0, layout.num_tokens, _BLOCK):
        block = slice(low, low + _BLOCK)
        valid = None if log_probs.valid is None else log_probs.valid[block]
        if valid is None and _surely_trusted(log_probs.values[block]):
            continue
        trusted = trusted_log_probs(log_probs.values[block], valid)
        if not trusted.all():
            places = low + np.flatnonzero(sampled.mask[block] & ~trusted)
            events = np.searchsorted(layout.start, places, side="right") - 1
            counts += count_by(layout.events.key[events], num_keys)
    return counts


def _surely_trusted(values: Array) -> bool:
    """Whether the bounds of a block alone say that all of it is trusted (a NaN makes both of them NaN)."""
    return bool(values.max() <= MAX_LOG_PROB and values.min() > max(SENTINELS))


def limits_support(actions: KindRows) -> Bools:
    """For each action whether its log-probs are over a part of the vocabulary: processed, of a limited distribution."""
    sampling = actions.field("sampling")

    def of(name: str) -> pa.Array:
        return field_of(sampling, name)

    cut = (
        bools_of(pc.less(of("top_p"), 1.0))
        | bools_of(pc.greater(of("top_k"), 0))
        | bools_of(pc.greater(of("min_p"), 0.0))
    )
    raw = bools_of(pc.equal(of("logprobs_mode"), "raw_logprobs"))
    limited: Bools = cut & ~raw
    return limited


def support_is_known(actions: KindRows) -> Bools:
    """For each action whether its log-probs are over the whole vocabulary, or over a support that the tape holds."""
    stored = valid_of(actions.field("support_token_ids")) & valid_of(actions.field("support_offsets"))
    known: Bools = ~limits_support(actions) | stored
    return known
