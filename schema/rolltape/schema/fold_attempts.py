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
    bounds = exclusive_cumsum(np.bincount(timeline.key, minlength=keys.num_keys))
    takers = _takers(attempts)
    gap_before, owned = timeline.gap_before.copy(), timeline.owned.copy()
    pieces: list[tuple[Ints, Ints, Bools, Bools]] = []
    for key, ranges in attempts.taken.items():  # an attempt comes after those that it takes over
        own = np.arange(bounds[key], bounds[key + 1])
        reaches = True
        for source, last_index in ranges:
            entries = np.arange(bounds[source], bounds[source + 1])
            entries = entries[timeline.event_index[entries] <= last_index]
            mine = _owned(timeline.event_index[entries], source, key, takers[source], attempts)
            pieces.append((entries, np.full(len(entries), key), gap_before[entries], mine))
            reaches = len(entries) > last_index
        if not reaches:
            _mark_seam(gap_before, own, timeline)
    for source in {*takers, *attempts.taken}:
        own = np.arange(bounds[source], bounds[source + 1])
        owned[own] = _owned(timeline.event_index[own], source, source, takers.get(source, []), attempts)
    pieces.append((np.arange(len(timeline.key)), timeline.key, gap_before, owned))
    return _merged(timeline, pieces)


def _takers(attempts: Attempts) -> dict[int, list[Taken]]:
    """For each attempt those that take over some of it, with the last index that they take."""
    takers: dict[int, list[Taken]] = {}
    for key, ranges in attempts.taken.items():
        for source, last_index in ranges:
            takers.setdefault(source, []).append(Taken(key, last_index))
    return takers


def _owned(indexes: Ints, source: int, key: int, takers: list[Taken], attempts: Attempts) -> Bools:
    """Whether events of ``source`` at ``indexes`` belong to ``key`` rather than to another that shows them too."""
    mine = (not attempts.abandoned[key], key)
    bound = -1
    for rival, last_index in (Taken(source, np.iinfo(np.int64).max), *takers):
        if (not attempts.abandoned[rival], rival) > mine:
            bound = max(bound, last_index)
    return indexes > bound


def _mark_seam(gap_before: Bools, own: Ints, timeline: Timeline) -> None:
    """Say that something is missing before an attempt's first event after its resumption."""
    after = own[(timeline.kind[own] != RESUME) & (timeline.kind[own] != START)]
    gap_before[after[:1]] = True


def _merged(timeline: Timeline, pieces: list[tuple[Ints, Ints, Bools, Bools]]) -> Timeline:
    """Entries of all attempts: what each took over, oldest first, then its own (the last piece)."""
    entries, key, gap_before, owned = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(key, kind="stable")
    entries = entries[order]
    return Timeline(
        key=key[order],
        kind=timeline.kind[entries],
        row=timeline.row[entries],
        event_index=timeline.event_index[entries],
        gap_before=gap_before[order],
        owned=owned[order],
    )
