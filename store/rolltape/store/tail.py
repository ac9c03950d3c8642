"""The live tail: follow a lake commit by commit.

A tail first delivers what the snapshot holds at and after its cursor, then reads ``_delta_log/<version>.json`` as they
appear and decodes the data files that bring new rows. Compaction moves rows without adding any, so it is invisible
here; where the log was cleaned past the tail's version, it goes on from a new snapshot by log offsets.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import VacuumedError
from rolltape.schema.kinds import KINDS
from rolltape.store.lake import Lake
from rolltape.store.row_filter import RowFilter, rows_at, rows_where
from rolltape.store.snapshot import LANE_TRANSACTION, DataFile, LogCommit, Snapshot, log_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Seconds between two looks for the next version and between two questions whether the log was cleaned past it.

    Looks are ``quick_s`` apart after a delivery, and ``slow_s`` after a quiet time.
    """

    quick_s: float
    slow_s: float
    check_s: float


# A look costs some microseconds on a local disk, a request in an object store.
_LOCAL: Final = _Pace(quick_s=0.003, slow_s=0.003, check_s=0.2)
_REMOTE: Final = _Pace(quick_s=0.01, slow_s=0.25, check_s=5.0)
_SLOWER: Final = 1.25
_CATCH_UP_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Rows of one kind and one partition, in offset order.

    Attributes:
        kind: the event kind.
        table: its rows, with the kind's whole schema.
        partition: the log partition that they come from.
        first_offset: log offset of the first row.
        last_offset: log offset of the last row.
        lake_version: the table version that they were read from.
    """

    kind: str
    table: pa.Table
    partition: Partition
    first_offset: int
    last_offset: int
    lake_version: int

    @classmethod
    def of(cls, kind: str, partition: Partition, rows: pa.Table, lake_version: int) -> Delivery:
        """Rows of one kind and partition, at least one, in offset order."""
        offsets = rows["log_offset"]
        return cls(
            kind=kind,
            table=rows,
            partition=partition,
            first_offset=offsets[0].as_py(),
            last_offset=offsets[-1].as_py(),
            lake_version=lake_version,
        )


class Tail:
    """A reader of everything from a cursor on, for one thread.

    Deliveries of one commit come in one poll, ordered by partition and first offset. ``cursor`` lies behind all that
    was delivered (and behind what was skipped because its kind or topic was not asked for).
    """

    def __init__(
        self,
        lake: Lake,
        start: Cursor | None = None,
        topics: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
    ) -> None:
        self.cursor = Cursor() if start is None else start
        self.lane_marks: dict[str, int] = {}
        self._lake = lake
        self._topics = None if topics is None else frozenset(topics)
        self._kinds = tuple(KINDS) if kinds is None else tuple(kinds)
        self._pace = _LOCAL if lake.location.is_local else _REMOTE
        self._pause_s = self._pace.quick_s
        self._checked_s = float("-inf")
        self._version = self._started_at = -1
        self._catching_up: Iterator[list[Delivery]] = iter(())
        self._start_from(lake.snapshot())

    @property
    def version(self) -> int:
        """The table version up to which everything was delivered."""
        return self._version

    def poll(self, timeout_s: float = 0.0) -> list[Delivery]:
        """What is new, as soon as there is something; an empty list when the time is over.

        Raises:
            VacuumedError: a data file is gone that the newest version names.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            deliveries = self._next()
            if not deliveries and self._was_left_behind():
                self._start_from(self._lake.snapshot())
                deliveries = self._next()
            if deliveries:
                self._pause_s = self._pace.quick_s
                return deliveries
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            time.sleep(min(left, self._pause_s))
            self._pause_s = min(self._pause_s * _SLOWER, self._pace.slow_s)

    def _was_left_behind(self) -> bool:
        """Whether the log was cleaned past this tail; asks every now and then."""
        now_s = time.monotonic()
        if now_s - self._checked_s < self._pace.check_s:
            return False
        self._checked_s = now_s
        return self._lake.log.cleaned_past(self._version)

    def _next(self) -> list[Delivery]:
        """The next deliveries that are there already, or none; from a new snapshot where files were vacuumed."""
        try:
            return self._follow()
        except VacuumedError:
            snapshot = self._lake.snapshot()
            if snapshot.version <= self._started_at:
                raise
            self._start_from(snapshot)
            return self._follow()

    def _follow(self) -> list[Delivery]:
        for deliveries in self._catching_up:
            if deliveries:
                return deliveries
        while (commit := self._lake.log.read_commit(self._version + 1)) is not None:
            deliveries = self._deliver(commit)
            if deliveries:
                return deliveries
        return []

    # Following commits

    def _deliver(self, commit: LogCommit) -> list[Delivery]:
        deliveries = [
            delivery
            for file in commit.new
            if file.kind in self._kinds and self._wants_topic(file.partition)
            for delivery in self._read([file], file.kind, self.cursor, None, commit.version)
        ]
        self._version = commit.version
        self._note_marks(commit.transactions)
        self.cursor = _joined(self.cursor, log_ends(commit.transactions))
        return _in_order(deliveries)

    def _note_marks(self, transactions: Mapping[str, int]) -> None:
        for app, version in transactions.items():
            if app.startswith(f"{LANE_TRANSACTION}/"):
                self.lane_marks[app] = version

    # Catching up

    def _start_from(self, snapshot: Snapshot) -> None:
        self._version = self._started_at = snapshot.version
        self._note_marks(snapshot.transactions)
        self._catching_up = self._catch_up(snapshot)

    def _catch_up(self, snapshot: Snapshot) -> Iterator[list[Delivery]]:
        """Deliver a snapshot's rows from the cursor on, in bounded portions, each complete up to an offset."""
        end = snapshot.cursor
        while True:
            files = {kind: snapshot.files_of(kind, since=self.cursor, as_of=end) for kind in self._kinds}
            every = [file for found in files.values() for file in found if self._wants_topic(file.partition)]
            if not every:
                break
            upto = _portion(every, self.cursor, end)
            deliveries = [
                delivery
                for kind, found in files.items()
                if (some := [file for file in found if file.may_precede(upto)])
                for delivery in self._read(some, kind, self.cursor, upto, snapshot.version)
            ]
            self.cursor = _joined(self.cursor, upto)
            yield _in_order(deliveries)
            if all(self.cursor[place] >= end[place] for place in end):
                break
        self.cursor = _joined(self.cursor, end)

    # Reading

    def _wants_topic(self, place: Partition | None) -> bool:
        return self._topics is None or place is None or place.topic in self._topics

    def _read(
        self, files: Sequence[DataFile], kind: str, since: Cursor, as_of: Cursor | None, version: int
    ) -> Iterator[Delivery]:
        table = self._lake.read_files(files, kind, None, RowFilter(since=since, as_of=as_of))
        if table.num_rows == 0:
            return
        for place, rows in split_by_partition(table):
            if self._wants_topic(place):
                yield Delivery.of(kind, place, rows, version)


