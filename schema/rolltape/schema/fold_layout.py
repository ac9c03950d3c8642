"""Cutting attempts into segments, and placing every token event in one (design §4, Fold).

A segment is a maximal run of tokens of one kind under one prefix-extending context. A ``context_rewritten`` starts the
next one with its own context. A summary starts one too where the tape holds no rewrite for the call: its context is
then all that came before, and a second attempt at it starts from the same context as the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow.compute as pc

from rolltape.schema.fold_inputs import KindRows
from rolltape.schema.fold_ranges import (
    Array,
    Bools,
    Ints,
    Lists,
    bools_of,
    copy_ranges,
    count_by,
    exclusive_cumsum,
    first_start,
    floats_of,
    is_contiguous,
    valid_of,
)
from rolltape.schema.fold_schema import SUMMARY
from rolltape.schema.fold_timeline import ACTION, END, OBSERVATION, RESUME, REWRITE, START, Timeline

NO_CONTEXT: Final = 0
FROM_START: Final = 1
FROM_REWRITE: Final = 2
EXTENDS: Final = 3
REPEATS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Segments (S) and the token events in them (P), both in order.

    ``context`` says where a segment's context comes from, ``context_row`` the row of that kind. ``events`` are the
    token events of all segments; ``segment`` is the segment of each, ``start`` its first place among all response
    tokens, ``length`` its tokens. ``bounds`` (S + 1) are the response ranges of the segments.
    """

    key: Ints
    index: Ints
    is_summary: Bools
    context: Ints
    context_row: Ints
    bounds: Ints
    events: Timeline
    segment: Ints
    start: Ints
    length: Ints

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.key)

    @property
    def is_action(self) -> Bools:
        """Which token events are actions."""
        is_action: Bools = self.events.kind == ACTION
        return is_action

    @property
    def num_tokens(self) -> int:
        """Response tokens of all segments."""
        return int(self.bounds[-1])


def lay_out(timeline: Timeline, kinds: Mapping[str, KindRows], actions: Lists, observations: Lists) -> Layout:
    """Cut the timeline into segments; ``actions`` and ``observations`` are the ids of those kinds."""
    events = timeline.select((timeline.kind != RESUME) & (timeline.kind != END))
    is_token = (events.kind == ACTION) | (events.kind == OBSERVATION)
    summary = _summaries(events, kinds["action_sampled"])
    boundary = (np.diff(events.key, prepend=-1) != 0) | (events.kind == REWRITE)
    implied = _implied_boundaries(events, kinds["action_sampled"], summary, boundary)
    boundary |= implied != NO_CONTEXT
    segment = np.cumsum(boundary) - 1
    heads = np.flatnonzero(boundary)
    shown = _shown(events, segment, heads, is_token)
    number = np.cumsum(shown) - 1
    heads = heads[shown]
    context = np.select(
        [implied[heads] != NO_CONTEXT, events.kind[heads] == START, events.kind[heads] == REWRITE],
        [implied[heads], FROM_START, FROM_REWRITE],
        NO_CONTEXT,
    )
    key = events.key[heads]
    tokens = events.select(is_token)
    token_segment = number[segment[is_token]]
    length = np.where(tokens.kind == ACTION, *_lengths(tokens, actions, observations))
    is_summary = np.zeros(len(heads), np.bool_)
    is_summary[token_segment[summary[is_token]]] = True
    ends = exclusive_cumsum(length)
    counts = count_by(token_segment, len(heads))
    return Layout(
        key=key,
        index=_places(key),
        is_summary=is_summary,
        context=context,
        context_row=events.row[heads],
        bounds=ends[exclusive_cumsum(counts)],
        events=tokens,
        segment=token_segment,
        start=ends[:-1],
        length=length,
    )


def _lengths(tokens: Timeline, actions: Lists, observations: Lists) -> tuple[Ints, Ints]:
    """Tokens of each event, read as an action and as an observation."""
    as_action, as_observation = np.zeros(len(tokens.row), np.int64), np.zeros(len(tokens.row), np.int64)
    acts = tokens.kind == ACTION
    as_action[acts] = actions.lengths[tokens.row[acts]]
    as_observation[~acts] = observations.lengths[tokens.row[~acts]]
    return as_action, as_observation


def _summaries(events: Timeline, actions: KindRows) -> Bools:
    """Which events are summary actions."""
    found = np.zeros(len(events.key), np.bool_)
    if actions.num_rows:
        of_row = bools_of(pc.equal(actions.field("action_kind"), SUMMARY))
        if of_row.any():
            acts = events.kind == ACTION
            found[acts] = of_row[events.row[acts]]
    return found


