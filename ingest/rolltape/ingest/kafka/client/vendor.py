"""The vendor's package, its parts that we use, and what is worked round in them.

Every workaround says which fault of kafka-python it is for; tests show each of them. The version is pinned, because
what is mended here the vendor calls its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from rolltape.schema.errors import ConfigError

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

__all__ = [
    "AUTHENTICATION",
    "UNTRUSTED",
    "Assignor",
    "ConfigResource",
    "ConfigResourceType",
    "DefaultRecordBatchBuilder",
    "OffsetAndMetadata",
    "TopicPartition",
    "VendorClient",
    "VendorManager",
    "kafka",
    "last_words_first",
    "vendor",
]

vendor: Any = vendor_errors
"""Errors of the vendor, by their names."""
AUTHENTICATION: Final = (
    vendor.SaslAuthenticationFailedError,
    vendor.UnsupportedSaslMechanismError,
    vendor.IllegalSaslStateError,
)
UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
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


class VendorManager(KafkaConnectionManager):  # type: ignore[misc]  # the vendor ships no types
    """The vendor's connections; remembers what the last one failed of, and gives up at once where waiting is vain."""

    def __init__(self, net: Any, **configs: Any) -> None:
        super().__init__(net, **configs)
        # A topic is made on purpose, never because somebody asked for it.
        self.cluster.config["allow_auto_create_topics"] = False
        self.last_error: Exception | None = None

    def get_connection(self, node_id: Any, *args: Any, **options: Any) -> Any:
        """As the vendor's; the connection's end is noted."""
        connection = super().get_connection(node_id, *args, **options)
        connection.init_future.add_errback(self._remember)
        connection.init_future.add_callback(self._forget)
        return connection

    def maybe_raise_auth_failure(self, node_id: Any) -> None:
        """As the vendor's; also where no connection was made yet and none will be."""
        super().maybe_raise_auth_failure(node_id)
        error = self.last_error
        hopeless = isinstance(error, AUTHENTICATION) or UNTRUSTED in str(error)
        if error is not None and hopeless and not self.bootstrapped:
            raise error

    def _remember(self, error: Exception) -> None:
        self.last_error = error

    def _forget(self, _: object) -> None:
        self.last_error = None

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await super()._build_transport(node, timeout_at=timeout_at)
        transport._sock_recv = last_words_first(transport._sock_recv)  # noqa: SLF001  # no other place to reach it
        return transport


def last_words_first(receive: Callable[[], tuple[bytes, Any]]) -> Callable[[], tuple[bytes, Any]]:
    """Deliver what came before the end of a connection; the vendor drops it where both are there at once.

    What a broker says last is why it will not let us in.
    """

    def received() -> tuple[bytes, Any]:
        data, error = receive()
        # The end is met again at the next call.
        return (data, None) if data else (data, error)

    return received


class VendorClient(KafkaNetClient):  # type: ignore[misc]
    """The vendor's network client with our manager of connections."""

    def __init__(self, *, on_created: Callable[[VendorClient, VendorManager], None], **configs: Any) -> None:
        net = NetworkSelector(**configs)
        manager = VendorManager(net, **configs)
        super().__init__(net=net, manager=manager, **configs)
        on_created(self, manager)


class Assignor(RangePartitionAssignor):  # type: ignore[misc]
    """The vendor's way to share partitions, among those that the topics are known to have.

    A broker that has not heard of a new topic yet leaves it out of its answer. The vendor would then hand out nothing
    of that topic, and may take the full answer that comes later for the one that it shared out by.
    """

    def __init__(self) -> None:
        self.known: dict[str, set[int]] = {}

    def assign(self, cluster: Any, members: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As the vendor's, with the topics as they are known here."""
        return RangePartitionAssignor.assign(_KnownPartitions(cluster, self.known), members)


class _KnownPartitions(NamedTuple):
    """What the vendor's assignor asks of a cluster."""

    cluster: Any
    known: Mapping[str, set[int]]

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self.cluster.partitions_for_topic(topic) or self.known.get(topic)