def split_by_partition(table: pa.Table) -> list[tuple[Partition, pa.Table]]:
    """The table's rows by log partition, each part in offset order (rows of one offset keep their order)."""
    topics = table["log_topic"].unique().to_pylist()
    numbers = np.unique(table["log_partition"].to_numpy())
    if len(topics) == 1 and len(numbers) == 1:
        return [(Partition(topics[0], int(numbers[0])), _sorted_by_offset(table))]
    encoded = pa.concat_arrays(table["log_topic"].chunks).dictionary_encode()
    codes, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
    places = table["log_partition"].to_numpy()
    parts = []
    for code, topic in enumerate(names):
        for number in numbers:
            rows = rows_where(table, (codes == code) & (places == number))
            if rows.num_rows:
                parts.append((Partition(topic, int(number)), _sorted_by_offset(rows)))
    return parts


def _sorted_by_offset(table: pa.Table) -> pa.Table:
    offsets = table["log_offset"].to_numpy()
    if len(offsets) < 2 or bool(np.all(offsets[1:] >= offsets[:-1])):
        return table
    return rows_at(table, np.argsort(offsets, kind="stable"))


def _in_order(deliveries: list[Delivery]) -> list[Delivery]:
    return sorted(deliveries, key=lambda delivery: (delivery.partition, delivery.first_offset, delivery.last_offset))


def _joined(first: Cursor, second: Cursor) -> Cursor:
    for place in second:
        first = first.advanced(place, second[place])
    return first


def _portion(files: Sequence[DataFile], start: Cursor, end: Cursor) -> Cursor:
    """The end of the next portion: far enough to hold some tens of thousands of rows, at most ``end``."""
    upto = end
    for place in end:
        ahead = sorted(
            (file.max_log_offset, file.num_rows)
            for file in files
            if file.partition == place and file.max_log_offset is not None and file.max_log_offset >= start[place]
        )
        num_rows = 0
        for last, rows in ahead:
            num_rows += rows
            if num_rows >= _CATCH_UP_ROWS:
                upto = Cursor({**upto.offsets, place: min(end[place], last + 1)})
                break
    return upto
