"""Kept supports: which tokens top-p, top-k or min-p left to sample from, token by token, where the tape says so.

Log-probs that an engine renormalised over them can be compared only with log-probs over the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from rolltape.schema.columns import INT32, list_of
from rolltape.schema.fold_inputs import KindRows
from rolltape.schema.fold_layout import Layout
from rolltape.schema.fold_ranges import (
    Bools,
    Ints,
    count_by,
    exclusive_cumsum,
    expand_ranges,
    ints_of,
    list_array,
    lists_of,
)
from rolltape.schema.fold_tokens import limits_support

if TYPE_CHECKING:
    from rolltape.schema.fold_parts import Parts

SUPPORT_SCHEMA: Final = pa.schema(
    [
        pa.field("segment", pa.int64(), nullable=False),  # row among the fold's segments
        pa.field("is_whole", pa.bool_(), nullable=False),  # every sampled token of a limited action has its support
        pa.field("counts", list_of(INT32)),  # kept tokens of each response token, 0: of the whole vocabulary
        pa.field("token_ids", pa.large_list(INT32)),  # their ids, token by token
    ]
)
"""Segments with an action whose log-probs are over a kept support that the tape holds; null lists if not whole."""


class _Kept(NamedTuple):
    """Supports of some actions: ``counts`` of each of their tokens, and the ids of all those, one after the other."""

    counts: Ints
    token_ids: Ints


def support_table(parts: Parts) -> pa.Table:
    """Kept supports as a table of :data:`SUPPORT_SCHEMA`; nothing is looked at where no action has one."""
    layout, actions = parts.layout, parts.kinds["action_sampled"]
    stored = actions.field("support_token_ids")
    if stored.null_count == len(stored):
        return SUPPORT_SCHEMA.empty_table()
    events = np.flatnonzero(layout.is_action & (layout.length > 0))
    events = events[(limits_support(actions) & lists_of(stored).valid)[layout.events.row[events]]]
    if not len(events):
        return SUPPORT_SCHEMA.empty_table()
    events, broken = _sound(layout, actions, parts.tokens.sampled.mask, events)
    segments = np.unique(np.concatenate([layout.segment[events], broken]))
    is_whole = ~np.isin(segments, broken)
    return _table(layout, actions, segments, is_whole, events[~np.isin(layout.segment[events], broken)])


def _sound(layout: Layout, actions: KindRows, sampled: Bools, events: Ints) -> tuple[Ints, Ints]:
    """Those of some actions whose supports can be used, and the segments of the others.

    A support is of distinct ids, and of at least one where the token was sampled.
    """
    rows, length = layout.events.row[events], layout.length[events]
    ids, offsets = lists_of(actions.field("support_token_ids")), lists_of(actions.field("support_offsets"))
    numbers = ints_of(offsets.values)
    framed = offsets.lengths[rows] == length + 1
    framed[framed] = numbers[offsets.starts[rows[framed]]] == 0
    framed[framed] = numbers[offsets.starts[rows[framed]] + length[framed]] == ids.lengths[rows[framed]]
    good, rows, length = events[framed], rows[framed], length[framed]
    counts = _counts(actions, rows, length)
    action = np.repeat(np.arange(len(good)), length)
    wrong = (counts < 0) | ((counts == 0) & sampled[expand_ranges(layout.start[good], length)])
    falling = count_by(action[wrong], len(good)) > 0
    good, rows, length = good[~falling], rows[~falling], length[~falling]
    kept = _kept(actions, rows, length)
    token = np.repeat(np.arange(len(kept.counts)), kept.counts)
    order = np.lexsort((kept.token_ids, token))
    twice = (np.diff(token[order]) == 0) & (np.diff(kept.token_ids[order]) == 0)
    bad = token[order][1:][twice]
    bad = np.concatenate([bad, token[kept.token_ids < 0]])
    action = np.repeat(np.arange(len(good)), length)
    usable = count_by(action[bad], len(good)) == 0
    good = good[usable]
    return good, np.unique(layout.segment[np.setdiff1d(events, good)])


def _counts(actions: KindRows, rows: Ints, length: Ints) -> Ints:
    offsets = lists_of(actions.field("support_offsets"))
    numbers, places = ints_of(offsets.values), expand_ranges(offsets.starts[rows], length)
    counts: Ints = numbers[places + 1] - numbers[places]
    return counts


def _kept(actions: KindRows, rows: Ints, length: Ints) -> _Kept:
    ids = lists_of(actions.field("support_token_ids"))
    places = expand_ranges(ids.starts[rows], ids.lengths[rows])
    return _Kept(_counts(actions, rows, length), ints_of(ids.values)[places])


def _table(layout: Layout, actions: KindRows, segments: Ints, is_whole: Bools, events: Ints) -> pa.Table:
    """Rows for ``segments``, with the supports of the actions ``events`` of those that are whole."""
    length = layout.length[events]
    kept = _kept(actions, layout.events.row[events], length)
    counts = np.zeros(layout.num_tokens, np.int32)
    counts[expand_ranges(layout.start[events], length)] = kept.counts
    starts = layout.bounds[segments]
    lengths = np.where(is_whole, layout.bounds[segments + 1] - starts, 0)
    flat = counts[expand_ranges(starts, lengths)]
    bounds = exclusive_cumsum(lengths)
    id_bounds = exclusive_cumsum(flat.astype(np.int64))[bounds]
    columns = [
        pa.array(segments),
        pa.array(is_whole),
        list_array(bounds, pa.array(flat, INT32), is_whole),
        pa.LargeListArray.from_arrays(
            pa.array(id_bounds), pa.array(kept.token_ids.astype(np.int32)), mask=pa.array(~is_whole)
        ).cast(SUPPORT_SCHEMA.field("token_ids").type),
    ]
    return pa.table(columns, schema=SUPPORT_SCHEMA)
