"""The logs that the contract suite runs against. Another log joins by one more harness in ``HARNESSES``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import pyarrow as pa
import pytest
from tests.arrow_bits import same_bits
from tests.servers.fixtures import Broker, client_environment
from tests.servers.s3_server import Bucket

from rolltape.ingest.deadletters import accept_loss, accept_loss_in_log
from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.kafka.client import BrokerProducer, KafkaClient
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.producer import KafkaProducer
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.lanes import Lane
from rolltape.ingest.log import EventLog, LogProducer, LogReader
from rolltape.ingest.memory import MemoryLog
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.kinds import KINDS
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake

LIMITS: Final = Limits(vocab_size=1000)

OPTIONS: Final = SinkOptions(linger_s=0.02, status_s=0.1, alarm_after_s=0.05, maintenance=False)
"""A sink in a hurry."""


class Harness(Protocol):
    """One implementation under test."""

    @property
    def log(self) -> EventLog:
        """The log."""
        ...

    @property
    def numbers_what_comes(self) -> bool:
        """Whether every message has an offset, also one that adds nothing; otherwise only what is admitted has one."""
        ...

    def inject(self, producer: LogProducer, record: Record) -> None:
        """Put a record of the producer's lane into the log as faulty networks and disks would: in any order."""
        ...

    def settle(self, producer: LogProducer) -> None:
        """Return once the log dealt with what was injected, as far as it can."""
        ...

    def watch(self) -> None:
        """Start what archives and raises alarms, where that is a program of its own."""
        ...

    def archived(self, kind: str) -> pa.Table:
        """What the archive holds of a kind: the lake, where there is one."""
        ...

    def accept_loss(self, lane: Lane, first: int, through: int) -> None:
        """What an operator does about a gap."""
        ...


@dataclass
class MemoryHarness:
    """The in-memory log."""

    log: MemoryLog = field(default_factory=lambda: MemoryLog(limits=LIMITS))
    numbers_what_comes: bool = False

    def inject(self, producer: LogProducer, record: Record) -> None:
        producer.send(record)

    def settle(self, producer: LogProducer) -> None:
        producer.flush("logged", 10)

    def watch(self) -> None:
        """The log does it itself."""

    def archived(self, kind: str) -> pa.Table:
        commits = self.log.target.commits
        return pa.concat_tables([part.table for commit in commits for part in commit if part.kind == kind])

    def accept_loss(self, lane: Lane, first: int, through: int) -> None:
        self.log.accept_loss(lane, through)


@dataclass
class EmbeddedHarness:
    """The embedded log over a lake, on disk or in an object store."""

    lake: Lake
    log: EmbeddedLog
    numbers_what_comes: bool = False

    def inject(self, producer: LogProducer, record: Record) -> None:
        producer.send(record)

    def settle(self, producer: LogProducer) -> None:
        producer.flush("logged", 10)

    def watch(self) -> None:
        """The committer does it."""

    def archived(self, kind: str) -> pa.Table:
        return self.lake.read(kind)

    def accept_loss(self, lane: Lane, first: int, through: int) -> None:
        accept_loss(self.lake, lane, through)


class TidyKafkaLog(KafkaLog):
    """Closes with itself what a test left open: connections, and the threads that send."""

    def __init__(self, config: KafkaConfig, lake: Lake, spool: Path) -> None:
        super().__init__(config, lake, spool=spool, limits=LIMITS)
        self._opened = contextlib.ExitStack()

    def producer(self, producer_id: str) -> KafkaProducer:
        return self._opened.enter_context(contextlib.closing(super().producer(producer_id)))

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> LogReader:
        return self._opened.enter_context(contextlib.closing(super().reader(start, topics, kinds)))

    def close(self) -> None:
        self._opened.close()
        super().close()


@dataclass
class KafkaHarness:
    """The log over brokers. The sink runs where a test asks for it; readers do not need one."""

    lake: Lake
    log: KafkaLog
    raw: BrokerProducer
    stack: contextlib.ExitStack
    numbers_what_comes: bool = True

    def inject(self, producer: LogProducer, record: Record) -> None:
        """Past the spool and the sender, which would keep the order."""
        self.raw.send(Partition(record.topic, record.partition), *to_message(record))

    def settle(self, producer: LogProducer) -> None:
        self.raw.flush(10)
        producer.flush("logged", 10)

    def watch(self) -> None:
        self.stack.enter_context(running_sink(self.log.config, self.lake))

    def archived(self, kind: str) -> pa.Table:
        return self.lake.read(kind)

    def accept_loss(self, lane: Lane, first: int, through: int) -> None:
        accept_loss_in_log(self.log, lane, through, first=first)

    def compare_readers_with_the_lake(self) -> None:
        """Whatever the test did: readers deliver what a sink archives, from the brokers alone and from the lake."""
        with Sink(self.log.config, self.lake, options=OPTIONS, limits=LIMITS, alone=True) as sink:
            sink.drain(30)
        archived = {kind: in_order(table) for kind in KINDS if (table := self.lake.read(kind)).num_rows}
        with KafkaLog(self.log.config, None, spool=self.log.spool_path, limits=LIMITS) as bare:
            # What lies beside the lake is found without its rows.
            bare.blobs = self.log.blobs
            assert_same_events(delivered(bare), archived)
        assert_same_events(delivered(self.log), archived)


