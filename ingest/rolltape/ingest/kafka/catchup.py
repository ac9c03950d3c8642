"""Catching up from the lake: the rows of one snapshot from a cursor on, in bounded portions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from rolltape.ingest.lanes import lane_marks
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.kinds import KINDS
from rolltape.store.lake import Lake
from rolltape.store.row_filter import RowFilter
from rolltape.store.snapshot import DataFile, Snapshot
from rolltape.store.tail import Delivery, split_by_partition

PORTION_ROWS: Final = 65_536


class Portion(NamedTuple):
    """Deliveries, and the cursor behind them."""

    deliveries: list[Delivery]
    cursor: Cursor


def catch_up(
    lake: Lake, snapshot: Snapshot, start: Cursor, topics: Collection[str], kinds: Collection[str] | None
) -> Iterator[Portion]:
    """Rows of a snapshot at and after ``start``, ordered within each portion by partition and offset.

    A lake that is fed from Kafka may hold rows beyond its positions, where a record before them waits for missing
    ones; they are delivered too, and the last cursor lies behind them.

    Raises:
        VacuumedError: a data file is gone; take a newer snapshot.
    """
    every = {*snapshot.cursor, *start, *(lane.log_partition for lane in lane_marks(snapshot.transactions))}
    places = sorted(place for place in every if place.topic in topics)
    wanted = tuple(KINDS) if kinds is None else tuple(kinds)
    ends = {place: snapshot.cursor[place] for place in places}
    cursor = start
    for upto in _windows(snapshot, start, wanted):
        window = Cursor({place: max(upto, cursor[place]) for place in places})
        found = [item for kind in wanted for item in _read(lake, snapshot, kind, cursor, window, topics)]
        for item in found:
            ends[item.partition] = max(item.last_offset + 1, ends.get(item.partition, 0))
        cursor = Cursor(
            {**cursor.offsets, **{place: max(min(upto, end), cursor[place]) for place, end in ends.items()}}
        )
        yield Portion(sorted(found, key=_order), cursor)
    yield Portion([], Cursor({**cursor.offsets, **{place: max(end, cursor[place]) for place, end in ends.items()}}))


def _windows(snapshot: Snapshot, start: Cursor, kinds: Sequence[str]) -> Iterator[int]:
    """Offsets at which portions end, ascending: each lets some tens of thousands of rows through."""
    files = [file for kind in kinds for file in snapshot.files_of(kind, since=start)]
    ends = sorted((_last_offset(file), file.num_rows) for file in files)
    num_rows = 0
    for last, rows in ends:
        num_rows += rows
        if num_rows >= PORTION_ROWS:
            num_rows = 0
            yield last + 1
    if num_rows:
        yield ends[-1][0] + 1


def _last_offset(file: DataFile) -> int:
    return file.max_log_offset if file.max_log_offset is not None else 0


def _read(
    lake: Lake, snapshot: Snapshot, kind: str, since: Cursor, as_of: Cursor, topics: Collection[str]
) -> Iterator[Delivery]:
    files = snapshot.files_of(kind, since=since, as_of=as_of)
    files = tuple(file for file in files if file.partition is None or file.partition.topic in topics)
    if not files:
        return
    table = lake.read_files(files, kind, None, RowFilter(since=since, as_of=as_of))
    if not table.num_rows:
        return
    for place, rows in split_by_partition(table):
        if place.topic in topics:
            yield Delivery.of(kind, place, rows, snapshot.version)


def _order(delivery: Delivery) -> tuple[Partition, int, int]:
    return (delivery.partition, delivery.first_offset, delivery.last_offset)
