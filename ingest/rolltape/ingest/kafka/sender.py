"""The thread that brings a producer's spool to the brokers: in order, older epochs first, until they have everything.

Whatever fails is sent again from the oldest place of the spool that is not acknowledged, through a new connection: the
lanes' numbers make a repeat harmless, so nothing here needs to know what became of a record whose answer was lost.
Nothing is ever dropped: a record that the brokers will not take stops the sender, which says so until it can go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from rolltape.ingest.kafka.blobs import BlobStore
from rolltape.ingest.kafka.client import BrokerProducer, KafkaClient, Pending, record_bytes
from rolltape.ingest.kafka.topics import MAX_MESSAGE_BYTES
from rolltape.ingest.kafka.versions import (
    PRODUCERS_PARTITION,
    VERSIONS_PARTITION,
    Keyed,
    VersionKeys,
    epoch_message,
)
from rolltape.ingest.kafka.wire import Outgoing, to_claim, to_message
from rolltape.ingest.lanes import NOTHING, Lane
from rolltape.ingest.spool_reader import EpochReader, Place, ProducerReader, SpooledRecord
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    LogError,
    LogUnreachableError,
    RecordTooLargeError,
    RolltapeError,
)

_READ_BYTES: Final = 8 << 20
_IDLE_S: Final = 0.25
_ATTEMPT_S: Final = 5.0
_FIRST_BACKOFF_S: Final = 0.05
_LAST_BACKOFF_S: Final = 2.0
_MIN_ROOM: Final = 64 << 10
_LOG: Final = logging.getLogger(__name__)


class _InFlight(NamedTuple):
    """A spooled record and what of it is on its way."""

    epoch: EpochReader
    spooled: SpooledRecord
    lane: Lane
    pending: tuple[Pending, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a sender needs of its log.

    Attributes:
        client: opens connections.
        blobs: where claimed payloads go; None where there is no lake.
        limit: largest message that the brokers take of a topic, in bytes with overhead.
        refresh: look at the topics again, after the brokers refused a record for its size.
    """

    client: KafkaClient
    blobs: BlobStore | None
    limit: Callable[[str], int]
    refresh: Callable[[], None]


