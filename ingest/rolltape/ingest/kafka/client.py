"""The vendor's client behind our own names: the only module that imports ``kafka``.

Topics are ours here (``rollout``), with the prefix added on the way to the brokers. Errors of the vendor become errors
of :mod:`rolltape.schema.errors` that say what to do. A wrong password, a closed port or an unknown host is told apart
at the first connection, where the vendor's client alone would only report a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.tls import tls_context
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    ConfigError,
    LogAuthenticationError,
    LogAuthorizationError,
    LogError,
    LogUnreachableError,
    OffsetGoneError,
    RecordTooLargeError,
    RolltapeError,
    TopicError,
)

try:
    import crc32c  # noqa: F401  # its absence is what is found out here
    import kafka
    from kafka import errors as vendor_errors
    from kafka.admin import ConfigResource, ConfigResourceType
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.net.compat import KafkaNetClient
    from kafka.net.manager import KafkaConnectionManager
    from kafka.net.selector import NetworkSelector
    from kafka.record import memory_records
    from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
    from kafka.structs import OffsetAndMetadata, TopicPartition
except ImportError as error:
    # Without crc32c the client falls back to Python and moves a twentieth of the bytes: an error, not a surprise.
    raise ConfigError(f"a Kafka log needs kafka-python 3 and crc32c, got {error}; install rolltape[kafka]") from error

vendor: Any = vendor_errors
NO_TOPIC_ID: Final = "-"
MAX_FETCH_BYTES: Final = 64 << 20
_MAX_FRAME_BYTES: Final = 1 << 30
_BATCH_BYTES: Final = 1 << 20
_SESSION_TIMEOUT_S: Final = 10.0
_HEARTBEAT_S: Final = 2.0
_CLOSE_S: Final = 5.0
_TOPIC_POLL_S: Final = 0.1
_AUTHENTICATION: Final = (
    vendor.SaslAuthenticationFailedError,
    vendor.UnsupportedSaslMechanismError,
    vendor.IllegalSaslStateError,
)
_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_AUTHORIZATION: Final = (
    vendor.TopicAuthorizationFailedError,
    vendor.GroupAuthorizationFailedError,
    vendor.ClusterAuthorizationFailedError,
)
# The vendor logs every lost connection as an error and goes on. Who configures logging sees it; stderr does not.
logging.getLogger("kafka").addHandler(logging.NullHandler())


class _AnyNames(bytearray):
    """A record batch's bytes whose header names are readable whatever they are."""

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        return _AnyNames(found) if isinstance(where, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "backslashreplace") -> str:
        return super().decode(encoding, errors)