def _implied_boundaries(events: Timeline, actions: KindRows, summary: Bools, boundary: Bools) -> Ints:
    """Where a change of the action's kind, or a second summary, starts a segment that no rewrite announced."""
    implied = np.full(len(events.key), NO_CONTEXT)
    if not summary.any():
        return implied
    places = np.arange(len(events.key))
    is_action = events.kind == ACTION
    segment_head = np.maximum.accumulate(np.where(boundary, places, 0))
    before = np.concatenate([[-1], np.maximum.accumulate(np.where(is_action, places, -1))[:-1]])
    follows = is_action & (before >= segment_head)
    same_kind = summary == summary[before]
    continues = np.zeros(len(events.key), np.bool_)
    continues[is_action] = valid_of(actions.field("continues_event_id"))[events.row[is_action]]
    implied[follows & ~same_kind] = EXTENDS
    implied[follows & same_kind & summary & ~continues] = REPEATS
    return implied


def _shown(events: Timeline, segment: Ints, heads: Ints, is_token: Bools) -> Bools:
    """Segments with token events; of an attempt that has none, the first whose context is known."""
    num_segments = len(heads)
    filled = count_by(segment[is_token], num_segments) > 0
    key = events.key[heads]
    if filled.all():
        return filled
    any_filled = np.zeros(int(key.max(initial=0)) + 1, np.bool_)
    any_filled[key[filled]] = True
    first = np.diff(key, prepend=-1) != 0
    shown: Bools = filled | (first & ~any_filled[key])
    return shown


def _places(groups: Ints) -> Ints:
    """Place of each entry within its (ascending) group, from 0."""
    heads = np.flatnonzero(np.diff(groups, prepend=-1) != 0)
    counts = np.diff(heads, append=len(groups))
    places: Ints = np.arange(len(groups)) - np.repeat(heads, counts)
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """Context tokens of all segments, consecutive: segment s has ``values[bounds[s] : bounds[s + 1]]``."""

    values: Array
    bounds: Ints
    known: Bools

    @property
    def lengths(self) -> Ints:
        """Context tokens of each segment."""
        return np.diff(self.bounds)


def read_contexts(layout: Layout, starts: Lists, rewrites: Lists, response_ids: Array) -> Contexts:
    """The context of each segment: of its start, its rewrite, or implied by the segment before it."""
    from_start, from_rewrite = layout.context == FROM_START, layout.context == FROM_REWRITE
    begin, length = np.zeros(layout.num_segments, np.int64), np.zeros(layout.num_segments, np.int64)
    known = np.zeros(layout.num_segments, np.bool_)
    for chosen, lists, shift in ((from_start, starts, 0), (from_rewrite, rewrites, len(starts.values))):
        rows = layout.context_row[chosen]
        begin[chosen], length[chosen], known[chosen] = (
            lists.starts[rows] + shift,
            lists.lengths[rows],
            lists.valid[rows],
        )
    if from_start.all() and is_contiguous(begin, length):
        at = first_start(begin, length)
        values = floats_of(starts.values.slice(at, int(length.sum())))
        return Contexts(values=values, bounds=exclusive_cumsum(length), known=known)
    pool = [floats_of(starts.values), floats_of(rewrites.values)]
    _imply(layout, pool, begin, length, known, response_ids)
    source = np.concatenate(pool)
    bounds = exclusive_cumsum(length)
    values = np.empty(int(bounds[-1]), np.int32)
    copy_ranges(values, bounds[:-1], source, begin, length)
    return Contexts(values=values, bounds=bounds, known=known)


def _imply(layout: Layout, pool: list[Array], begin: Ints, length: Ints, known: Bools, response_ids: Array) -> None:
    """Add to ``pool`` the contexts that no event spells out, and say where they lie."""
    size = sum(len(values) for values in pool)
    base = np.concatenate(pool)
    extra: dict[int, Array] = {}
    for segment in np.flatnonzero(layout.context >= EXTENDS).tolist():
        before = segment - 1
        known[segment] = known[before]
        if not known[before]:
            continue
        context = extra.get(before, base[begin[before] : begin[before] + length[before]])
        if layout.context[segment] == EXTENDS:
            context = np.concatenate([context, response_ids[layout.bounds[before] : layout.bounds[segment]]])
        extra[segment] = context
        begin[segment], length[segment] = size, len(context)
        size += len(context)
        pool.append(context)
