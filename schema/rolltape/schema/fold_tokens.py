"""The tokens of all segments as flat arrays: ids, log-probs, masks, policy versions. N is the number of tokens.

Where the token events lie on the tape in the order of the fold, the arrays are slices of the tape; nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    copy_ranges,
    expand_ranges,
    fill_ranges,
    first_start,
    floats_of,
    ints_of,
    is_contiguous,
    lists_of,
    nullable_array,
    valid_of,
)
from rolltape.schema.fold_schema import UNKNOWN_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """float32 log-probs; ``valid`` is false where the tape has none, and the value there is 0.0."""

    values: Array
    valid: Bools

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
    """int32 ``[N]``: ids of all token events."""
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


def sampled_tokens(layout: Layout, actions: KindRows) -> Bools:
    """bool ``[N]``: tokens that the policy sampled, as opposed to observed or injected ones."""
    is_action = layout.is_action
    sampled = np.ones(layout.num_tokens, np.bool_)
    if not is_action.all():
        sampled = np.repeat(is_action, layout.length)
    if not actions.num_rows:
        return sampled
    runs = lists_of(actions.field("origin_runs"))
    if not runs.lengths.any():
        return sampled
    for event in np.flatnonzero(is_action & (runs.lengths[layout.events.row] > 0 if is_action.all() else is_action)):
        row = int(layout.events.row[event])
        if runs.lengths[row]:
            _apply_origin(sampled, layout, int(event), runs.values.slice(int(runs.starts[row]), int(runs.lengths[row])))
    return sampled


def _apply_origin(sampled: Bools, layout: Layout, event: int, runs: pa.Array) -> None:
    """Of an action with declared origins only the runs called ``sampled`` are the policy's."""
    begin, length = int(layout.start[event]), int(layout.length[event])
    sampled[begin : begin + length] = False
    for run in runs.to_pylist():
        if run is not None and run["origin"] == "sampled":
            low = min(max(run["start"] or 0, 0), length)
            sampled[begin + low : begin + min(length, low + max(run["length"] or 0, 0))] = True


def flat_log_probs(layout: Layout, actions: KindRows, ids: Lists, sampled: Bools) -> tuple[LogProbs, Bools]:
    """Log-probs ``[N]`` of the sampled tokens, and which token events have none although they sampled some.

    A list whose length is not that of the ids says nothing about any token: it counts as absent.
    """
    is_action = layout.is_action
    rows = layout.events.row
    lists = lists_of(actions.column("rollout_log_probs"))
    usable = np.zeros(len(rows), np.bool_)
    usable[is_action] = (lists.valid & (lists.lengths == ids.lengths))[rows[is_action]]
    filled = layout.length > 0
    begin = np.zeros(len(rows), np.int64)
    begin[is_action] = lists.starts[rows[is_action]]
    whole = bool((usable | ~filled).all()) and bool(sampled.all()) and is_contiguous(begin, layout.length)
    if whole:
        found = lists.values.slice(first_start(begin, layout.length), layout.num_tokens)
        return LogProbs(values=_sanitised(found), valid=valid_of(found)), np.zeros(len(rows), np.bool_)
    values, valid = np.zeros(layout.num_tokens, np.float32), np.zeros(layout.num_tokens, np.bool_)
    chosen = usable & filled
    place = (layout.start[chosen], begin[chosen], layout.length[chosen])
    copy_ranges(values, place[0], _sanitised(lists.values), place[1], place[2])
    copy_ranges(valid, place[0], valid_of(lists.values), place[1], place[2])
    valid &= sampled
    values[~valid] = 0.0
    return LogProbs(values=values, valid=valid), is_action & filled & ~usable


def _sanitised(values: pa.Array) -> Array:
    """float32 values with 0.0 under every null; NaN and infinities stay as they are."""
    return floats_of(values)


def read_version_runs(layout: Layout, actions: KindRows) -> VersionRuns:
    """Policy-version runs of all actions, cut to the tokens that they have."""
    events = np.flatnonzero(layout.is_action)
    lists = lists_of(actions.field("version_runs"))
    rows = layout.events.row[events]
    run_rows = expand_ranges(lists.starts[rows], lists.lengths[rows])
    action = np.repeat(events, lists.lengths[rows])
    runs = lists.values

    def of_run(name: str, null: int) -> Ints:
        return ints_of(pc.struct_field(runs, [runs.type.get_field_index(name)]), null=null)[run_rows]

    start = np.clip(of_run("start", 0), 0, layout.length[action])
    length = np.clip(of_run("length", 0), 0, layout.length[action] - start)
    kept = length > 0
    policy = pc.struct_field(runs, [runs.type.get_field_index("policy_id")]).take(pa.array(run_rows[kept]))
    return VersionRuns(
        action=action[kept],
        start=layout.start[action[kept]] + start[kept],
        length=length[kept],
        version=np.maximum(of_run("version", UNKNOWN_VERSION)[kept], UNKNOWN_VERSION),
        epoch=of_run("run_epoch", -1)[kept],
        policy=policy,
    )


def flat_versions(layout: Layout, runs: VersionRuns, sampled: Bools) -> Ints:
    """int64 ``[N]``: policy version of each sampled token, :data:`UNKNOWN_VERSION` elsewhere."""
    if is_contiguous(runs.start, runs.length) and int(runs.length.sum()) == layout.num_tokens:
        versions: Ints = np.repeat(runs.version, runs.length)
    else:
        versions = np.full(layout.num_tokens, UNKNOWN_VERSION, np.int64)
        fill_ranges(versions, runs.start, runs.length, runs.version)
    if not sampled.all():
        versions[~sampled] = UNKNOWN_VERSION
    return versions


def observation_tokens(layout: Layout) -> Bools:
    """bool ``[N]``: tokens of observations."""
    is_action = layout.is_action
    if is_action.all():
        return np.zeros(layout.num_tokens, np.bool_)
    observed: Bools = np.repeat(~is_action, layout.length)
    return observed


def owned_tokens(layout: Layout, sampled: Bools) -> Bools:
    """bool ``[N]``: sampled tokens that belong to the attempt that shows them."""
    if layout.events.owned.all():
        return sampled
    owned: Bools = sampled & np.repeat(layout.events.owned, layout.length)
    return owned


def support_is_known(actions: KindRows) -> Bools:
    """For each action whether its log-probs are over the whole vocabulary, or over a support that the tape holds."""
    sampling = actions.field("sampling")

    def of(name: str) -> pa.Array:
        return pc.struct_field(sampling, [sampling.type.get_field_index(name)])

    cut = (
        bools_of(pc.less(of("top_p"), 1.0))
        | bools_of(pc.greater(of("top_k"), 0))
        | bools_of(pc.greater(of("min_p"), 0.0))
    )
    raw = bools_of(pc.equal(of("logprobs_mode"), "raw_logprobs"))
    stored = valid_of(actions.field("support_token_ids")) & valid_of(actions.field("support_offsets"))
    known: Bools = ~cut | raw | stored
    return known
