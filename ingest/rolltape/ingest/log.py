"""The event log as its users see it: one protocol, several implementations.

A log has topics (:data:`rolltape.schema.kinds.TOPICS`), each of one or more partitions. A producer sends records in
lanes; a reader polls deliveries from a cursor. Guarantees name their level: ``spooled`` (this machine's disk) or
``logged`` (the log's own durability). In the embedded log that is a commit of the lake, in Kafka the brokers'
acknowledgement.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from rolltape.schema.codec import Record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import ConfigError
from rolltape.store.tail import Delivery

if TYPE_CHECKING:
    from rolltape.ingest.committer import CommitterMode

__all__ = ["Delivery", "EventLog", "Level", "LogProducer", "LogReader", "open_log"]

Level = Literal["spooled", "logged"]


@runtime_checkable
class LogProducer(Protocol):
    """The only live writer of one producer id. Records of a lane are sent in order and keep it."""

    @property
    def producer_id(self) -> str:
        """Who writes."""
        ...

    @property
    def epoch(self) -> int:
        """This start of the producer; higher than any before."""
        ...

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent of which it is not yet known that they are logged. The recorder bounds them."""
        ...

    def send(self, record: Record, *, more: bool = False) -> None:
        """Take over one record. Durable only after :meth:`flush`; an older record of the lane is never overtaken.

        With ``more`` others follow at once, and it may be brought to the log together with them.

        Raises:
            StorageFullError: no room; the record was not taken, the same one may be sent again.
        """
        ...

    def acknowledged(self, partition: Partition) -> int:
        """Last ``lane_seq`` of this producer's lane that is known to be logged, -1 for none."""
        ...

    def flush(self, level: Level, timeout_s: float) -> None:
        """Return once everything sent is proven durable at ``level``.

        Raises:
            FlushTimeout: not proven in time; nothing is lost, the spool keeps it.
            LaneGapError: a lane of this producer stands still because a record of it is missing.
        """
        ...

    def wait_for_older_epochs(self, timeout_s: float) -> None:
        """Return once everything that older epochs of this producer spooled is logged.

        Raises:
            FlushTimeout: not proven in time.
        """
        ...

    def close(self) -> None:
        """Make everything sent durable at level ``spooled`` and give the producer id back. Idempotent."""
        ...


@runtime_checkable
class LogReader(Protocol):
    """Reads records in the order of each partition. Between partitions there is no order."""

    @property
    def cursor(self) -> Cursor:
        """Where the next poll goes on: after everything that was delivered."""
        ...

    def poll(self, timeout_s: float) -> list[Delivery]:
        """Deliveries that are there, waiting for the first at most ``timeout_s``; empty when none came."""
        ...

    def close(self) -> None:
        """Release what the reader holds. Idempotent."""
        ...


@runtime_checkable
class EventLog(Protocol):
    """A log of events. Closing it closes neither producers nor readers of other processes."""

    @property
    def linger_s(self) -> float:
        """How long a recorder may hold small events of a lane, so that others fill the record; 0 for not at all."""
        ...

    def producer(self, producer_id: str) -> LogProducer:
        """Open the only live writer of ``producer_id``, under a new epoch.

        Raises:
            ProducerFencedError: another live writer uses this id.
        """
        ...

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> LogReader:
        """A reader from ``start``, of all topics and kinds unless told."""
        ...

    def end(self) -> Cursor:
        """The cursor after everything that is logged now."""
        ...

    def num_partitions(self, topic: str) -> int:
        """Partitions of a topic; the recorder chooses among them by the record's key."""
        ...

    def wait_until_archived(self, timeout_s: float = 60.0) -> None:
        """Return once everything that is logged now can be read in the lake.

        Raises:
            FlushTimeout: not archived in time; nothing is lost, the log keeps it.
            ConfigError: the log has no lake.
        """
        ...

    def newest_versions(self) -> list[Delivery]:
        """Events of the policy versions that still matter, for engines that start late.

        Deliveries of one row of ``weights_published``, ``weights_committed`` or ``weights_aborted``, in the order in
        which they were recorded: of each run and policy all from its newest committed version on. Empty where
        reading the ``weights`` topic from its beginning tells as much (the embedded log).
        """
        ...

    def close(self) -> None:
        """Stop what this handle runs, after what it can still make durable. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_log(
    url: str,
    *,
    lake: str | None = None,
    committer: CommitterMode = "auto",
    spool: str | os.PathLike[str] | None = None,
) -> EventLog:
    """Open the log that ``url`` names: ``memory://``, ``kafka://host:9092/prefix``, or the path or URL of a lake.

    Args:
        url: the log. A Kafka log takes options: ``kafka://host1,host2/prefix?lake=s3://bucket/lake`` (see
            :class:`rolltape.ingest.kafka.config.KafkaConfig`).
        lake: for Kafka: path or URL of the lake that the log is archived in.
        committer: for lakes: ``thread`` runs the lake's committer in this process, ``external`` never does, ``auto``
            does while no other process does. A Kafka log has a sink instead.
        spool: for Kafka: folder of the producers' spools on this machine; beside the lake's own unless given.

    Raises:
        LakeNotFoundError: there is no lake.
        CommitterFencedError: ``thread``, and another process runs the committer.
        LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
        TopicError: the log's topics are missing; names the command that makes them.
        ConfigError: a Kafka URL or option that cannot be, or options of another kind of log.
    """
    if url.startswith("kafka://"):
        return _open_kafka(url, lake, spool)
    if lake is not None or spool is not None:
        raise ConfigError(f"lake, spool: expected them for kafka:// only, got them for {url!r}")
    if url == "memory://":
        from rolltape.ingest.memory import MemoryLog

        return MemoryLog()
    from rolltape.ingest.embedded import EmbeddedLog
    from rolltape.store.lake import Lake
    from rolltape.store.location import Location

    return EmbeddedLog(Lake.open(Location.parse(url)), committer=committer)


def _open_kafka(url: str, lake: str | None, spool: str | os.PathLike[str] | None) -> EventLog:
    from rolltape.ingest.kafka.config import KafkaConfig
    from rolltape.ingest.kafka.log import KafkaLog
    from rolltape.store.lake import Lake
    from rolltape.store.location import Location

    config = KafkaConfig.from_url(url, lake=lake)
    archive = None if config.lake is None else Lake.open(Location.parse(config.lake))
    return KafkaLog(config, archive, spool=None if spool is None else Path(spool))
