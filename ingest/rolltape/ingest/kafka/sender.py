"""Bringing a producer's spool to the brokers: in order, older epochs first, until they have everything.

Whatever fails is sent again from the oldest place of the spool that is not acknowledged, through a new connection: the
lanes' numbers make a repeat harmless, so nothing here needs to know what became of a record whose answer was lost.
Nothing is ever dropped: a record that the brokers will not take stops the sender, which says so until it can go on.

A record that was just spooled is sent by the thread that spooled it, from memory, where nothing stands before it. A
thread does the rest: it takes acknowledgements, reads from the spool what is not in memory any more, and starts again
after failures.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from rolltape.ingest.kafka.claims import Claims
from rolltape.ingest.kafka.client import BrokerProducer, Headers, KafkaClient, Pending
from rolltape.ingest.kafka.progress import read_progress, write_progress
from rolltape.ingest.kafka.topics import MAX_MESSAGE_BYTES
from rolltape.ingest.kafka.versions import (
    PRODUCERS_PARTITION,
    VERSIONS_PARTITION,
    VersionKeys,
    epoch_message,
)
from rolltape.ingest.kafka.wire import DAMAGED
from rolltape.ingest.lanes import NOTHING, Lane
from rolltape.ingest.spool import Appended
from rolltape.ingest.spool_layout import epoch_name
from rolltape.ingest.spool_reader import START, EpochReader, Place, ProducerReader
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    LogAuthenticationError,
    LogUnreachableError,
)

_READ_BYTES: Final = 8 << 20
_IDLE_S: Final = 0.25
_NOTE_S: Final = 0.1
_NUDGE_S: Final = 0.02
_RESCAN_S: Final = 0.05
_FIRST_BACKOFF_S: Final = 0.05
_LAST_BACKOFF_S: Final = 2.0
_MIN_ROOM: Final = 64 << 10
_BURST_BYTES: Final = 4 << 20
_LOG: Final = logging.getLogger(__name__)


class _Spooled(NamedTuple):
    """A record to send: from memory or from the spool, and where it lies there."""

    epoch: EpochReader
    record: Record
    pairs: Headers
    start: Place
    end: Place
    num_bytes: int


class _InFlight(NamedTuple):
    """What of a record is on its way, and what its acknowledgement proves."""

    epoch: EpochReader
    end: Place
    num_bytes: int
    lane: Lane
    last_lane_seq: int
    pending: tuple[Pending, ...]


class Sender:
    """Sends what lies in one producer's folder. Threads may share it."""

    def __init__(self, client: KafkaClient, claims: Claims, producer_folder: Path, epoch: int) -> None:
        """Start the thread; ``epoch`` is the one that is being written.

        An attempt of ``client`` to connect should not take long: the thread tries again by itself, and must be able to
        end in time.
        """
        self._client = client
        self._claims = claims
        self._producer_folder = producer_folder
        self._room = client.config.max_in_flight_bytes
        self._epoch = epoch
        self._reader = ProducerReader(producer_folder)
        self._current = next(reader for reader in self._reader.epochs() if reader.epoch == epoch)
        for reader in self._reader.epochs():
            reader.resume_at(read_progress(self._folder(reader)))
        self._noted: dict[int, tuple[float, Place]] = {}
        self._broker: BrokerProducer | None = None
        self._versions = VersionKeys(self._client)
        self._announced = False
        # Handed over from memory: appended by those who spool (one at a time), taken under the lock.
        self._handed: deque[_Spooled] = deque()
        self._handed_bytes = self._taken_bytes = 0
        self._more_follow = False
        # What comes next and what is on its way: under the lock.
        self._lock = threading.Lock()
        self._ready: deque[_Spooled] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._in_flight_bytes = 0
        self._failed: Exception | None = None
        self._rescanned = self._nudged = 0.0
        # What others see.
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._marks: dict[Lane, int] = {}
        self._confirmed_bytes = 0
        self._older_epochs = [reader.epoch for reader in self._reader.epochs() if reader.epoch < epoch]
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"rolltape-sender-{producer_folder.name}", daemon=True)
        self._thread.start()

    # What others see and do.

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

    def hand_over(self, record: Record, pairs: Headers, place: Appended, *, more: bool = False) -> None:
        """Tell of a record that was just spooled at ``place``; by one thread at a time, in the spool's order.

        Where nothing is on its way and no ``more`` follow at once it is sent at once, else with others once something
        was acknowledged or they are many: a request costs the client more than the bytes in it. Where the brokers are
        behind, only the spool keeps it.
        """
        if self._handed_bytes - self._taken_bytes < self._room:
            start = Place(place.segment, place.offset)
            end = Place(place.segment, place.offset + place.num_bytes)
            self._handed.append(_Spooled(self._current, record, pairs, start, end, place.num_bytes))
            self._handed_bytes += place.num_bytes
        self._more_follow = more
        if more and self._handed_bytes - self._taken_bytes < _BURST_BYTES:
            return
        if not self._lock.acquire(blocking=False):
            self._wake.set()
            return
        try:
            if self._is_quiet():
                self._reap()
                if self._gathers():
                    return
                self._stage_handed()
                self._send_ready(at_length=False)
        except Exception as error:  # noqa: BLE001  # the record is spooled; the thread sends it again
            self._failed = error
        finally:
            self._lock.release()
        if self._ready or self._handed or self._failed is not None:
            self._wake.set()

    def _gathers(self) -> bool:
        """Whether what was handed over may wait for more: the next acknowledgement wakes the thread, which sends it."""
        return bool(self._in_flight) and self._handed_bytes - self._taken_bytes < _BURST_BYTES

    def _is_quiet(self) -> bool:
        """Whether nothing stands before what was handed over but what is on its way."""
        standing = self._broker is None or self._failed is not None or self._error is not None
        return not (standing or self._ready or self._older_epochs or self._stop.is_set())

    def nudge(self) -> None:
        """Take acknowledgements soon: somebody looks at what is not acknowledged yet, and may wait for less."""
        now = time.monotonic()
        if now - self._nudged > _NUDGE_S:
            self._nudged = now
            self._wake.set()

    def wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``condition`` holds or the monotonic clock reads ``deadline``; whether it held."""
        with self._changed:
            self._num_waiting += 1
            self._wake.set()
            try:
                while not condition():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(min(left, _IDLE_S))
            finally:
                self._num_waiting -= 1
        return True

    def stop(self) -> None:
        """End the thread. What is not acknowledged stays in the spool for the next start."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def forget_drained(self) -> None:
        """Delete what the brokers have whole, once the thread ended and the epoch was sealed."""
        self._reader.rescan()
        self._confirm_all_read()
        self._reader.forget_drained()
        self._reader.close()

    # The thread.

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set():
            self._wake.clear()
            try:
                with self._lock:
                    progress = self._round()
            except Exception as error:  # noqa: BLE001  # whatever it was, the spool keeps everything: again
                with self._lock:
                    progress = self._fail(error)
                backoff_s = _FIRST_BACKOFF_S if progress else min(2 * backoff_s, _LAST_BACKOFF_S)
                self._stop.wait(backoff_s)
                continue
            if progress:
                backoff_s = _FIRST_BACKOFF_S
            self._wake.wait(_IDLE_S)
        self._drop_connection()

    def _round(self) -> bool:
        """Take what was decided, send what there is room for; whether something was acknowledged.

        Raises:
            Exception: something failed; everything that is not acknowledged is to be sent again.
        """
        if self._failed is not None:
            raise self._failed
        acknowledged = self._reap()
        if self._broker is None:
            self._broker = self._connected()
            if isinstance(self._error, (LogAuthenticationError, LogUnreachableError)):
                self._error = None
        self._rescan()
        self._send_ready(at_length=True)
        while not self._stop.is_set() and not self._ready and self._stage():
            self._send_ready(at_length=True)
        if not self._ready and not self._in_flight:
            self._confirm_all_read()
            self._look_at_older_epochs()
        return acknowledged

    def _on_done(self) -> None:
        """A record was decided. The thread is woken where somebody waits for that, or where room is short."""
        gathered = self._handed and not self._more_follow
        if self._num_waiting or self._ready or gathered or self._in_flight_bytes * 2 > self._room:
            self._wake.set()

    def _rescan(self) -> None:
        now = time.monotonic()
        if self._older_epochs or now - self._rescanned > _RESCAN_S:
            self._rescanned = now
            self._reader.rescan()

    # Acknowledgements.

    def _reap(self) -> bool:
        """Take what was acknowledged; whether something was.

        Raises:
            LogError: the oldest record in flight failed.
        """
        progress, failed = self._take_acknowledged()
        if failed is not None:
            first = self._in_flight[0]
            raise self._claims.explained(failed, first.lane.topic, first.num_bytes)
        return progress

    def _take_acknowledged(self) -> tuple[bool, Exception | None]:
        """Take what was acknowledged up to the first record that is undecided or failed; why it failed."""
        confirmed: dict[EpochReader, Place] = {}
        failed: Exception | None = None
        while self._in_flight and all(pending.done() for pending in self._in_flight[0].pending):
            first = self._in_flight[0]
            failed = next((error for pending in first.pending if (error := pending.error()) is not None), None)
            if failed is not None:
                break
            self._in_flight.popleft()
            self._in_flight_bytes -= first.num_bytes
            confirmed[first.epoch] = first.end
            self._marks[first.lane] = first.last_lane_seq
            if first.epoch is self._current:
                self._confirmed_bytes += first.num_bytes
        for reader, place in confirmed.items():
            reader.confirm(place)
            self._note(reader, place)
        if confirmed:
            self._error = None
            self._tell()
        return bool(confirmed), failed

    def _folder(self, reader: EpochReader) -> Path:
        return self._producer_folder / epoch_name(reader.epoch)

    def _note(self, reader: EpochReader, place: Place, *, at_most_every_s: float = _NOTE_S) -> None:
        """Keep how far the brokers are, now and then."""
        now = time.monotonic()
        noted_at, noted = self._noted.get(reader.epoch, (-math.inf, START))
        if place != noted and now - noted_at >= at_most_every_s:
            write_progress(self._folder(reader), place)
            self._noted[reader.epoch] = (now, place)

    def _look_at_older_epochs(self) -> None:
        """Older epochs go once nothing of them is on its way."""
        if self._older_epochs:
            self._reader.forget_drained()
            self._older_epochs = [reader.epoch for reader in self._reader.epochs() if reader.epoch < self._epoch]
            self._tell()

    def _confirm_all_read(self) -> None:
        """What was read and is not on its way is acknowledged, up to the place where the reader stands."""
        if not self._in_flight and not self._ready:
            for reader in self._reader.epochs():
                reader.confirm(reader.place)
                self._note(reader, reader.place, at_most_every_s=0.0)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Sending.

    def _stage(self) -> bool:
        """Find what is to be sent next, in memory or in the spool; whether there is something."""
        if not self._older_epochs and self._stage_handed():
            return True
        left = self._room - self._in_flight_bytes
        if self._in_flight and left < min(_MIN_ROOM, self._room):
            return False
        for epoch, spooled in self._reader.read(min(max(left, 1), _READ_BYTES)):
            record, place = spooled.record, spooled.place
            pairs = record.headers.to_pairs()
            if not spooled.intact:
                pairs.append((DAMAGED, b"1"))
            end = Place(place.segment, place.offset + spooled.num_bytes)
            self._ready.append(_Spooled(epoch, record, pairs, place, end, spooled.num_bytes))
        return bool(self._ready)

    def _stage_handed(self) -> bool:
        """Take what was handed over, as far as it is next in the spool."""
        while self._handed:
            first = self._handed[0]
            is_next = self._current.skip(first.start, first.end)
            if not is_next and first.start >= self._current.place:
                break
            # Next, or read from the spool meanwhile.
            self._handed.popleft()
            self._taken_bytes += first.num_bytes
            if is_next:
                self._ready.append(first)
        return bool(self._ready)

    def _send_ready(self, *, at_length: bool) -> None:
        while self._has_room_for_next():
            if not self._takes_long(self._ready[0]):
                self._send_together()
            elif at_length:
                self._send_next()
            else:
                return

    def _has_room_for_next(self) -> bool:
        if not self._ready or self._stop.is_set():
            return False
        return not self._in_flight or self._in_flight_bytes + self._ready[0].num_bytes <= self._room

    def _send_together(self) -> None:
        """Send what comes next and does not take long, in as few requests as it can."""
        assert self._broker is not None
        with self._broker.together():
            while self._has_room_for_next() and not self._takes_long(self._ready[0]):
                self._send_next()

    def _send_next(self) -> None:
        self._send(self._ready[0])
        self._ready.popleft()

    def _takes_long(self, item: _Spooled) -> bool:
        """Whether others are asked before it can be sent: that is not for the thread that spooled it."""
        return item.record.topic == "weights" or self._claims.is_claim(item.record, item.pairs)

    def _send(self, item: _Spooled) -> None:
        assert self._broker is not None
        record = item.record
        message = self._claims.message(record, item.pairs)
        pending = [self._broker.send(Partition(record.topic, record.partition), *message)]
        if record.topic == "weights" and (DAMAGED, b"1") not in item.pairs:
            pending += [self._broker.send(VERSIONS_PARTITION, *keyed) for keyed in self._versions.messages(record)]
        headers = record.headers
        lane = Lane(headers.producer_id, headers.producer_epoch, record.topic, record.partition)
        self._in_flight.append(
            _InFlight(item.epoch, item.end, item.num_bytes, lane, headers.last_lane_seq, tuple(pending))
        )
        self._in_flight_bytes += item.num_bytes

    # Connections.

    def _connected(self) -> BrokerProducer:
        broker = self._client.producer(max_record_bytes=MAX_MESSAGE_BYTES, on_done=self._on_done)
        try:
            if not self._announced:
                self._announce(broker)
        except BaseException:
            broker.close(0.0)
            raise
        return broker

    def _announce(self, broker: BrokerProducer) -> None:
        """Make the epoch known before its first record: who takes over this id elsewhere starts above it."""
        pending = broker.send(PRODUCERS_PARTITION, *epoch_message(self._reader.producer_id, self._epoch))
        broker.flush(self._client.config.delivery_timeout_s)
        error = pending.error()
        if error is not None:
            raise error
        if not pending.done():
            raise LogUnreachableError("expected the brokers to take the producer's epoch, got no answer")
        self._announced = True

    def _fail(self, error: Exception) -> bool:
        """Go back to what is acknowledged, without a connection; whether that got on meanwhile."""
        progress, _ = self._take_acknowledged()
        if type(error) is not type(self._error):
            _LOG.warning("producer %s: sending again from the spool after: %s", self._reader.producer_id, error)
        self._error, self._failed = error, None
        self._drop_connection()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._ready.clear()
        for reader in self._reader.epochs():
            reader.rewind()
        self._tell()
        return progress

    def _drop_connection(self) -> None:
        if self._broker is not None:
            self._broker.close(0.0)
            self._broker = None