class _AnyNamesBatch(DefaultRecordBatch):  # type: ignore[misc]  # the vendor ships no types
    """Reads a header name that is no UTF-8 with escapes.

    The vendor raises at every poll: one such record, anybody's, would stop its partition for all readers and for ever.
    """

    _buffer: Any

    def _read_msg(self, *arguments: Any) -> Any:
        try:
            return super()._read_msg(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
        except UnicodeDecodeError:
            self._buffer = _AnyNames(self._buffer)
            return super()._read_msg(*arguments)  # pyright: ignore[reportAttributeAccessIssue]


memory_records.DefaultRecordBatch = _AnyNamesBatch  # pyright: ignore[reportAttributeAccessIssue]

Headers = list[tuple[str, bytes]]
"""Headers of a message as the brokers keep them."""


class Message(NamedTuple):
    """One record as the brokers keep it; ``partition`` has our topic's name, ``offset`` is the broker's."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | memoryview | None
    headers: Headers
    timestamp_ms: int


class TopicInfo(NamedTuple):
    """What the brokers say of a topic: our name, identity, shape and settings."""

    name: str
    topic_id: str
    num_partitions: int
    replication: int
    configs: Mapping[str, str]


class Pending(Protocol):
    """A record on its way to the brokers."""

    def done(self) -> bool:
        """Whether it is decided."""
        ...

    def error(self) -> Exception | None:
        """Why it failed; None while undecided and where it succeeded."""
        ...

    @property
    def offset(self) -> int:
        """The broker's offset once it succeeded, else -1."""
        ...


def record_bytes(key: bytes | None, value: Any, headers: Headers) -> int:
    """Upper bound of what a message takes in a request and in the broker's log: key, value, headers and overhead."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers))


class _Manager(KafkaConnectionManager):  # type: ignore[misc]  # the vendor ships no types
    """The vendor's connections; remembers what the last one failed of, and gives up at once where waiting is vain."""

    def __init__(self, net: Any, **configs: Any) -> None:
        super().__init__(net, **configs)
        # A topic is made on purpose, never because somebody asked for it.
        self.cluster.config["allow_auto_create_topics"] = False
        self.last_error: Exception | None = None

    def get_connection(self, node_id: Any, *args: Any, **options: Any) -> Any:
        connection = super().get_connection(node_id, *args, **options)
        connection.init_future.add_errback(self._remember)
        connection.init_future.add_callback(self._forget)
        return connection

    def maybe_raise_auth_failure(self, node_id: Any) -> None:
        super().maybe_raise_auth_failure(node_id)
        error = self.last_error
        hopeless = isinstance(error, _AUTHENTICATION) or _UNTRUSTED in str(error)
        if error is not None and hopeless and not self.bootstrapped:
            raise error

    def _remember(self, error: Exception) -> None:
        self.last_error = error

    def _forget(self, _: object) -> None:
        self.last_error = None

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await super()._build_transport(node, timeout_at=timeout_at)
        transport._sock_recv = _last_words_first(transport._sock_recv)  # noqa: SLF001  # no other place to reach it
        return transport


def _last_words_first(receive: Callable[[], tuple[bytes, Any]]) -> Callable[[], tuple[bytes, Any]]:
    """Deliver what came before the end of a connection; the vendor drops it where both are there at once.

    What a broker says last is why it will not let us in.
    """

    def received() -> tuple[bytes, Any]:
        data, error = receive()
        # The end is met again at the next call.
        return (data, None) if data else (data, error)

    return received


class _Client(KafkaNetClient):  # type: ignore[misc]
    """The vendor's network client with our manager of connections."""

    def __init__(self, *, on_created: Callable[[_Client, _Manager], None], **configs: Any) -> None:
        net = NetworkSelector(**configs)
        manager = _Manager(net, **configs)
        super().__init__(net=net, manager=manager, **configs)
        on_created(self, manager)


class _Connection:
    """Settings of one vendor object, and translation of its errors."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self._client: _Client | None = None
        self._manager: _Manager | None = None

    def settings(self) -> dict[str, Any]:
        """What producer, consumer and admin have in common."""
        config = self.config
        return {
            "bootstrap_servers": list(config.bootstrap),
            "client_id": config.client_id,
            "security_protocol": config.security_protocol,
            "sasl_mechanism": config.sasl_mechanism,
            "sasl_plain_username": config.sasl_username,
            "sasl_plain_password": config.sasl_password,
            "ssl_context": tls_context(config),
            "request_timeout_ms": int(config.request_timeout_s * 1000),
            "bootstrap_timeout_ms": int(config.bootstrap_timeout_s * 1000),
            "reconnect_backoff_max_ms": 1000,
            "receive_message_max_bytes": _MAX_FRAME_BYTES,
            "kafka_client": lambda **configs: _Client(on_created=self._created, **configs),
        }

    def _created(self, client: _Client, manager: _Manager) -> None:
        self._client, self._manager = client, manager

    @property
    def cluster(self) -> Any:
        """What the brokers last said of themselves."""
        if self._manager is None:
            raise LogError("expected a connection to look at the cluster through, got none yet")
        return self._manager.cluster

    @contextlib.contextmanager
    def opening(self, what: str) -> Iterator[None]:
        """As :meth:`errors`; closes what was opened for an object of the vendor that did not come to be."""
        try:
            with self.errors(what):
                yield
        except BaseException:
            if self._client is not None:
                self._client.close()
            raise

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Raise the vendor's errors as ours; ``what`` says what was tried."""
        try:
            yield
        except RolltapeError:
            raise
        except vendor.KafkaError as error:
            raise self.translated(error, what) from error

    def translated(self, error: Exception, what: str) -> Exception:
        """Our error for one of the vendor's."""
        where = ",".join(self.config.bootstrap)
        last = None if self._manager is None else self._manager.last_error
        for found in (error, last):
            decisive = isinstance(found, _AUTHENTICATION) and (found is error or isinstance(error, _TIMEOUTS))
            if found is not None and decisive:
                return self._authentication(found, where)
        if isinstance(error, _AUTHORIZATION):
            return LogAuthorizationError(
                f"{what}: expected the right to do so, got {_text(error)} for user {self.config.sasl_username!r} at "
                f"{where}; ask whoever runs the cluster for it"
            )
        if isinstance(error, _TOO_LARGE):
            return RecordTooLargeError(f"{what}: expected a record that the topic takes, got {_text(error)}")
        if isinstance(error, vendor.UnknownTopicOrPartitionError):
            return TopicError(
                f"{what}: expected topics {self.config.prefix}.*, got {_text(error)} at {where}; create them: rolltape "
                f"topics --log {self.config.url} --create"
            )
        if isinstance(error, (*_TIMEOUTS, vendor.KafkaConnectionError, vendor.NodeNotReadyError)):
            return self._unreachable(last if last is not None and isinstance(error, _TIMEOUTS) else error, what, where)
        return LogError(f"{what}: the brokers at {where} refuse: {_text(error)}")

    def _authentication(self, error: Exception, where: str) -> LogAuthenticationError:
        config = self.config
        return LogAuthenticationError(
            f"authentication failed at {where}: expected the brokers to accept user {config.sasl_username!r} by "
            f"{config.sasl_mechanism} over {config.security_protocol}, got {_text(error)}; check user and password "
            "(ROLLTAPE_KAFKA_SASL_USERNAME, …_SASL_PASSWORD or …_SASL_PASSWORD_FILE) and …_SASL_MECHANISM"
        )

    def _unreachable(self, error: Exception, what: str, where: str) -> LogError:
        text = _text(error)
        if _UNTRUSTED in text or "certificate" in text.lower():
            return LogAuthenticationError(
                f"authentication failed at {where}: expected a certificate that we trust, got {text}; check "
                "ROLLTAPE_KAFKA_SSL_CAFILE and the host name in the URL"
            )
        return LogUnreachableError(
            f"{what}: expected a Kafka broker at {where} that answers {self.config.security_protocol} within "
            f"{self.config.bootstrap_timeout_s:g} s, got {text}; is it running, is the address right, and the "
            "security_protocol?"
        )


_TOO_LARGE: Final = (vendor.MessageSizeTooLargeError, vendor.RecordListTooLargeError)
_TIMEOUTS: Final = (vendor.KafkaTimeoutError, vendor.RequestTimedOutError)


def _text(error: Exception) -> str:
    # The vendor's own texts start with the name of their type already.
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}".rstrip(": ")


