"""The event log over Kafka: what :func:`rolltape.ingest.open_log` opens for ``kafka://host:9092/prefix?lake=URL``.

Producers spool to this machine's disk first and send from there; readers see the brokers' order of each partition. The
lake, where one is named, is where the sink archives the log: its marks raise new producers' epochs, its claim checks
carry large payloads, and readers catch up from it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rolltape.ingest.kafka.blobs import BlobStore
from rolltape.ingest.kafka.client import BrokerConsumer, KafkaClient, TopicInfo
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.positions import log_bases
from rolltape.ingest.kafka.producer import KafkaProducer
from rolltape.ingest.kafka.topics import ALL_TOPICS, MAX_MESSAGE_BYTES, existing_topics
from rolltape.ingest.kafka.versions import newest_versions
from rolltape.ingest.lanes import log_app_id
from rolltape.ingest.log import Delivery, LogReader
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import ConfigError, FlushTimeout, TopicError
from rolltape.schema.kinds import TOPICS
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake

_LOCAL_POLL_S: Final = 0.01
_REMOTE_POLL_S: Final = 0.2


class KafkaLog:
    """A set of topics as event log (see :class:`rolltape.ingest.log.EventLog`). Threads may share it."""

    def __init__(
        self, config: KafkaConfig, lake: Lake | None = None, *, spool: Path | None = None, limits: Limits | None = None
    ) -> None:
        """Connect and look at the topics.

        Raises:
            LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
            TopicError: topics are missing; names the command that makes them.
        """
        self.config = config
        self.lake = lake
        self.client = KafkaClient(config)
        self.blobs = None if lake is None else BlobStore(lake.location)
        self.limits = limits
        self._spool = spool
        self._lock = threading.Lock()
        self._ends: BrokerConsumer | None = None
        self._archived = None if lake is None else Lake.open(lake.location, read_only=True)
        admin = self.client.admin()
        try:
            self.cluster_id = admin.cluster_id()
            self._topics = existing_topics(admin, ALL_TOPICS, config.url)
        finally:
            admin.close()

    @property
    def linger_s(self) -> float:
        """How long a recorder may hold small events of a lane until others fill the record."""
        return self.config.linger_s

    @property
    def spool_path(self) -> Path:
        """Folder of this log's spools on this machine.

        Raises:
            ConfigError: neither a spool nor a lake is named.
        """
        if self._spool is None and self.config.spool is None and self.lake is None:
            raise ConfigError(
                f"expected a folder for the spool of {self.config.url}, got neither a spool nor a lake: open the log "
                "with kafka://…?lake=URL, or with spool=FOLDER"
            )
        # Never by the brokers' addresses: another spelling of them would leave behind what was spooled.
        given = self._spool or self.config.spool
        if given is not None:
            return Path(given).expanduser() / f"kafka-{_digest(self.cluster_id, self.config.prefix)}"
        assert self.lake is not None
        # Beside, not among, the spools that an embedded log's committer drains. A lake has one log, whatever cluster.
        return self.lake.spool_path / f"kafka-{_digest(self.config.prefix)}"

    def producer(self, producer_id: str) -> KafkaProducer:
        """Open the only live writer of ``producer_id`` (see :class:`rolltape.ingest.log.EventLog`)."""
        return KafkaProducer(self, producer_id)

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> LogReader:
        """A reader from ``start``: the lake's rows first, then the brokers'."""
        from rolltape.ingest.kafka.reader import KafkaReader

        return KafkaReader(self, start, topics, kinds)

    def topic(self, name: str) -> TopicInfo:
        """What the brokers said of a topic when the log was opened."""
        try:
            return self._topics[name]
        except KeyError:
            raise TopicError(f"expected a topic of {', '.join(ALL_TOPICS)}, got {name!r}") from None

    def num_partitions(self, topic: str) -> int:
        """Partitions of a topic, as of when the log was opened."""
        return self.topic(topic).num_partitions

    def max_message_bytes(self, topic: str) -> int:
        """Largest record batch that the brokers take of a topic, with overhead."""
        return int(self.topic(topic).configs.get("max.message.bytes", MAX_MESSAGE_BYTES))

    def refresh_topics(self) -> None:
        """Look at the topics' settings again; their partitions are kept as they were when the log was opened.

        Raises:
            LogError: the brokers do not say.
        """
        admin = self.client.admin()
        try:
            found = existing_topics(admin, ALL_TOPICS, self.config.url)
        finally:
            admin.close()
        self._topics = {
            name: info._replace(num_partitions=self._topics[name].num_partitions) for name, info in found.items()
        }

    def transactions(self) -> Mapping[str, int]:
        """The application transactions of the lake's newest version; none without a lake."""
        return {} if self._archived is None else self._archived.snapshot().transactions

    def partitions(self, topics: Collection[str] | None = None) -> list[Partition]:
        """All partitions of the topics, of all but the compacted one unless told."""
        return [
            Partition(topic, number)
            for topic in (TOPICS if topics is None else topics)
            for number in range(self.num_partitions(topic))
        ]

    def bases(self) -> Mapping[Partition, int]:
        """What is added to the brokers' offsets to get the lake's: not 0 only where a topic was adopted."""
        return log_bases(self.transactions(), {name: info.topic_id for name, info in self._topics.items()})

    def end(self) -> Cursor:
        """The cursor after everything that the brokers have acknowledged."""
        bases = self.bases()
        _, ends = self._offsets()
        return Cursor({partition: end + bases.get(partition, 0) for partition, end in ends.items()})

    def _offsets(self) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """Oldest and next offsets of all partitions, by the brokers' count."""
        with self._lock:
            if self._ends is None:
                self._ends = self.client.consumer()
            partitions = self.partitions()
            return self._ends.begin_offsets(partitions), self._ends.end_offsets(partitions)

    def wait_until_archived(self, timeout_s: float = 60.0) -> None:
        """Return once everything that is logged now is in the lake.

        Raises:
            ConfigError: the log was opened without a lake.
            FlushTimeout: no sink got so far in time; nothing is lost, the log keeps it.
        """
        if self._archived is None:
            raise ConfigError(
                f"expected a lake that {self.config.url} is archived in, got none; open it with ?lake=URL"
            )
        begins, ends = self._offsets()
        bases = self.bases()
        wanted = {
            partition: end + bases.get(partition, 0) - 1 for partition, end in ends.items() if end > begins[partition]
        }
        deadline = time.monotonic() + timeout_s
        poll_s = _LOCAL_POLL_S if self._archived.location.is_local else _REMOTE_POLL_S
        while True:
            transactions = self._archived.snapshot().transactions
            wanted = {
                partition: offset
                for partition, offset in wanted.items()
                if transactions.get(log_app_id(partition), -1) < offset
            }
            if not wanted:
                return
            if time.monotonic() >= deadline:
                partition, offset = next(iter(wanted.items()))
                raise FlushTimeout(
                    f"expected {self.config.url} to be archived in {self._archived.location} within {timeout_s} s, got "
                    f"{len(wanted)} partitions behind; {partition} is at {transactions.get(log_app_id(partition), -1)} "
                    f"of {offset}: does a sink run (rolltape sink), and does a lane stand still?"
                )
            time.sleep(poll_s)

    def newest_versions(self) -> list[Delivery]:
        """The newest policy versions, from the compacted topic (see :class:`rolltape.ingest.log.EventLog`)."""
        return newest_versions(self.client)

    def close(self) -> None:
        """Close the connections of this handle; its producers and readers are closed by who opened them. Idempotent."""
        with self._lock:
            if self._ends is not None:
                self._ends.close()
                self._ends = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _digest(*parts: str) -> str:
    """Twelve hexadecimal digits for the name of a folder."""
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:12]
