"""Each log in turn, and what the tests of the contract need beside it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.contract.harnesses import HARNESSES, NEEDS, Harness

from rolltape.ingest.log import EventLog, LogProducer
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.identity import uuid7_many


@pytest.fixture(params=[pytest.param(name, marks=NEEDS.get(name, ())) for name in HARNESSES])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Each log in turn."""
    with contextlib.ExitStack() as stack:
        yield HARNESSES[request.param](request, tmp_path, stack)


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
