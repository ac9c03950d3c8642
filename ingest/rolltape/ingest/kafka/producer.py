"""A producer of the log over Kafka: a spool on this machine's disk, and a thread that brings it to the brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rolltape.ingest.kafka.claims import Claims, too_large
from rolltape.ingest.kafka.client import Headers, KafkaClient, record_bytes
from rolltape.ingest.kafka.sender import Sender
from rolltape.ingest.kafka.versions import newest_registered_epoch
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.lanes import NOTHING, Lane, checked_producer_id, newest_epoch
from rolltape.ingest.log import Level
from rolltape.ingest.spool import SpoolWriter
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    FlushTimeout,
    LogAuthenticationError,
    LogAuthorizationError,
    RecordTooLargeError,
)

if TYPE_CHECKING:
    from rolltape.ingest.kafka.log import KafkaLog

_CLOSE_S: Final = 10.0
_ATTEMPT_S: Final = 5.0
_FINAL: Final = (LogAuthenticationError, LogAuthorizationError, RecordTooLargeError)


class KafkaProducer:
    """Writer of one producer id (see :class:`rolltape.ingest.log.LogProducer`). Threads may share it."""

    def __init__(self, log: KafkaLog, producer_id: str) -> None:
        """Use :meth:`KafkaLog.producer`."""
        self._log = log
        self.producer_id = checked_producer_id(producer_id)
        self._writer = SpoolWriter(log.spool_path, producer_id, minimum_epoch=self._minimum_epoch())
        self.epoch = self._writer.epoch
        self._lock = threading.Lock()
        self._sent: dict[Lane, int] = {}
        self._sent_bytes = 0
        self._looked_at_bytes = 0
        self._closed = False
        config = log.client.config
        # The sender tries again by itself, and must be able to end in time.
        client = KafkaClient(replace(config, bootstrap_timeout_s=min(config.bootstrap_timeout_s, _ATTEMPT_S)))
        claims = Claims(log.blobs, config.claim_check_bytes, limit=log.max_message_bytes, refresh=log.refresh_topics)
        self._sender = Sender(client, claims, self._writer.producer_folder, self.epoch)

    def _minimum_epoch(self) -> int:
        """Above every epoch that the lake or the log knows: this id may have run elsewhere since this disk counted."""
        archived = newest_epoch(self._log.transactions(), self.producer_id)
        return max(archived, newest_registered_epoch(self._log.client, self.producer_id)) + 1

    @property
    def unacknowledged_bytes(self) -> int:
        """Spooled bytes of this epoch that the brokers have not acknowledged."""
        sent = self._sent_bytes
        found = sent - self._sender.confirmed_bytes
        # Who sends takes acknowledgements too; who only looks has the sender's thread take them.
        if found and sent == self._looked_at_bytes:
            self._sender.nudge()
        self._looked_at_bytes = sent
        return found

    def send(self, record: Record, *, more: bool = False) -> None:
        """Append one record to the spool. It waits for those that follow at once (``more``), to go with them.

        Raises:
            StorageFullError: no room; the record was not taken, the same one may be sent again.
            RecordTooLargeError: above what its topic takes, and no lake to keep its payload beside; not taken.
        """
        pairs = record.headers.to_pairs()
        self._check_size(record, pairs)
        lane = Lane(self.producer_id, self.epoch, record.topic, record.partition)
        with self._lock:
            place = self._writer.append_at(record, pairs)
            self._sent[lane] = max(record.headers.last_lane_seq, self._sent.get(lane, NOTHING))
            self._sent_bytes += place.num_bytes
            self._sender.hand_over(record, pairs, place, more=more)

    def _check_size(self, record: Record, pairs: Headers) -> None:
        limit = self._log.max_message_bytes(record.topic)
        suspect = self._log.blobs is None and record.num_bytes > limit // 2
        if suspect and record_bytes(*to_message(record, pairs)) > limit:
            raise too_large(record, limit)

    def acknowledged(self, partition: Partition) -> int:
        """Last ``lane_seq`` that the brokers acknowledged, -1 for none."""
        return self._sender.mark(Lane(self.producer_id, self.epoch, *partition))

    def flush(self, level: Level, timeout_s: float) -> None:
        """Sync the spool; at level ``logged`` wait until all in-sync replicas of the brokers have everything instead.

        Raises:
            FlushTimeout: not proven in time; nothing is lost, the spool keeps it.
            LogAuthenticationError, LogAuthorizationError, RecordTooLargeError: the brokers will not take it.
        """
        if level == "spooled":
            self._writer.sync()
            return
        deadline = time.monotonic() + timeout_s
        with self._lock:
            wanted = dict(self._sent)
        self._await(lambda: all(self._sender.mark(lane) >= last for lane, last in wanted.items()), deadline, timeout_s)

    def _await(self, condition: Callable[[], bool], deadline: float, timeout_s: float) -> None:
        def decided() -> bool:
            return condition() or isinstance(self._sender.error, _FINAL)

        in_time = self._sender.wait_until(decided, deadline)
        if condition():
            return
        error = self._sender.error
        if in_time and error is not None:
            raise error
        why = "the brokers are behind" if error is None else str(error)
        raise FlushTimeout(
            f"producer {self.producer_id!r}: expected everything to be acknowledged within {timeout_s} s, got "
            f"{self.unacknowledged_bytes} bytes that are not: {why}. Nothing is lost: the spool keeps it"
        )

    def wait_for_older_epochs(self, timeout_s: float) -> None:
        """Wait until the brokers have what older epochs spooled.

        Raises:
            FlushTimeout: not proven in time.
        """
        self._await(lambda: not self._sender.older_epochs, time.monotonic() + timeout_s, timeout_s)

    def close(self) -> None:
        """Give the brokers a moment to take what is left, seal the spool, and give the producer id back. Idempotent.

        What they did not take stays in the spool; the next start of this producer sends it first.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._sender.wait_until(self._is_through, time.monotonic() + _CLOSE_S)
            self._sender.stop()
        finally:
            self._writer.close(self._sender.forget_drained)

    def _is_through(self) -> bool:
        done = not self.unacknowledged_bytes and not self._sender.older_epochs
        return done or self._sender.error is not None
