"""Delivery at its worst: a log whose producer sends records in any order, several times, and spoils some on the way.

Everything that was recorded since the last flush goes to the brokers shuffled, some records twice or three times, some
of earlier flushes again. Where asked, the payload of one record in fifty is damaged (its headers are not), and messages
that are none of ours come between. What was damaged on purpose is entered in ``<producer>.refused``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
from tests.faults.ledger import RefusedEvent, enter_refused, enter_stranger

from rolltape.ingest.kafka.client import BrokerProducer, Pending, connect
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.log import Delivery, Level, LogReader
from rolltape.schema.codec import Record, decode
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.kinds import kind_named

TWICE: Final = 0.3
AGAIN: Final = 0.1
DAMAGED: Final = 0.02
NUM_REMEMBERED: Final = 64


class DisorderedLog:
    """The sending half of an event log."""

    linger_s = 0.0

    def __init__(self, url: str, folder: Path, seed: int, *, corrupt: bool) -> None:
        self._client = connect(KafkaConfig.from_url(url))
        self._folder = folder
        self._seed = seed
        self._corrupt = corrupt
        admin = self._client.admin()
        self._topics = admin.describe(["rollout"])
        admin.close()

    def producer(self, producer_id: str) -> DisorderedProducer:
        chance = random.Random(f"{self._seed}{producer_id}")
        return DisorderedProducer(self._client.producer(), producer_id, chance, self._folder, corrupt=self._corrupt)

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> LogReader:
        raise NotImplementedError("this log only sends")

    def end(self) -> Cursor:
        raise NotImplementedError("this log only sends")

    def wait_until_archived(self, timeout_s: float = 60.0) -> None:
        raise NotImplementedError("this log only sends")

    def newest_versions(self) -> list[Delivery]:
        raise NotImplementedError("this log only sends")

    def num_partitions(self, topic: str) -> int:
        info = self._topics[topic]
        assert info is not None
        return info.num_partitions

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class DisorderedProducer:
    """Collects records and sends them badly."""

    def __init__(
        self, broker: BrokerProducer, producer_id: str, chance: random.Random, folder: Path, *, corrupt: bool
    ) -> None:
        self.producer_id = producer_id
        self.epoch = 1
        self._broker = broker
        self._chance = chance
        self._folder = folder
        self._corrupt = corrupt
        self._lock = threading.Lock()
        self._waiting: list[Record] = []
        self._sent: list[Record] = []

    @property
    def unacknowledged_bytes(self) -> int:
        return sum(record.num_bytes for record in self._waiting)

    def send(self, record: Record, *, more: bool = False) -> None:
        with self._lock:
            self._waiting.append(record)

    def acknowledged(self, partition: Partition) -> int:
        raise NotImplementedError("nobody asks this one")

    def flush(self, level: Level, timeout_s: float) -> None:
        """Send what waits, shuffled and repeated, and check that the brokers have all of it."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        if self._corrupt:
            taken = [self._damaged(record) if self._chance.random() < DAMAGED else record for record in taken]
        sent = list(taken)
        for record in taken:
            sent += [record] * sum(self._chance.random() < TWICE for _ in range(2))
        sent += [record for record in self._sent if self._chance.random() < AGAIN]
        self._chance.shuffle(sent)
        pending = [self._deliver(record) for record in sent]
        if self._corrupt:
            pending.append(self._deliver_foreign())
        self._sent = (self._sent + taken)[-NUM_REMEMBERED:]
        deadline = time.monotonic() + timeout_s
        for one in pending:
            while not one.done():
                if time.monotonic() > deadline:
                    raise AssertionError(f"expected an answer within {timeout_s} s")
                time.sleep(0.001)
            error = one.error()
            if error is not None:
                raise error

    def _deliver(self, record: Record) -> Pending:
        key, value, headers = to_message(record)
        return self._broker.send(Partition(record.topic, record.partition), key, value, headers)

    def _deliver_foreign(self) -> Pending:
        """A message of somebody else, without a header of ours. There is one a flush."""
        enter_stranger(self._folder, self.producer_id)
        return self._broker.send(Partition("rollout", self._chance.randrange(4)), b"stranger", b"\x00 not ours", [])

    def _damaged(self, record: Record) -> Record:
        """The record with its payload spoilt and its headers whole; its events are entered as refused."""
        rows = decode(record.value, kind=kind_named(record.headers.kind).name).select(["event_id", "lane_seq"])
        events = [RefusedEvent(row["event_id"], record.partition, row["lane_seq"]) for row in rows.to_pylist()]
        enter_refused(self._folder, self.producer_id, events)
        value = bytes(memoryview(record.value))
        half = len(value) // 2
        spoilt = (value[:half], value[:half] + bytes(byte ^ 0x5A for byte in value[half:]), b"", b"\0" * len(value))
        return replace(record, value=pa.py_buffer(self._chance.choice(spoilt)))

    def wait_for_older_epochs(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self._broker.close()
