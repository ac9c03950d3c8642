"""The order of events within an attempt: by event index alone, with gaps, dead letters and conflicts found.

Nothing here looks at tokens. E is the number of rollout-plane events, K the number of attempts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rolltape.schema.fold_inputs import TIMELINE_KINDS, Keys, KindRows
from rolltape.schema.fold_ranges import Array, Bools, Ints, count_by, exclusive_cumsum, ints_of, valid_of

START: Final = 0
RESUME: Final = 1
ACTION: Final = 2
OBSERVATION: Final = 3
REWRITE: Final = 4
END: Final = 5

MAX_LISTED_GAPS: Final = 1_000
"""A gap may be as wide as an int32; only so many missing indexes are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Entries of all attempts, ordered by (attempt, place in it); arrays of length E.

    An entry is an event seen from one attempt: an event that a later attempt takes over is an entry of both. ``row``
    is the row of the entry's kind. ``gap_before`` says that what precedes it is not all on the tape. ``owned`` says
    that the tokens of the event belong to this attempt.
    """

    key: Ints
    kind: Ints
    row: Ints
    event_index: Ints
    gap_before: Bools
    owned: Bools

    def select(self, chosen: Array) -> Timeline:
        """The entries at ``chosen`` (a mask or indexes)."""
        return Timeline(
            key=self.key[chosen],
            kind=self.kind[chosen],
            row=self.row[chosen],
            event_index=self.event_index[chosen],
            gap_before=self.gap_before[chosen],
            owned=self.owned[chosen],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which event indexes of each attempt are accounted for; arrays of length K.

    ``last`` is the largest index known of (-1: none), ``missing`` its lists of gaps (only attempts that have some),
    ``dropped`` whether a dead letter that nobody repaired covers one of its indexes, ``letters`` the ranges of those.
    """

    num_events: Ints
    last: Ints
    missing: Mapping[int, list[int]]
    dropped: Bools
    letters: Mapping[int, list[tuple[int, int]]]


def order_events(kinds: Mapping[str, KindRows], num_keys: int) -> tuple[Timeline, Bools]:
    """All rollout-plane events in order, one for each (attempt, event index), and which attempts have a conflict.

    Two events that claim one index are a conflict, as is one id with two contents, or an event without an index. Of two
    at one index the one with the smaller event id counts, so that the result is a function of the set.
    """
    parts = [kinds[name] for name in TIMELINE_KINDS]
    key = np.concatenate([part.key for part in parts])
    kind = np.concatenate([np.full(part.num_rows, code, np.int64) for code, part in enumerate(parts)])
    row = np.concatenate([np.arange(part.num_rows) for part in parts])
    index = np.concatenate([ints_of(part.column("event_index")) for part in parts])
    conflict = np.zeros(num_keys, np.bool_)
    for rows in kinds.values():
        conflict[rows.key[rows.disputed]] = True
    if len(index) and index.min() < 0:
        placed = index >= 0
        conflict[key[~placed]] = True
        key, kind, row, index = key[placed], kind[placed], row[placed], index[placed]
    place = key * (int(index.max(initial=0)) + 1) + index
    order = np.argsort(place, kind="stable")
    key, kind, row, index, place = key[order], kind[order], row[order], index[order], place[order]
    if len(place) and not np.diff(place).all():
        kept = _one_per_place(parts, place, kind, row)
        conflict[key[~kept]] = True
        key, kind, row, index = key[kept], kind[kept], row[kept], index[kept]
    first = np.diff(key, prepend=-1) != 0
    gap = np.where(first, index != 0, np.diff(index, prepend=-1) != 1)
    owned = np.ones(len(key), np.bool_)
    return Timeline(key=key, kind=kind, row=row, event_index=index, gap_before=gap, owned=owned), conflict


def _one_per_place(parts: list[KindRows], place: Ints, kind: Ints, row: Ints) -> Bools:
    """Of entries with equal ``place`` (adjacent) the one with the smallest event id."""
    kept = np.ones(len(place), np.bool_)
    same = np.flatnonzero(np.diff(place) == 0)
    for value in np.unique(place[same]).tolist():
        low, high = np.searchsorted(place, [value, value + 1])
        ids = [parts[kind[at]].column("event_id")[int(row[at])].as_py() or "" for at in range(low, high)]
        kept[low:high] = False
        kept[low + ids.index(min(ids))] = True
    return kept


def cover(timeline: Timeline, kinds: Mapping[str, KindRows], redriven: pa.Array, keys: Keys) -> Coverage:
    """Account for the event indexes of each attempt.

    Args:
        timeline: own events of each attempt, in order.
        kinds: the events; ``rollout_ended`` names the last index, ``dead_letter`` the ranges that were refused.
        redriven: event ids of the dead letters that were repaired: they account for nothing any more.
        keys: the attempts.
    """
    num_events = count_by(timeline.key, keys.num_keys)
    last = np.full(keys.num_keys, -1, np.int64)
    ends = np.flatnonzero(np.diff(timeline.key, append=-1) != 0)
    last[timeline.key[ends]] = timeline.event_index[ends]
    ended = kinds["rollout_ended"]
    np.maximum.at(last, ended.key, ints_of(ended.field("last_event_index")))
    letters = _open_letters(kinds["dead_letter"], redriven)
    dropped = np.zeros(keys.num_keys, np.bool_)
    for key, ranges in letters.items():
        dropped[key] = True
        last[key] = max(last[key], *(high for _, high in ranges))
    starts = exclusive_cumsum(num_events)
    missing = {}
    for key in np.flatnonzero(num_events != last + 1).tolist():
        present = timeline.event_index[starts[key] : starts[key + 1]]
        gaps = _gaps(present, letters.get(key, []), int(last[key]))
        if gaps:
            missing[key] = gaps
    return Coverage(num_events=num_events, last=last, missing=missing, dropped=dropped, letters=letters)


def _open_letters(letters: KindRows, redriven: pa.Array) -> dict[int, list[tuple[int, int]]]:
    """Ranges of event indexes, by attempt, that lie in dead letters which nobody repaired."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    if not letters.num_rows:
        return ranges
    repaired = set(redriven.to_pylist())
    low, high = ints_of(letters.field("first_event_index")), ints_of(letters.field("last_event_index"))
    counts = (low >= 0) & valid_of(letters.column("attempt"))
    ids = letters.column("event_id")
    for at in np.flatnonzero(counts).tolist():
        if ids[at].as_py() not in repaired:
            ranges.setdefault(int(letters.key[at]), []).append((int(low[at]), max(int(low[at]), int(high[at]))))
    return ranges


def _gaps(present: Ints, letters: list[tuple[int, int]], last: int) -> list[int]:
    """Indexes in [0, last] that are neither present nor in a range, at most ``MAX_LISTED_GAPS`` of them."""
    covered = sorted([*((index, index) for index in present.tolist()), *letters])
    gaps: list[int] = []
    expected = 0
    for low, high in [*covered, (last + 1, last + 1)]:
        gaps.extend(range(expected, min(low, expected + MAX_LISTED_GAPS - len(gaps))))
        expected = max(expected, high + 1)
    return gaps
