"""Attempts at one rollout: which is current, what a resumed one takes over, and who owns each sampled token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rolltape.schema.fold_inputs import Keys, KindRows
from rolltape.schema.fold_ranges import Bools, Ints, exclusive_cumsum, ints_of
from rolltape.schema.fold_timeline import RESUME, START, Coverage, Timeline


class Taken(NamedTuple):
    """Events ``0 … last_index`` of the attempt ``key``, taken over by a later attempt."""

    key: int
    last_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Standing of each attempt; arrays of length K.

    ``taken`` lists what a resumed attempt takes over, oldest first. ``incomplete`` and ``dropped`` say that an attempt
    takes over a range with a gap, or with a dead letter.
    """

    abandoned: Bools
    current: Bools
    taken: Mapping[int, tuple[Taken, ...]]
    incomplete: Bools
    dropped: Bools


def judge_attempts(keys: Keys, kinds: Mapping[str, KindRows], timeline: Timeline, coverage: Coverage) -> Attempts:
    """Abandoned wins over any end; of the others of a trajectory the newest is current."""
    abandoned = np.zeros(keys.num_keys, np.bool_)
    abandoned[kinds["attempt_abandoned"].key] = True
    current = np.zeros(keys.num_keys, np.bool_)
    standing = np.flatnonzero(~abandoned)
    newest = np.diff(keys.trajectory[standing], append=-1) != 0
    current[standing[newest]] = True
    taken, incomplete = _taken_over(keys, kinds["rollout_resumed"], timeline)
    dropped = np.zeros(keys.num_keys, np.bool_)
    starts = exclusive_cumsum(coverage.num_events)
    for key, ranges in taken.items():
        for source, last_index in ranges:
            own = timeline.event_index[starts[source] : starts[source + 1]]
            letters = [letter for letter in coverage.letters.get(source, ()) if letter[0] <= last_index]
            dropped[key] |= bool(letters)
            present = int(np.searchsorted(own, last_index, side="right"))
            incomplete[key] |= present <= last_index and not letters
    return Attempts(abandoned=abandoned, current=current, taken=taken, incomplete=incomplete, dropped=dropped)


def _taken_over(keys: Keys, resumed: KindRows, timeline: Timeline) -> tuple[dict[int, tuple[Taken, ...]], Bools]:
    """What each resumed attempt takes over, and which name an attempt that the tape does not know."""
    unknown = np.zeros(keys.num_keys, np.bool_)
    taken: dict[int, tuple[Taken, ...]] = {}
    if not resumed.num_rows:
        return taken, unknown
    sources, last_indexes = ints_of(resumed.field("from_attempt")), ints_of(resumed.field("from_event_index"))
    entries = np.flatnonzero(timeline.kind == RESUME)
    for entry in entries.tolist():  # ordered by attempt, so what a source took over itself is known already
        key, row = int(timeline.key[entry]), int(timeline.row[entry])
        if key in taken:
            continue
        attempt = int(sources[row])
        source = _key_of(keys, key, attempt) if attempt < keys.attempts[key] else None
        if source is None:
            unknown[key] = True
            continue
        taken[key] = (*taken.get(source, ()), Taken(source, int(last_indexes[row])))
        unknown[key] |= unknown[source]
    return taken, unknown


def _key_of(keys: Keys, key: int, attempt: int) -> int | None:
    """Number of another attempt at the trajectory of ``key``."""
    low, high = np.searchsorted(keys.trajectory, [keys.trajectory[key], keys.trajectory[key] + 1])
    place = low + int(np.searchsorted(keys.attempts[low:high], attempt))
    return place if place < high and keys.attempts[place] == attempt else None


def take_over(timeline: Timeline, keys: Keys, attempts: Attempts) -> Timeline:
    """Put the events that a resumed attempt takes over before its own, and settle who owns their tokens.

    An event that several attempts show belongs to one of them: to one that is not abandoned before one that is, to the
    newest of those. So the current attempt owns all that it shows.
    """
    if not attempts.taken:
        return timeline
    starts = exclusive_cumsum(np.bincount(timeline.key, minlength=keys.num_keys))
    pieces = [(np.arange(len(timeline.key)), timeline.key)]
    gap_before, owned = timeline.gap_before.copy(), [np.ones(len(timeline.key), np.bool_)]
    hidden = np.zeros(len(timeline.key), np.bool_)
    for key, ranges in attempts.taken.items():
        restarted = False
        for source, last_index in ranges:
            own = timeline.event_index[starts[source] : starts[source + 1]]
            entries = np.arange(starts[source], starts[source] + np.searchsorted(own, last_index, side="right"))
            pieces.append((entries, np.full(len(entries), key)))
            owned.append(_owned(timeline.event_index[entries], source, key, attempts))
            restarted |= bool(np.any(timeline.kind[entries] == START))
        own_entries = np.arange(starts[key], starts[key + 1])
        hidden[own_entries] = restarted & (timeline.kind[own_entries] == START)
        owned[0][own_entries] = _owned(timeline.event_index[own_entries], key, key, attempts)
    for source in {range_.key for ranges in attempts.taken.values() for range_ in ranges}:
        own_entries = np.arange(starts[source], starts[source + 1])
        owned[0][own_entries] = _owned(timeline.event_index[own_entries], source, source, attempts)
    return _merged(timeline, pieces, np.concatenate(owned), gap_before, hidden, attempts)


def _owned(indexes: Ints, source: int, key: int, attempts: Attempts) -> Bools:
    """Whether events of ``source`` at ``indexes`` belong to ``key`` rather than to another that shows them too."""
    mine = (not attempts.abandoned[key], key)
    bound = -1
    rivals = [(source, np.iinfo(np.int64).max)]
    rivals += [(taker, r.last_index) for taker, ranges in attempts.taken.items() for r in ranges if r.key == source]
    for rival, last_index in rivals:
        if (not attempts.abandoned[rival], rival) > mine:
            bound = max(bound, last_index)
    return indexes > bound


def _merged(
    timeline: Timeline,
    pieces: list[tuple[Ints, Ints]],
    owned: Bools,
    gap_before: Bools,
    hidden: Bools,
    attempts: Attempts,
) -> Timeline:
    """All entries ordered by attempt: first what it took over, oldest first, then its own."""
    # Own entries are the first piece; a stable sort by (attempt, own last) keeps the order of the others.
    entries = np.concatenate([entries for entries, _ in pieces])
    key = np.concatenate([keys for _, keys in pieces])
    is_own = np.arange(len(entries)) < len(timeline.key)
    shown = ~(is_own & hidden[entries])
    order = np.argsort(key * 2 + is_own, kind="stable")
    order = order[shown[order]]
    gaps = gap_before[entries][order]
    merged = Timeline(
        key=key[order],
        kind=timeline.kind[entries][order],
        row=timeline.row[entries][order],
        event_index=timeline.event_index[entries][order],
        gap_before=gaps,
        owned=owned[order],
    )
    return _with_seams(merged, is_own[order], attempts)


def _with_seams(merged: Timeline, is_own: Bools, attempts: Attempts) -> Timeline:
    """Mark a gap where a taken-over range does not reach the index that it was taken over to."""
    gaps = merged.gap_before
    for key in attempts.taken:
        low, high = np.searchsorted(merged.key, [key, key + 1])
        own = low + np.flatnonzero(is_own[low:high])
        if len(own) and (attempts.incomplete[key] or attempts.dropped[key]):
            gaps[own[0]] = True
    return merged