class _PendingRecord:
    """A record that the vendor's producer took."""

    __slots__ = ("_connection", "_future")

    def __init__(self, future: Any, connection: _Connection) -> None:
        self._future = future
        self._connection = connection

    def done(self) -> bool:
        """Whether it is decided."""
        return bool(self._future.is_done)

    def error(self) -> Exception | None:
        """Why it failed, as an error of ours."""
        found = self._future.exception if self._future.is_done else None
        return None if found is None else self._connection.translated(found, "sending a record")

    @property
    def offset(self) -> int:
        """The broker's offset, -1 where there is none yet."""
        return self._future.value.offset if self._future.succeeded() else -1


class BrokerProducer:
    """Sends records, idempotently and with acknowledgement of all in-sync replicas. Threads may share it.

    After the first failed record nothing that follows it in its partition may be relied on: close, open another, and
    send again from the failed one. ``on_done`` is called in the client's thread whenever a record is decided.
    """

    def __init__(
        self, config: KafkaConfig, *, max_record_bytes: int, on_done: Callable[[], None] | None = None
    ) -> None:
        """Connect.

        Raises:
            LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
        """
        self._connection = _Connection(config)
        self._config = config
        self._on_done = on_done
        with self._connection.opening("opening a producer"):
            self._producer: Any = kafka.KafkaProducer(
                **self._connection.settings(),
                acks="all",
                enable_idempotence=True,
                batch_size=_BATCH_BYTES,
                linger_ms=0,
                max_request_size=max(max_record_bytes, _BATCH_BYTES),
                delivery_timeout_ms=int(config.delivery_timeout_s * 1000),
                max_block_ms=int(config.bootstrap_timeout_s * 1000),
                allow_auto_create_topics=False,
                metrics_enabled=False,
            )

    def send(self, partition: Partition, key: bytes, value: Any, headers: Headers) -> Pending:
        """Hand one record over; returns before it is sent. ``value`` is bytes or a buffer of bytes, and is copied.

        Raises:
            TopicError: there is no such topic or partition.
            LogError: the record cannot be taken.
        """
        view = value if isinstance(value, bytes) or value is None else memoryview(value).cast("B")
        with self._connection.errors(f"sending to {partition}"):
            try:
                future = self._producer.send(
                    self._config.broker_topic(partition.topic),
                    value=view,
                    key=key,
                    headers=headers,
                    partition=partition.partition,
                )
            except ValueError as error:
                raise TopicError(
                    f"expected partition {partition.partition} of topic {self._config.broker_topic(partition.topic)}, "
                    f"got: {error}"
                ) from error
        on_done = self._on_done
        if on_done is not None:
            future.add_both(lambda *_: on_done())
        return _PendingRecord(future, self._connection)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent is decided. That says nothing of how: look at each :class:`Pending`.

        Raises:
            LogUnreachableError: not decided in time.
        """
        with self._connection.errors("flushing a producer"):
            self._producer.flush(timeout_s)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Give what is on its way ``timeout_s`` to be decided, then drop it. Idempotent."""
        try:
            self._producer.close(timeout_s)
        except vendor.KafkaError:
            # The vendor stops half-way where something stays undecided, and would go on sending.
            sender = self._producer._sender  # noqa: SLF001
            sender.force_close()
            sender.join(_CLOSE_S)
            with contextlib.suppress(vendor.KafkaError):
                self._producer.close(0.0)


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


