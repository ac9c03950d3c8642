"""The logs that the contract suite runs against. Another log joins by one more harness in ``HARNESSES``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import pytest
from tests.servers.fixtures import Broker
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
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake

LIMITS: Final = Limits(vocab_size=1000)

OPTIONS: Final = SinkOptions(linger_s=0.02, alarm_after_s=0.05, maintenance=False)
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
        """Start what raises alarms, where that is a program of its own."""
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

    def accept_loss(self, lane: Lane, first: int, through: int) -> None:
        accept_loss_in_log(self.log, lane, through, first=first)


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
    """The small broker."""
    return _kafka(request, request.getfixturevalue("noida_broker"), folder, stack)


def real_kafka(request: pytest.FixtureRequest, folder: Path, stack: contextlib.ExitStack) -> Harness:
    """Apache Kafka."""
    return _kafka(request, request.getfixturevalue("real_kafka"), folder, stack)


def _embedded(lake: Lake, stack: contextlib.ExitStack) -> Harness:
    return EmbeddedHarness(lake, stack.enter_context(EmbeddedLog(lake, "thread", limits=LIMITS)))


def _kafka(request: pytest.FixtureRequest, broker: Broker, folder: Path, stack: contextlib.ExitStack) -> Harness:
    prefix: str = request.getfixturevalue("topic_prefix")
    config = KafkaConfig.from_url(f"kafka://{broker.bootstrap}/{prefix}", {})
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
