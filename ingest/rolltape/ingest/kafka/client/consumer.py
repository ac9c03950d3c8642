"""Reading records, alone or as a member of a group."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from rolltape.ingest.kafka.client.connection import Connection
from rolltape.ingest.kafka.client.messages import Message
from rolltape.ingest.kafka.client.vendor import Assignor, OffsetAndMetadata, TopicPartition, kafka, vendor
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import OffsetGoneError, TopicError

_MAX_FETCH_BYTES: Final = 8 << 20
_MAX_PARTITION_FETCH_BYTES: Final = 2 << 20
_GATHERED_BYTES: Final = 4 << 20
_GATHERED_S: Final = 0.02
"""Well below a sink's linger: what gathers must not look like a pause, or every pause would be a commit."""
_IDLE_S: Final = 0.5
_SESSION_TIMEOUT_S: Final = 10.0
_HEARTBEAT_S: Final = 2.0
_CLOSE_S: Final = 5.0
_TOPIC_POLL_S: Final = 0.1
_METADATA_AGE_S: Final = 60.0


class _Rebalances(kafka.ConsumerRebalanceListener):  # type: ignore[misc]
    """Notes the group's decisions in the client's thread, for :meth:`BrokerConsumer.poll` to act on in the caller's."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._lock = threading.Lock()
        self._changes: list[tuple[bool, set[TopicPartition]]] = []

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        if revoked:
            with self._lock:
                self._changes.append((False, set(revoked)))

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        if assigned:
            # Nothing is fetched before the caller said from where.
            self._consumer.pause(*assigned)
            for partition in assigned:
                self._consumer.seek(partition, 0)
            with self._lock:
                self._changes.append((True, set(assigned)))

    def taken(self) -> list[tuple[bool, set[TopicPartition]]]:
        with self._lock:
            changes, self._changes = self._changes, []
            return changes


class BrokerConsumer:
    """Reads records. For one thread.

    Without ``group`` partitions are assigned by the caller; with it, by the group, after :meth:`subscribe`. Where it
    stands is the caller's business in both: offsets that the group stored are never used.
    """

    def __init__(self, config: KafkaConfig, *, group: str | None = None) -> None:
        """Connect.

        Raises:
            LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
        """
        self._connection = Connection(config)
        self._config = config
        self._assignor = Assignor()
        settings = {
            **self._connection.settings(),
            "group_id": group,
            "partition_assignment_strategy": (self._assignor,),
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "allow_auto_create_topics": False,
            "fetch_max_bytes": _MAX_FETCH_BYTES,
            "max_partition_fetch_bytes": _MAX_PARTITION_FETCH_BYTES,
            "fetch_min_bytes": 1,
            "fetch_max_wait_ms": int(_IDLE_S * 1000),
            "max_poll_records": 1 << 20,
            "session_timeout_ms": int(_SESSION_TIMEOUT_S * 1000),
            "heartbeat_interval_ms": int(_HEARTBEAT_S * 1000),
            "metadata_max_age_ms": int(_METADATA_AGE_S * 1000),
            "metrics_enabled": False,
        }
        with self._connection.opening("opening a consumer"):
            self._consumer: Any = kafka.KafkaConsumer(**settings)
        self._rebalances: _Rebalances | None = None
        self._on_revoked: Callable[[set[Partition]], None] | None = None
        self._on_assigned: Callable[[set[Partition]], None] | None = None

    def assign(self, partitions: Collection[Partition]) -> None:
        """Read exactly these partitions; :meth:`seek` each before the next poll."""
        self._consumer.assign([self._place(partition) for partition in partitions])

    def subscribe(
        self,
        topics: Collection[str],
        on_revoked: Callable[[set[Partition]], None],
        on_assigned: Callable[[set[Partition]], None],
    ) -> None:
        """Take part in the group. Both callbacks are called by :meth:`poll`, in its caller's thread.

        A revoked partition may belong to another member already when ``on_revoked`` hears of it. ``on_assigned`` must
        :meth:`seek` every partition that it is given; nothing of them is read before.
        """
        self._rebalances = _Rebalances(self._consumer)
        self._on_revoked, self._on_assigned = on_revoked, on_assigned
        names = [self._config.broker_topic(topic) for topic in topics]
        self._assignor.known = {name: self._partitions_of(name) for name in names}
        self._consumer.subscribe(names, listener=self._rebalances)

    def _partitions_of(self, name: str) -> set[int]:
        """Numbers of a topic's partitions, as soon as the broker that is asked has heard of it."""
        deadline = time.monotonic() + self._config.bootstrap_timeout_s
        with self._connection.errors(f"looking at topic {name}"):
            while not (found := set(self._consumer.partitions_for_topic(name))):
                if time.monotonic() > deadline:
                    raise TopicError(
                        f"expected partitions of topic {name}, got none within {self._config.bootstrap_timeout_s:g} s; "
                        f"create it: rolltape topics --log {self._config.url} --create"
                    )
                time.sleep(_TOPIC_POLL_S)
        return found

    def num_partitions(self, topic: str) -> int:
        """Partitions of a topic of which some are read, as the brokers said within the last minute."""
        with self._connection.errors(f"looking at topic {topic}"):
            return len(self._consumer.partitions_for_topic(self._config.broker_topic(topic)))

    def assignment(self) -> set[Partition]:
        """The partitions that are read."""
        return {self._partition(place) for place in self._consumer.assignment()}

    def seek(self, partition: Partition, offset: int) -> None:
        """Go on at ``offset`` of an assigned partition."""
        self._consumer.seek(self._place(partition), offset)

    def position(self, partition: Partition) -> int:
        """The next offset that is read of an assigned partition."""
        with self._connection.errors(f"asking for the position in {partition}"):
            return int(self._consumer.position(self._place(partition)))

    def pause(self, partitions: Collection[Partition]) -> None:
        """Fetch nothing of these until :meth:`resume`."""
        self._consumer.pause(*(self._place(partition) for partition in partitions))

    def resume(self, partitions: Collection[Partition]) -> None:
        """Fetch these again."""
        self._consumer.resume(*(self._place(partition) for partition in partitions))

    def gather(self, *, much: bool) -> None:
        """Whether the next requests wait a moment for much, or (as at first) are answered as soon as anything is there.

        A request costs client and broker the same whatever it brings.
        """
        # The vendor takes these once, for all requests; it looks at them anew for each.
        settings = self._consumer._fetcher.config  # noqa: SLF001
        settings["fetch_min_bytes"] = _GATHERED_BYTES if much else 1
        settings["fetch_max_wait_ms"] = int((_GATHERED_S if much else _IDLE_S) * 1000)

    def poll(self, timeout_s: float, max_records: int | None = None) -> dict[Partition, list[Message]]:
        """Messages that are there, waiting for the first at most ``timeout_s``.

        Raises:
            OffsetGoneError: a position lies outside what its partition holds.
            LogAuthorizationError, LogAuthenticationError: the brokers do not allow it.
        """
        with self._connection.errors("reading"):
            self._see_rejoin_through()
            try:
                found = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
            except vendor.OffsetOutOfRangeError as error:
                raise self._gone(dict(error.args[0])) from error
            except vendor.LogTruncationError as error:
                raise self._gone(dict.fromkeys(error.divergent_offsets)) from error
            except vendor.KafkaError as error:
                if not getattr(error, "retriable", False):
                    raise
                found = {}
        moved = self._tell_of_rebalances()
        # What was fetched of a partition before it was assigned anew is fetched again from where the caller said.
        kept = self._consumer.assignment() - moved
        return {
            partition: [
                Message(partition, record.offset, record.key, record.value, record.headers, record.timestamp)
                for record in records
            ]
            for place, records in found.items()
            if place in kept
            for partition in (self._partition(place),)
        }

    def _see_rejoin_through(self) -> None:
        """Have the vendor finish a rejoin that it began because its view of the topics changed.

        Where the group's answer comes between two polls, the vendor finds nothing to rejoin for any more and leaves it
        there: without partitions, without heartbeats, for ever.
        """
        coordinator = self._consumer._coordinator  # noqa: SLF001  # there is no public way to it
        if self._rebalances is not None and coordinator.rejoining and not coordinator.need_rejoin():
            coordinator.request_rejoin()

    def _gone(self, places: Mapping[Any, int | None]) -> OffsetGoneError:
        place, offset = next(iter(places.items()))
        partition = self._partition(place)
        begin, end = self.begin_offsets([partition])[partition], self.end_offsets([partition])[partition]
        at = self._consumer.position(place) if offset is None else offset
        return OffsetGoneError(
            f"expected {partition} to hold offset {at}, got {begin} to {end - 1}: retention, truncation or another "
            "topic of the same name",
            partition=partition,
            offset=int(at),
        )

    def _tell_of_rebalances(self) -> set[TopicPartition]:
        """Tell of what the group decided; the partitions that it concerned."""
        moved: set[TopicPartition] = set()
        if self._rebalances is None or self._on_revoked is None or self._on_assigned is None:
            return moved
        for assigned, places in self._rebalances.taken():
            moved |= places
            if not assigned:
                self._on_revoked({self._partition(place) for place in places})
                continue
            current = places & self._consumer.assignment()
            if current:
                self._on_assigned({self._partition(place) for place in current})
                self._consumer.resume(*(current & self._consumer.assignment()))
        return moved

    def begin_offsets(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Oldest offset that each partition holds (its end where it holds none)."""
        with self._connection.errors("asking for the oldest offsets"):
            found = self._consumer.beginning_offsets([self._place(partition) for partition in partitions])
        return {self._partition(place): int(offset) for place, offset in found.items()}

    def end_offsets(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """The offset that each partition's next record will have."""
        with self._connection.errors("asking for the newest offsets"):
            found = self._consumer.end_offsets([self._place(partition) for partition in partitions])
        return {self._partition(place): int(offset) for place, offset in found.items()}

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Tell the group how far it is, for whoever watches its lag; positions never come from here.

        Raises:
            LogError: the group moved on without us, or no broker answers.
        """
        with self._connection.errors("storing the group's offsets"):
            self._consumer.commit(
                {self._place(partition): OffsetAndMetadata(offset, "", -1) for partition, offset in offsets.items()}
            )

    def close(self) -> None:
        """Leave the group and close the connections. Idempotent."""
        with contextlib.suppress(vendor.KafkaError):
            self._consumer.close(autocommit=False, timeout_ms=int(_CLOSE_S * 1000))

    def _place(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self._config.broker_topic(partition.topic), partition.partition)

    def _partition(self, place: TopicPartition) -> Partition:
        return Partition(self._config.topic_of(place.topic), place.partition)