class _Assignor(RangePartitionAssignor):  # type: ignore[misc]
    """The vendor's way to share partitions, among those that the topics are known to have.

    A broker that has not heard of a new topic yet leaves it out of its answer. The vendor would then hand out nothing
    of that topic, and may take the full answer that comes later for the one that it shared out by.
    """

    def __init__(self) -> None:
        self.known: dict[str, set[int]] = {}

    def assign(self, cluster: Any, members: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RangePartitionAssignor.assign(_KnownPartitions(cluster, self.known), members)


class _KnownPartitions(NamedTuple):
    """What the vendor's assignor asks of a cluster."""

    cluster: Any
    known: Mapping[str, set[int]]

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self.cluster.partitions_for_topic(topic) or self.known.get(topic)


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
        self._connection = _Connection(config)
        self._config = config
        self._assignor = _Assignor()
        settings = {
            **self._connection.settings(),
            "group_id": group,
            "partition_assignment_strategy": (self._assignor,),
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "allow_auto_create_topics": False,
            "fetch_max_bytes": MAX_FETCH_BYTES,
            "max_partition_fetch_bytes": MAX_FETCH_BYTES,
            "max_poll_records": 1 << 20,
            "session_timeout_ms": int(_SESSION_TIMEOUT_S * 1000),
            "heartbeat_interval_ms": int(_HEARTBEAT_S * 1000),
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


class BrokerAdmin:
    """Looks at topics and makes them."""

    def __init__(self, config: KafkaConfig) -> None:
        """Connect.

        Raises:
            LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
        """
        self._connection = _Connection(config)
        self._config = config
        with self._connection.opening("connecting"):
            self._admin: Any = kafka.KafkaAdminClient(**self._connection.settings())

    def cluster_id(self) -> str:
        """What names the cluster: another one, or one that was set up anew, has another."""
        return str(self._connection.cluster.cluster_id)

    def num_brokers(self) -> int:
        """Brokers that were there at the last look."""
        return len(self._connection.cluster.brokers())

    def describe(self, topics: Collection[str]) -> dict[str, TopicInfo | None]:
        """Each topic by our name; None for one that does not exist.

        A broker that just went away is waited for: the others, or it, will answer.

        Raises:
            LogAuthorizationError: not allowed to look.
            LogUnreachableError: no broker answered in time.
        """
        deadline = time.monotonic() + self._config.bootstrap_timeout_s
        while True:
            try:
                return self._describe(topics)
            except LogUnreachableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TOPIC_POLL_S)

    def _describe(self, topics: Collection[str]) -> dict[str, TopicInfo | None]:
        names = {self._config.broker_topic(topic): topic for topic in topics}
        with self._connection.errors("describing topics"):
            described = {found["name"]: found for found in self._admin.describe_topics(list(names))}
            there = [name for name in names if name in described and not described[name]["error_code"]]
            for name in names:
                code = described[name]["error_code"] if name in described else 0
                if code and code != vendor.UnknownTopicOrPartitionError.errno:
                    raise vendor.for_code(code)(name)
            configs = self._configs(there) if there else {}
        return {
            topic: _topic_info(topic, described[name], configs.get(name, {})) if name in there else None
            for name, topic in names.items()
        }

    def _configs(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        found = self._admin.describe_configs(resources, config_filter="all")["topic"]
        return {
            name: {key: str(entry["value"]) for key, entry in entries.items() if entry["value"] is not None}
            for name, entries in found.items()
        }

    def create(self, topic: str, num_partitions: int, replication: int, configs: Mapping[str, str]) -> None:
        """Make a topic and wait until its partitions have leaders. One that exists already is left alone."""
        name = self._config.broker_topic(topic)
        wanted = {
            "num_partitions": num_partitions,
            "replication_factor": replication,
            "configs": dict(configs),
        }
        with self._connection.errors(f"creating topic {name}"), contextlib.suppress(vendor.TopicAlreadyExistsError):
            self._admin.create_topics({name: wanted})
        with self._connection.errors(f"waiting for topic {name}"):
            self._admin.wait_for_topics([name], timeout_ms=int(self._config.request_timeout_s * 1000))

    def alter_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        """Set some settings of a topic; the others stay."""
        name = self._config.broker_topic(topic)
        with self._connection.errors(f"changing topic {name}"):
            self._admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, dict(configs))])

    def delete(self, topics: Collection[str]) -> None:
        """Delete topics and everything in them."""
        names = [self._config.broker_topic(topic) for topic in topics]
        with self._connection.errors(f"deleting topics {', '.join(names)}"):
            self._admin.delete_topics(names)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with contextlib.suppress(vendor.KafkaError):
            self._admin.close()


