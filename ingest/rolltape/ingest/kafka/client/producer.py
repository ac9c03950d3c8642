"""Sending records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from rolltape.ingest.kafka.client.connection import Connection
from rolltape.ingest.kafka.client.messages import Headers, Pending
from rolltape.ingest.kafka.client.vendor import kafka, vendor
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import TopicError

_BATCH_BYTES: Final = 1 << 20
_CLOSE_S: Final = 5.0


class _PendingRecord:
    """A record that the vendor's producer took."""

    __slots__ = ("_connection", "_future")

    def __init__(self, future: Any, connection: Connection) -> None:
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
        self._connection = Connection(config)
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
        """Hand one record over; returns before it is sent. ``value``, bytes or a buffer of them, may not change.

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

    def together(self) -> contextlib.AbstractContextManager[None]:
        """What is sent meanwhile goes in as few requests as it can; by one thread at a time."""
        return self._connection.together()

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
