"""The in-memory log: the twin of the others for tests and notebooks. Nothing outlives the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.archive import Archive, Outcome
from rolltape.ingest.conflicts import rows_by_id
from rolltape.ingest.lanes import Lane, checked_producer_id
from rolltape.ingest.log import Delivery, Level
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import CommitterFencedError, FlushTimeout, ProducerFencedError
from rolltape.schema.validate import Limits
from rolltape.store.tail import split_by_partition


class MemoryTarget:
    """Commits kept in lists: the twin of the lake as an archive sees it."""

    def __init__(self) -> None:
        """Start empty."""
        self.commits: list[list[Delivery]] = []
        self._transactions: dict[str, int] = {}

    def transactions(self) -> Mapping[str, int]:
        """Application transactions as of now."""
        return dict(self._transactions)

    def append(
        self, tables: Mapping[str, pa.Table], transactions: Mapping[str, int], expected: Mapping[str, int | None]
    ) -> int:
        """One commit of rows and transactions; returns its number."""
        for app_id, version in expected.items():
            if self._transactions.get(app_id) != version:
                raise CommitterFencedError(
                    f"expected {app_id} at {version}, got {self._transactions.get(app_id)}: another archive committed"
                )
        version = len(self.commits)
        self.commits.append([part for kind, table in tables.items() for part in _deliveries(kind, table, version)])
        self._transactions.update(transactions)
        return version

    def read_events(
        self,
        kind: str,
        event_ids: Collection[str],
        trajectory_ids: Collection[str] | None,  # noqa: ARG002  # nothing to prune here
    ) -> Mapping[str, Mapping[str, Any]]:
        """Those of the events that are committed, as rows by id."""
        found: dict[str, Mapping[str, Any]] = {}
        for commit in self.commits:
            for delivery in commit:
                if delivery.kind == kind:
                    found.update(rows_by_id(delivery.table, event_ids))
        return found

    def recent_event_ids(self, capacity: int, kinds: Collection[str] | None) -> Mapping[str, Sequence[str]]:
        """Ids of the newest committed events, by kind."""
        found: dict[str, list[str]] = {}
        for delivery in reversed([delivery for commit in self.commits for delivery in commit]):
            if capacity > 0 and (kinds is None or delivery.kind in kinds):
                found.setdefault(delivery.kind, []).extend(delivery.table["event_id"].to_pylist())
                capacity -= delivery.table.num_rows
        return found


def _deliveries(kind: str, table: pa.Table, version: int) -> list[Delivery]:
    return [Delivery.of(kind, partition, rows, version) for partition, rows in split_by_partition(table)]


class MemoryLog:
    """A log in this process. ``pause`` makes it take nothing until ``resume``, as a log that is away."""

    def __init__(self, *, limits: Limits | None = None, num_partitions: int = 1, linger_s: float = 0.0) -> None:
        """Start empty, with ``num_partitions`` partitions of each topic."""
        self.linger_s = linger_s
        self._num_partitions = num_partitions
        self.target = MemoryTarget()
        self._archive = Archive(self.target, limits=limits)
        self._changed = threading.Condition(threading.RLock())
        self._epochs: dict[str, int] = {}
        self._live: set[str] = set()
        self._waiting: list[Record] = []
        self._paused = False

    def producer(self, producer_id: str) -> MemoryProducer:
        """Open the only live writer of ``producer_id`` (see :class:`rolltape.ingest.log.EventLog`)."""
        with self._changed:
            if producer_id in self._live:
                raise ProducerFencedError(
                    f"expected to be the only writer of producer {producer_id!r}, got another live one; close it first"
                )
            self._live.add(checked_producer_id(producer_id))
            self._epochs[producer_id] = self._epochs.get(producer_id, 0) + 1
            return MemoryProducer(self, producer_id, self._epochs[producer_id])

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> MemoryReader:
        """A reader from ``start``."""
        return MemoryReader(self, start, topics, kinds)

    def end(self) -> Cursor:
        """The cursor after everything that was taken."""
        with self._changed:
            ends: dict[Partition, int] = {}
            for commit in self.target.commits:
                for part in commit:
                    ends[part.partition] = max(part.last_offset + 1, ends.get(part.partition, 0))
            return Cursor(ends)

    def num_partitions(self, topic: str) -> int:  # noqa: ARG002  # the same for all here
        """As many for each topic as the log was made with."""
        return self._num_partitions

    def wait_until_archived(self, timeout_s: float = 60.0) -> None:
        """What is logged is archived here."""

    def newest_versions(self) -> list[Delivery]:
        """Empty: the whole log is at hand."""
        return []

    def pause(self) -> None:
        """Take nothing until :meth:`resume`; what is sent waits."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Take what waits, in the order in which it was sent."""
        with self._changed:
            self._paused = False
            self._take_waiting()

    def send(self, record: Record) -> None:
        """Take one record of any lane, as a broker does."""
        with self._changed:
            self._waiting.append(record)
            if not self._paused:
                self._take_waiting()

    def _take_waiting(self) -> None:
        """Offer what waits again and again: a record that came lets those parked behind it in."""
        progress = True
        while progress:
            parked = [record for record in self._waiting if self._archive.offer(record) is Outcome.PARKED]
            progress = self._archive.has_staged
            self._archive.raise_alarms()
            self._archive.commit()
            for lane in {gap.lane for gap in self._archive.gaps()} | set(self._archive.resumable()):
                self._archive.unpark(lane)
            self._waiting = parked
        self._changed.notify_all()

    def accept_loss(self, lane: Lane, through: int) -> None:
        """Close a gap of a lane by a dead letter (see :func:`rolltape.ingest.deadletters.accept_loss`)."""
        with self._changed:
            self._archive.accept_loss(lane, through)
            self._take_waiting()

    def mark(self, lane: Lane) -> int:
        """Last ``lane_seq`` of a lane that was taken."""
        with self._changed:
            return self._archive.mark(lane)

    def release(self, producer_id: str) -> None:
        """Give a producer id back."""
        with self._changed:
            self._live.discard(producer_id)

    def wait_for_change(self, timeout_s: float) -> bool:
        """Wait for the next commit; False if none came."""
        with self._changed:
            return self._changed.wait(timeout_s)

    def close(self) -> None:
        """Nothing to stop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MemoryProducer:
    """Writer of one producer id (see :class:`rolltape.ingest.log.LogProducer`)."""

    def __init__(self, log: MemoryLog, producer_id: str, epoch: int) -> None:
        """Use :meth:`MemoryLog.producer`."""
        self.producer_id = producer_id
        self.epoch = epoch
        self._log = log
        self._sent: dict[Lane, list[tuple[int, int]]] = {}

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of records that the log did not take yet."""
        for lane, sent in self._sent.items():
            mark = self._log.mark(lane)
            sent[:] = [entry for entry in sent if entry[0] > mark]
        return sum(num_bytes for sent in self._sent.values() for _, num_bytes in sent)

    def send(self, record: Record, *, more: bool = False) -> None:  # noqa: ARG002  # as the protocol has it
        """Hand one record over."""
        lane = Lane(self.producer_id, self.epoch, record.topic, record.partition)
        self._sent.setdefault(lane, []).append((record.headers.last_lane_seq, record.num_bytes))
        self._log.send(record)

    def acknowledged(self, partition: Partition) -> int:
        """Last ``lane_seq`` that the log took."""
        return self._log.mark(Lane(self.producer_id, self.epoch, *partition))

    def flush(self, level: Level, timeout_s: float) -> None:
        """Wait until the log took everything; ``spooled`` promises nothing here and returns at once."""
        deadline = time.monotonic() + timeout_s
        while level == "logged" and self.unacknowledged_bytes:
            if time.monotonic() >= deadline:
                raise FlushTimeout(
                    f"expected everything of producer {self.producer_id!r} to be logged within {timeout_s} s, got "
                    f"{self.unacknowledged_bytes} bytes that are not; is the log paused, or a record of a lane missing?"
                )
            self._log.wait_for_change(min(0.05, timeout_s))

    def wait_for_older_epochs(self, timeout_s: float) -> None:
        """Nothing survives a producer here, so nothing is waited for."""

    def close(self) -> None:
        """Give the producer id back. Idempotent."""
        self._log.release(self.producer_id)