class Sender:
    """Sends what lies in one producer's folder. Its methods may be called by any thread."""

    def __init__(self, route: Route, producer_folder: Path, epoch: int) -> None:
        """Start the thread; ``epoch`` is the one that is being written."""
        self._route = route
        config = route.client.config
        # The thread tries again by itself, and must be able to end in time.
        self._client = KafkaClient(replace(config, bootstrap_timeout_s=min(config.bootstrap_timeout_s, _ATTEMPT_S)))
        self._epoch = epoch
        self._reader = ProducerReader(producer_folder)
        self._broker: BrokerProducer | None = None
        self._versions = VersionKeys(self._client)
        self._ready: deque[tuple[EpochReader, SpooledRecord]] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._in_flight_bytes = 0
        self._limits: dict[str, int] = {}
        self._announced = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._marks: dict[Lane, int] = {}
        self._confirmed_bytes = 0
        self._older_epochs = [reader.epoch for reader in self._reader.epochs() if reader.epoch < epoch]
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"rolltape-sender-{producer_folder.name}", daemon=True)
        self._thread.start()

    # What others see.

    @property
    def confirmed_bytes(self) -> int:
        """Spooled bytes of this epoch that the brokers have."""
        return self._confirmed_bytes

    @property
    def older_epochs(self) -> list[int]:
        """Epochs before this one whose records the brokers do not have yet."""
        return self._older_epochs

    @property
    def error(self) -> Exception | None:
        """Why it does not get on; None while it does."""
        return self._error

    def mark(self, lane: Lane) -> int:
        """Last ``lane_seq`` of a lane that the brokers acknowledged, -1 for none."""
        return self._marks.get(lane, NOTHING)

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    def wait(self, timeout_s: float) -> None:
        """Return after the next acknowledgement or error, at the latest after ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``condition`` holds or the monotonic clock reads ``deadline``; whether it held."""
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, _IDLE_S))
        return True

    def stop(self) -> None:
        """End the thread. What is not acknowledged stays in the spool for the next start."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def forget_drained(self) -> None:
        """Delete what the brokers have whole, once the thread ended and the epoch was sealed."""
        self._reader.rescan()
        if not self._in_flight and not self._ready:
            for reader in self._reader.epochs():
                reader.confirm(reader.place)
        self._reader.forget_drained()
        self._reader.close()

    # The thread.

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set():
            self._wake.clear()
            try:
                progress = self._round()
            except (RolltapeError, OSError) as error:
                self._fail(error)
                self._stop.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                continue
            if progress:
                backoff_s = _FIRST_BACKOFF_S
            self._wake.wait(_IDLE_S)
        self._drop_connection()

    def _round(self) -> bool:
        """Take what was decided, send what there is room for; whether something was acknowledged.

        Raises:
            LogError, StoreError, OSError: something failed; everything after it is to be sent again.
        """
        acknowledged = self._reap()
        self._fill()
        return acknowledged

    def _reap(self) -> bool:
        confirmed: dict[EpochReader, Place] = {}
        failed: Exception | None = None
        while self._in_flight and all(pending.done() for pending in self._in_flight[0].pending):
            first = self._in_flight[0]
            failed = next((error for pending in first.pending if (error := pending.error()) is not None), None)
            if failed is not None:
                break
            self._in_flight.popleft()
            self._in_flight_bytes -= first.spooled.num_bytes
            segment, offset = first.spooled.place
            confirmed[first.epoch] = Place(segment, offset + first.spooled.num_bytes)
            self._marks[first.lane] = first.spooled.record.headers.last_lane_seq
            if first.epoch.epoch == self._epoch:
                self._confirmed_bytes += first.spooled.num_bytes
        for reader, place in confirmed.items():
            reader.confirm(place)
        if confirmed:
            self._error = None
            self._look_at_older_epochs()
            self._tell()
        if failed is not None:
            self._learn_limit(failed)
            raise failed
        return bool(confirmed)

    def _look_at_older_epochs(self) -> None:
        if self._older_epochs:
            self._reader.forget_drained()
            self._older_epochs = [reader.epoch for reader in self._reader.epochs() if reader.epoch < self._epoch]

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fill(self) -> None:
        room = self._client.config.max_in_flight_bytes
        while not self._stop.is_set():
            if not self._ready:
                self._reader.rescan()
                left = room - self._in_flight_bytes
                if left < min(_MIN_ROOM, room) and self._in_flight:
                    return
                self._ready.extend(self._reader.read(min(left, _READ_BYTES)))
                if not self._ready:
                    self._look_at_empty_epochs()
                    return
            epoch, spooled = self._ready[0]
            if self._in_flight and self._in_flight_bytes + spooled.num_bytes > room:
                return
            self._send(epoch, spooled)
            self._ready.popleft()

    def _look_at_empty_epochs(self) -> None:
        """An older epoch without a record has nothing to be acknowledged; it goes once nothing of it is on its way."""
        if self._older_epochs and not self._in_flight:
            for reader in self._reader.epochs():
                reader.confirm(reader.place)
            before = self._older_epochs
            self._look_at_older_epochs()
            if before != self._older_epochs:
                self._tell()

    def _send(self, epoch: EpochReader, spooled: SpooledRecord) -> None:
        broker = self._connection()
        record = spooled.record
        messages = [(Partition(record.topic, record.partition), self._message(spooled))]
        keyed: list[Keyed] = self._versions.messages(record) if record.topic == "weights" and spooled.intact else []
        pending = [broker.send(partition, *message) for partition, message in messages]
        pending += [broker.send(VERSIONS_PARTITION, *message) for message in keyed]
        lane = Lane(record.headers.producer_id, record.headers.producer_epoch, record.topic, record.partition)
        self._in_flight.append(_InFlight(epoch, spooled, lane, tuple(pending)))
        self._in_flight_bytes += spooled.num_bytes

    def _message(self, spooled: SpooledRecord) -> Outgoing:
        """The message of a record: with its payload, or with a claim check where it is too large."""
        record = spooled.record
        message = to_message(record, intact=spooled.intact)
        limit = self._limit(record.topic)
        num_bytes = record_bytes(*message)
        claimed = record.num_bytes > self._client.config.claim_check_bytes and self._route.blobs is not None
        if num_bytes <= limit and not claimed:
            return message
        if self._route.blobs is None:
            raise RecordTooLargeError(
                f"expected a record of at most {limit} bytes for topic {record.topic}, got one of {num_bytes}; open "
                "the log with a lake (kafka://…?lake=URL): payloads that are too large are kept beside it"
            )
        claim = to_claim(record, *self._route.blobs.put(record.value))
        if record_bytes(*claim) > limit:
            raise RecordTooLargeError(
                f"expected headers of a record to fit the {limit} bytes that topic {record.topic} takes, got "
                f"{record_bytes(*claim)}; raise the topic's max.message.bytes"
            )
        return claim

    def _limit(self, topic: str) -> int:
        return min(self._route.limit(topic), self._limits.get(topic, MAX_MESSAGE_BYTES))

    def _learn_limit(self, error: Exception) -> None:
        """The brokers found a record too large: their limit is lower than we thought."""
        if not isinstance(error, RecordTooLargeError):
            return
        record = self._in_flight[0].spooled.record
        size = record_bytes(*to_message(record))
        with contextlib.suppress(LogError):
            self._route.refresh()
        if size <= self._limit(record.topic):
            self._limits[record.topic] = size - 1

    def _connection(self) -> BrokerProducer:
        if self._broker is None:
            self._broker = self._client.producer(max_record_bytes=MAX_MESSAGE_BYTES, on_done=self._wake.set)
            if not self._announced:
                announced = self._broker.send(
                    PRODUCERS_PARTITION, *epoch_message(self._reader.producer_id, self._epoch)
                )
                self._broker.flush(self._client.config.delivery_timeout_s)
                error = announced.error()
                if error is not None:
                    raise error
                if not announced.done():
                    raise LogUnreachableError("expected the brokers to take the producer's epoch, got no answer")
                self._announced = True
        return self._broker

    def _fail(self, error: Exception) -> None:
        if type(error) is not type(self._error):
            _LOG.warning("producer %s: sending again from the spool after: %s", self._reader.producer_id, error)
        self._error = error
        self._drop_connection()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._ready.clear()
        for reader in self._reader.epochs():
            reader.rewind()
        self._tell()

    def _drop_connection(self) -> None:
        if self._broker is not None:
            self._broker.close(0.0)
            self._broker = None
