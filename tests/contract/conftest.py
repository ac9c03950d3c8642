"""The logs that the contract suite runs against. Another log joins by one more harness in ``HARNESSES``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

from rolltape.ingest.deadletters import accept_loss
from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.lanes import Lane
from rolltape.ingest.log import EventLog, LogProducer
from rolltape.ingest.memory import MemoryLog
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.identity import uuid7_many
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake

LIMITS = Limits(vocab_size=1000)


class Harness(Protocol):
    """One implementation under test."""

    @property
    def log(self) -> EventLog:
        """The log."""
        ...

    def inject(self, producer: LogProducer, record: Record) -> None:
        """Put a record of the producer's lane into the log as faulty networks and disks would: in any order."""
        ...

    def settle(self, producer: LogProducer) -> None:
        """Return once the log dealt with what was injected, as far as it can."""
        ...

    def accept_loss(self, lane: Lane, through: int) -> None:
        """What an operator does about a gap."""
        ...


@dataclass
class MemoryHarness:
    """The in-memory log."""

    log: MemoryLog = field(default_factory=lambda: MemoryLog(limits=LIMITS))

    def inject(self, producer: LogProducer, record: Record) -> None:
        producer.send(record)

    def settle(self, producer: LogProducer) -> None:
        producer.flush("logged", 10)

    def accept_loss(self, lane: Lane, through: int) -> None:
        self.log.accept_loss(lane, through)


@dataclass
class EmbeddedHarness:
    """The embedded log over a lake on disk."""

    lake: Lake
    log: EmbeddedLog

    def inject(self, producer: LogProducer, record: Record) -> None:
        producer.send(record)

    def settle(self, producer: LogProducer) -> None:
        producer.flush("logged", 10)

    def accept_loss(self, lane: Lane, through: int) -> None:
        accept_loss(self.lake, lane, through)


@contextlib.contextmanager
def _memory(folder: Path) -> Iterator[Harness]:
    yield MemoryHarness()


@contextlib.contextmanager
def _embedded(folder: Path) -> Iterator[Harness]:
    lake = Lake.create(folder / "lake")
    with EmbeddedLog(lake, "thread", limits=LIMITS) as log:
        yield EmbeddedHarness(lake, log)


HARNESSES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Harness]]] = {
    "memory": _memory,
    "embedded": _embedded,
}


@pytest.fixture(params=sorted(HARNESSES))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Each log in turn."""
    with HARNESSES[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture
def log(harness: Harness) -> EventLog:
    """The log under test."""
    return harness.log


@dataclass
class Lanes:
    """Makes stamped records of one producer, as a recorder would, and puts them into the log."""

    producer: LogProducer
    harness: Harness
    next_seq: dict[str, int] = field(default_factory=dict)

    def inject(self, *records: Record) -> None:
        """Put records into the log in this order, whatever it is."""
        for record in records:
            self.harness.inject(self.producer, record)

    def settle(self) -> None:
        """Return once the log dealt with what was injected."""
        self.harness.settle(self.producer)

    def record(self, kind: str, num_rows: int = 1, *, first_seq: int | None = None, **columns: Any) -> Record:
        """The next record of the lane (or the one that starts at ``first_seq``); not sent."""
        return make_record(self.batch(kind, num_rows, first_seq=first_seq, **columns))

    def batch(self, kind: str, num_rows: int = 1, *, first_seq: int | None = None, **columns: Any) -> pa.RecordBatch:
        """The stamped rows of the lane's next record."""
        first = self.next_seq.get(kind, 0) if first_seq is None else first_seq
        self.next_seq[kind] = max(first + num_rows, self.next_seq.get(kind, 0))
        stamps = {
            "event_id": uuid7_many(num_rows),
            "run_id": "run",
            "run_epoch": 1,
            "producer_id": self.producer.producer_id,
            "producer_epoch": self.producer.epoch,
            "lane_seq": list(range(first, first + num_rows)),
            "recorded_at": pa.scalar(1_700_000_000_000_000, pa.timestamp("us", tz="UTC")),
        }
        built = build_batch(kind, {**stamps, **columns}, num_rows)
        assert not built.refused, built.refused
        return built.batch


@dataclass
class ReadBack:
    """Everything that a log holds, by kind, with where it lay."""

    rows: dict[str, list[dict[str, Any]]]
    offsets: dict[Partition, list[int]]
    cursor: Cursor

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Rows of one kind in log order, the kind's own fields beside the envelope."""
        return [{**row, **(row[kind] or {})} for row in self.rows.get(kind, [])]


def read_back(log: EventLog, start: Cursor | None = None) -> ReadBack:
    """Read a log from ``start`` to its present end."""
    end = log.end()
    reader = log.reader(start or Cursor())
    rows: dict[str, list[dict[str, Any]]] = {}
    offsets: dict[Partition, list[int]] = {}
    deadline = time.monotonic() + 10
    while any(reader.cursor[partition] < end[partition] for partition in end):
        assert time.monotonic() < deadline, f"{reader.cursor} does not reach {end}"
        for delivery in reader.poll(1.0):
            rows.setdefault(delivery.kind, []).extend(delivery.table.to_pylist())
            offsets.setdefault(delivery.partition, []).extend(delivery.table["log_offset"].to_pylist())
    reader.close()
    return ReadBack(rows, offsets, reader.cursor)


def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


@pytest.fixture
def tools(harness: Harness) -> Any:
    """The helpers of this file, for tests that cannot import a conftest."""

    class Tools:
        @staticmethod
        def lanes(producer: LogProducer) -> Lanes:
            return Lanes(producer, harness)

        read_back = staticmethod(read_back)
        wait_for = staticmethod(wait_for)

    return Tools