class MemoryReader:
    """Reads a :class:`MemoryLog` (see :class:`rolltape.ingest.log.LogReader`)."""

    def __init__(
        self, log: MemoryLog, start: Cursor, topics: Collection[str] | None, kinds: Collection[str] | None
    ) -> None:
        """Start at ``start``."""
        self._log = log
        self._cursor = start
        self._topics = None if topics is None else frozenset(topics)
        self._kinds = None if kinds is None else frozenset(kinds)
        self._next_commit = 0

    @property
    def cursor(self) -> Cursor:
        """After everything that was delivered."""
        return self._cursor

    def poll(self, timeout_s: float) -> list[Delivery]:
        """What came since, waiting at most ``timeout_s`` for the first."""
        deadline = time.monotonic() + timeout_s
        while True:
            deliveries = self._take()
            left = deadline - time.monotonic()
            if deliveries or left <= 0:
                return deliveries
            self._log.wait_for_change(min(left, 0.05))

    def _take(self) -> list[Delivery]:
        found: list[Delivery] = []
        commits = self._log.target.commits
        for commit in commits[self._next_commit :]:
            start, self._next_commit = self._cursor, self._next_commit + 1
            for part in commit:
                if self._topics is None or part.partition.topic in self._topics:
                    self._cursor = self._cursor.advanced(part.partition, part.last_offset + 1)
                    found += self._wanted(part, start)
        return found

    def _wanted(self, part: Delivery, start: Cursor) -> list[Delivery]:
        if self._kinds is not None and part.kind not in self._kinds:
            return []
        if part.first_offset >= start[part.partition]:
            return [part]
        rows = part.table.filter(pc.greater_equal(part.table["log_offset"], start[part.partition]))
        return [Delivery.of(part.kind, part.partition, rows, part.lake_version)] if rows.num_rows else []

    def close(self) -> None:
        """Nothing is held."""
