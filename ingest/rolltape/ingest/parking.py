"""Records that wait for missing ones before them in their lane: kept within a bound of bytes, else only by offset."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import pyarrow as pa

from rolltape.ingest.lanes import NOTHING, Lane
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition

MAX_PARKED_BYTES: Final = 64 << 20


class Refused(NamedTuple):
    """Why a record is refused whatever its rows are: found by whoever fetched it."""

    reason: str
    detail: str


class Offered(NamedTuple):
    """A record as it was offered to an archive.

    ``offset`` is the log's own (None where the archive numbers), ``checksum`` the value's CRC-32, ``time_us`` the log's
    time stamp of the record, for the dead letters that it may become.
    """

    record: Record
    checksum: int
    offset: int | None = None
    refused: Refused | None = None
    time_us: int | None = None


@dataclass(slots=True)
class _Waiting:
    """What waits in one lane: numbers as a heap, records by their first number, and what was not kept.

    ``beyond`` is the lowest number and ``beyond_offset`` the lowest offset of the records that were not kept.
    """

    numbers: list[int] = field(default_factory=list)
    kept: dict[int, Offered | None] = field(default_factory=dict)
    beyond: int | None = None
    beyond_offset: int | None = None


def _alone(offered: Offered) -> Offered:
    """The record with a value of its own: the one that came may be a slice of something much larger."""
    value = pa.py_buffer(memoryview(offered.record.value).tobytes())
    return offered._replace(record=replace(offered.record, value=value))


class Parking:
    """Waiting records of all lanes. ``num_bytes`` are kept; ``max_bytes`` bounds them."""

    def __init__(self, max_bytes: int = MAX_PARKED_BYTES) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._lanes: dict[Lane, _Waiting] = {}
        self.num_bytes = 0

    def put(self, lane: Lane, first: int, offered: Offered) -> None:
        """Let a record wait. Without an offset only its number is noted: the caller offers it again itself."""
        waiting = self._lanes.setdefault(lane, _Waiting())
        if first in waiting.kept:
            return
        offset, num_bytes = offered.offset, offered.record.num_bytes
        if offset is not None and self.num_bytes + num_bytes > self._max_bytes:
            waiting.beyond = first if waiting.beyond is None else min(first, waiting.beyond)
            waiting.beyond_offset = offset if waiting.beyond_offset is None else min(offset, waiting.beyond_offset)
            return
        heapq.heappush(waiting.numbers, first)
        waiting.kept[first] = None if offset is None else _alone(offered)
        self.num_bytes += 0 if offset is None else num_bytes

    def holds(self, lane: Lane, first: int) -> bool:
        """Whether the record of a lane that starts at ``first`` is kept."""
        waiting = self._lanes.get(lane)
        return waiting is not None and first in waiting.kept

    def lowest(self, lane: Lane) -> int | None:
        """Lowest number that waits in a lane; None for none."""
        waiting = self._lanes.get(lane)
        if waiting is None:
            return None
        numbers = [number for number in (*waiting.numbers[:1], waiting.beyond) if number is not None]
        return min(numbers, default=None)

    def waiting_since(self, lane: Lane) -> int | None:
        """Time stamp of the kept record with the lowest number of a lane; None where there is none."""
        waiting = self._lanes.get(lane)
        offered = None if waiting is None or not waiting.numbers else waiting.kept[waiting.numbers[0]]
        return None if offered is None else offered.time_us

    def lanes(self) -> Iterator[tuple[Lane, int]]:
        """Lanes in which something waits, with the lowest number that does."""
        for lane in list(self._lanes):
            lowest = self.lowest(lane)
            if lowest is not None:
                yield lane, lowest

    def take(self, lane: Lane, up_to: int) -> Offered | None:
        """Remove and return the kept record with the lowest number of a lane, if that is at most ``up_to``."""
        waiting = self._lanes.get(lane)
        if waiting is None or not waiting.numbers or waiting.numbers[0] > up_to:
            return None
        offered = waiting.kept.pop(heapq.heappop(waiting.numbers))
        if offered is not None:
            self.num_bytes -= offered.record.num_bytes
        self._forget_if_empty(lane, waiting)
        return offered

    def take_beyond(self, lane: Lane, up_to: int) -> int | None:
        """The offset from which records of a lane are to be read again, if one of number at most ``up_to`` is."""
        waiting = self._lanes.get(lane)
        if waiting is None or waiting.beyond is None or waiting.beyond > up_to:
            return None
        offset, waiting.beyond, waiting.beyond_offset = waiting.beyond_offset, None, None
        self._forget_if_empty(lane, waiting)
        return offset

    def _forget_if_empty(self, lane: Lane, waiting: _Waiting) -> None:
        if not waiting.numbers and waiting.beyond is None:
            del self._lanes[lane]

    def drop(self, lane: Lane) -> None:
        """Forget what waits in a lane."""
        waiting = self._lanes.pop(lane, None)
        for offered in waiting.kept.values() if waiting is not None else ():
            self.num_bytes -= offered.record.num_bytes if offered is not None else 0

    def oldest_offset(self, partition: Partition) -> int | None:
        """Lowest offset that waits in a partition, kept or not; None for none."""
        return min(self._offsets(partition), default=None)

    def _offsets(self, partition: Partition) -> Iterator[int]:
        for lane, waiting in self._lanes.items():
            if lane.log_partition == partition:
                yield from (
                    item.offset for item in waiting.kept.values() if item is not None and item.offset is not None
                )
                if waiting.beyond_offset is not None:
                    yield waiting.beyond_offset


class Rereads:
    """Offsets of partitions that are to be offered again, as parked records among them were not kept."""

    def __init__(self) -> None:
        """Nothing is to be read again."""
        self._ranges: dict[Partition, tuple[int, int]] = {}

    def want(self, partition: Partition, offset: int, until: int) -> None:
        """Have ``offset`` to ``until`` offered again."""
        known, end = self._ranges.get(partition, (offset, until))
        self._ranges[partition] = (min(offset, known), max(until, end))

    def next_offset(self, partition: Partition) -> int | None:
        """The next offset of a partition that is to be offered again; None for none."""
        return self._ranges[partition][0] if partition in self._ranges else None

    def pass_offset(self, partition: Partition, offset: int) -> None:
        """``offset`` was offered."""
        start, until = self._ranges.get(partition, (0, NOTHING))
        if start <= offset < until:
            self._ranges[partition] = (offset + 1, until)
        elif start <= offset:
            self._ranges.pop(partition, None)
