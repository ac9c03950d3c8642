"""The vendor's package, its parts that we use, and what is worked round in them.

Every workaround says which fault of kafka-python it is for; tests show each of them. The version is pinned, because
what is mended here the vendor calls its own.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
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
    from kafka.protocol import parser
    from kafka.protocol.frame import KafkaBytes
    from kafka.record import memory_records
    from kafka.record.default_records import (
        ControlRecord,
        DefaultRecord,
        DefaultRecordBatch,
        DefaultRecordBatchBuilder,
        DefaultRecordMetadata,
    )
    from kafka.record.util import decode_varint, encode_varint, size_of_varint
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
    "receiver",
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
_RECEIVED_BYTES: Final = 1 << 20
_VIEWED_BYTES: Final = 256 << 10
"""Values of so many bytes are views of what was fetched with them; smaller ones would hold too much of it in memory."""
_NOTHING_YET: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# The vendor logs every lost connection as an error and goes on. Who configures logging sees it; stderr does not.
logging.getLogger("kafka").addHandler(logging.NullHandler())


class _Frame(KafkaBytes):  # type: ignore[misc]  # the vendor ships no types
    """What a broker answers; filled with one copy and read with none or one, where the vendor makes two of each."""

    _idx: int

    def write(self, data: Any) -> None:
        """Put the next bytes in their place."""
        start = self._idx
        self._idx += len(data)
        memoryview(self)[start : self._idx] = data

    def read(self, nbytes: int | None = None) -> bytes | memoryview:
        """The next ``nbytes`` bytes, or the rest: of an answer that is long, a view of it."""
        start = self._idx
        self._idx = len(self) if nbytes is None else min(start + nbytes, len(self))
        found = memoryview(self)[start : self._idx]
        return found if nbytes is None and len(found) >= _VIEWED_BYTES else bytes(found)


parser.KafkaBytes = _Frame  # pyright: ignore[reportAttributeAccessIssue]


class _Batch(DefaultRecordBatch):  # type: ignore[misc]
    """Reads the records of a batch where they lie; a header name that is no UTF-8 comes with escapes.

    The vendor copies each batch first and each value twice, and raises at every poll on such a name: one such record,
    anybody's, would stop its partition for all readers and for ever.
    """

    _buffer: Any
    _pos: int

    def __init__(self, buffer: Any) -> None:
        # An empty batch of the vendor's, in place of its copy.
        super().__init__(bytes(buffer[: self.HEADER_STRUCT.size]))
        self._buffer = buffer

    def _read_msg(self, decode_varint: Any = decode_varint) -> Any:
        """The next record: https://kafka.apache.org/documentation/#record."""
        buffer = self._buffer
        length, pos = decode_varint(buffer, self._pos)
        end = pos + length
        _, pos = decode_varint(buffer, pos)
        since_first, pos = decode_varint(buffer, pos)
        offset_delta, pos = decode_varint(buffer, pos)
        key, pos = _nullable(buffer, pos)
        value, pos = _value(buffer, pos)
        num_headers, pos = decode_varint(buffer, pos)
        if num_headers < 0:
            raise vendor.CorruptRecordError(f"expected a number of headers, got {num_headers}")
        headers = []
        for _ in range(num_headers):
            size, start = decode_varint(buffer, pos)
            if size < 0:
                raise vendor.CorruptRecordError(f"expected the length of a header's name, got {size}")
            name = str(buffer[start : start + size], "utf-8", "backslashreplace")
            found, pos = _nullable(buffer, start + size)
            headers.append((name, found))
        if pos != end:
            raise vendor.CorruptRecordError(f"expected a record of {length} bytes, got {length + pos - end}")
        self._pos = pos
        is_stamped_by_log = self.timestamp_type == self.LOG_APPEND_TIME
        time_ms = self.max_timestamp if is_stamped_by_log else self.first_timestamp + since_first
        make = ControlRecord if self.is_control_batch else DefaultRecord
        return make(length, self.base_offset + offset_delta, time_ms, self.timestamp_type, key, value, headers)


def _nullable(buffer: Any, pos: int) -> tuple[bytes | None, int]:
    """Bytes with their length before them, -1 for none; and the place behind."""
    size, pos = decode_varint(buffer, pos)
    return (None, pos) if size < 0 else (bytes(buffer[pos : pos + size]), pos + size)


def _value(buffer: Any, pos: int) -> tuple[bytes | memoryview | None, int]:
    """As :func:`_nullable`; of a long value, a view."""
    size, start = decode_varint(buffer, pos)
    if size < _VIEWED_BYTES:
        return _nullable(buffer, pos)
    return memoryview(buffer)[start : start + size], start + size