def _topic_info(topic: str, found: Mapping[str, Any], configs: Mapping[str, str]) -> TopicInfo:
    partitions = found["partitions"]
    return TopicInfo(
        name=topic,
        # Brokers that do not name topics by an identity (before Kafka 2.8, noida-db) leave it out.
        topic_id=str(found.get("topic_id") or NO_TOPIC_ID),
        num_partitions=len(partitions),
        replication=min((len(partition["replica_nodes"]) for partition in partitions), default=0),
        configs=MappingProxyType(dict(configs)),
    )


@dataclass(frozen=True, slots=True)
class KafkaClient:
    """What is opened on one cluster. Each call opens an object of its own, which its caller closes."""

    config: KafkaConfig

    def producer(
        self, *, max_record_bytes: int = 16 << 20, on_done: Callable[[], None] | None = None
    ) -> BrokerProducer:
        """A producer of records of at most ``max_record_bytes`` (see :func:`record_bytes`)."""
        return BrokerProducer(self.config, max_record_bytes=max_record_bytes, on_done=on_done)

    def consumer(self, group: str | None = None) -> BrokerConsumer:
        """A consumer, as a member of ``group`` where one is named."""
        return BrokerConsumer(self.config, group=group)

    def admin(self) -> BrokerAdmin:
        """A look at the topics."""
        return BrokerAdmin(self.config)


def connect(config: KafkaConfig) -> KafkaClient:
    """A client of the cluster that ``config`` names, once a broker has answered.

    Raises:
        LogUnreachableError: unknown host, closed port, or no answer in time.
        LogAuthenticationError: wrong user, password or certificate.
    """
    client = KafkaClient(config)
    client.admin().close()
    return client


def wait_ready(config: KafkaConfig, timeout_s: float) -> KafkaClient:
    """As :func:`connect`, trying again until ``timeout_s`` is over: for a cluster that is starting."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connect(config)
        except LogUnreachableError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