def delivered(log: KafkaLog) -> dict[str, pa.RecordBatch]:
    """All rows of a log up to its present end, by kind."""
    end = log.end()
    tables: dict[str, list[pa.Table]] = {}
    deadline = time.monotonic() + 30
    with contextlib.closing(log.reader(Cursor())) as reader:
        while any(reader.cursor[partition] < end[partition] for partition in end):
            assert time.monotonic() < deadline, f"{reader.cursor} does not reach {end}"
            for delivery in reader.poll(1.0):
                tables.setdefault(delivery.kind, []).append(delivery.table)
    return {kind: in_order(pa.concat_tables(found)) for kind, found in tables.items()}


def in_order(table: pa.Table) -> pa.RecordBatch:
    """Rows in the order of the log. When a dead letter of an archive was made is the archive's own matter."""
    keys = ("log_topic", "log_partition", "log_offset", "producer_id", "producer_epoch", "lane_seq", "event_id")
    ordered = table.sort_by([(key, "ascending") for key in keys])
    ordered = ordered.select([name for name in ordered.column_names if name != "recorded_at"])
    return ordered.combine_chunks().to_batches()[0]


def assert_same_events(one: Mapping[str, pa.RecordBatch], other: Mapping[str, pa.RecordBatch]) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys()
    for kind, rows in one.items():
        assert same_bits(rows, other[kind]), f"{kind}:\n{rows.to_pylist()}\n{other[kind].to_pylist()}"


@contextlib.contextmanager
def running_sink(config: KafkaConfig, lake: Lake) -> Iterator[None]:
    """A sink in a thread of this process; an error of it is raised at the end of the block."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with contextlib.closing(Sink(config, lake, options=OPTIONS, limits=LIMITS, alone=True)) as sink:
                sink.run(stop)
        except BaseException as error:  # noqa: BLE001  # raised again where the test sees it
            errors.append(error)

    thread = threading.Thread(target=run, name="sink")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive(), "the sink does not stop"
    for error in errors:
        raise error


def memory(request: pytest.FixtureRequest, folder: Path, stack: contextlib.ExitStack) -> Harness:
    """In this process."""
    return MemoryHarness()


def embedded(request: pytest.FixtureRequest, folder: Path, stack: contextlib.ExitStack) -> Harness:
    """A lake on disk."""
    return _embedded(Lake.create(folder / "lake"), stack)


def embedded_on_s3(request: pytest.FixtureRequest, folder: Path, stack: contextlib.ExitStack) -> Harness:
    """A lake in an object store; the spool is on this machine's disk as ever."""
    bucket: Bucket = request.getfixturevalue("s3_bucket")
    return _embedded(Lake.create(f"{bucket.url}/lake", options=bucket.options), stack)


def noida_db(request: pytest.FixtureRequest, folder: Path, stack: contextlib.ExitStack) -> Harness:
    """The small broker; after each test, readers are compared with the lake."""
    harness = _kafka(request, request.getfixturevalue("noida_broker"), folder, stack)
    stack.callback(harness.compare_readers_with_the_lake)
    return harness


def real_kafka(request: pytest.FixtureRequest, folder: Path, stack: contextlib.ExitStack) -> Harness:
    """Apache Kafka."""
    return _kafka(request, request.getfixturevalue("real_kafka"), folder, stack)


def _embedded(lake: Lake, stack: contextlib.ExitStack) -> Harness:
    return EmbeddedHarness(lake, stack.enter_context(EmbeddedLog(lake, "thread", limits=LIMITS)))


def _kafka(request: pytest.FixtureRequest, broker: Broker, folder: Path, stack: contextlib.ExitStack) -> KafkaHarness:
    prefix: str = request.getfixturevalue("topic_prefix")
    config = KafkaConfig.from_url(f"kafka://{broker.bootstrap}/{prefix}", client_environment(broker))
    lake = Lake.create(folder / "lake")
    client = make_topics(config, {"rollout": 1})
    log = stack.enter_context(TidyKafkaLog(config, lake, folder / "spool"))
    raw = stack.enter_context(contextlib.closing(client.producer()))
    return KafkaHarness(lake, log, raw, stack)


def make_topics(config: KafkaConfig, partitions: Mapping[str, int] = MappingProxyType({})) -> KafkaClient:
    """Make all topics of a log; returns a client of its brokers."""
    client = KafkaClient(config)
    with contextlib.closing(client.admin()) as admin:
        checks = ensure_topics(admin, TopicPlan.of(partitions=partitions), create=True)
    assert all(check.info is not None for check in checks)
    return client


HARNESSES: Final[Mapping[str, Callable[[pytest.FixtureRequest, Path, contextlib.ExitStack], Harness]]] = {
    "memory": memory,
    "embedded": embedded,
    "embedded-s3": embedded_on_s3,
    "noida-db": noida_db,
    "kafka": real_kafka,
}

NEEDS: Final[Mapping[str, Any]] = {
    "embedded-s3": pytest.mark.needs("s3_bucket"),
    "kafka": pytest.mark.needs("real_kafka"),
}