class _BatchBuilder(DefaultRecordBatchBuilder):  # type: ignore[misc]
    """Keeps what records are made of and copies it once, when the batch is closed.

    The vendor copies a value twice to put it into a batch, each time into memory that grows under it, and once or twice
    more to find that a batch has no room for it.
    """

    _buffer: Any
    _first_timestamp: int | None
    _max_timestamp: int
    _batch_size: int

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._parts: list[Any] = [bytes(self._buffer)]
        self._size = len(self._buffer)

    def append(  # pyright: ignore[reportIncompatibleMethodOverride]  # the others only speed up its look-ups
        self, offset: int, timestamp: int | None, key: Any, value: Any, headers: Any
    ) -> Any:
        """As the vendor's: https://kafka.apache.org/documentation/#record. ``value`` may not change meanwhile."""
        timestamp = int(time.time() * 1000) if timestamp is None else timestamp
        is_first = self._first_timestamp is None
        first_timestamp = timestamp if self._first_timestamp is None else self._first_timestamp
        head, tail = bytearray(1), bytearray()
        encode_varint(timestamp - first_timestamp, head.append)
        encode_varint(offset, head.append)
        _put(head, key)
        encode_varint(-1 if value is None else len(value), head.append)
        encode_varint(len(headers), tail.append)
        for name, found in headers:
            _put(tail, name.encode())
            _put(tail, found)
        length = len(head) + len(value or b"") + len(tail)
        needed = length + size_of_varint(length)
        if not is_first and self._size + needed > self._batch_size:
            return None
        self._first_timestamp = first_timestamp
        self._max_timestamp = timestamp if is_first else max(self._max_timestamp, timestamp)
        self._num_records += 1
        self._last_offset = offset
        start = bytearray()
        encode_varint(length, start.append)
        self._parts += (start, head, value or b"", tail)
        self._size += needed
        return DefaultRecordMetadata(offset, needed, timestamp)

    def size(self) -> int:
        """Bytes so far."""
        return self._size

    def build(self) -> Any:
        """The batch, as the vendor makes it."""
        self._buffer = bytearray().join(self._parts)
        self._parts.clear()
        return super().build()


def _put(buffer: bytearray, value: bytes | None) -> None:
    """Append bytes with their length before them, -1 for none."""
    encode_varint(-1 if value is None else len(value), buffer.append)
    buffer += value or b""


memory_records.DefaultRecordBatch = _Batch  # pyright: ignore[reportAttributeAccessIssue]
memory_records.DefaultRecordBatchBuilder = _BatchBuilder  # pyright: ignore[reportAttributeAccessIssue]


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
        # There is no other place to reach it.
        transport._sock_recv = receiver(transport, transport._sock_recv)  # noqa: SLF001
        return transport


def receiver(transport: Any, vendors: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """A transport's way to receive: as much as is there, into one buffer, whose bytes last until the next call.

    The vendor takes 4096 bytes at a time, hands the interpreter to other threads with each, and copies all of them
    twice. Where the end is there too it drops what came before it, and what a broker says last is why it will not let
    us in.
    """
    buffer = memoryview(bytearray(_RECEIVED_BYTES))

    def received() -> tuple[bytes | memoryview, Any]:
        filled, beyond = 0, b""
        with contextlib.suppress(Exception):
            socket = transport._sock  # noqa: SLF001
            while filled < len(buffer):
                try:
                    size = socket.recv_into(buffer[filled:])
                except _NOTHING_YET:
                    return buffer[:filled], None
                if not size:
                    break
                filled += size
            # What TLS has decrypted already, the selector does not tell of.
            while filled == len(buffer) and hasattr(socket, "pending") and (size := socket.pending()):
                beyond += socket.recv(size)
        if beyond:
            return b"".join((buffer, beyond)), None
        # The end, or an error: the vendor meets it again, at the latest at the next call.
        return (buffer[:filled], None) if filled else vendors()

    return received


class VendorClient(KafkaNetClient):  # type: ignore[misc]
    """The vendor's network client with our manager of connections."""

    def __init__(self, *, on_created: Callable[[VendorClient, VendorManager], None], **configs: Any) -> None:
        net = NetworkSelector(**configs)
        manager = VendorManager(net, **configs)
        self._sleeps_on = False
        super().__init__(net=net, manager=manager, **configs)
        on_created(self, manager)

    def wakeup(self) -> None:
        """As the vendor's, but for records that are sent :meth:`together`."""
        if not self._sleeps_on:
            super().wakeup()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wake the vendor's thread once, at the end, for all records that are sent meanwhile; by one thread at a time.

        The vendor wakes it with the first record of each partition, which then goes alone: a request costs client and
        broker more than a hundred kilobytes in it.
        """
        self._sleeps_on = True
        try:
            yield
        finally:
            self._sleeps_on = False
            super().wakeup()


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
