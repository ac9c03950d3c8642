"""The embedded log: the lake itself is the log, spools lead to it, readers tail its commits.

One committer of each lake and machine archives all spools. A flush proves: it reads the lane's mark from the lake's own
commits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Final, Self

from rolltape.ingest.committer import Committer, CommitterMode, CommitterOptions
from rolltape.ingest.lanes import NOTHING, Lane, lane_marks, newest_epoch
from rolltape.ingest.locks import is_locked
from rolltape.ingest.log import Delivery, Level, LogReader
from rolltape.ingest.spool import SpoolWriter
from rolltape.ingest.spool_layout import COMMITTER_LOCK, epochs_of
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import CommitterFencedError, ConfigError, FlushTimeout, LaneGapError
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake
from rolltape.store.snapshot import Snapshot
from rolltape.store.tail import Tail

# How often a flush looks at the lake: some microseconds on a disk, a request in an object store.
_PROOF_POLL_S: Final = 0.002
_REMOTE_PROOF_POLL_S: Final = 0.02
_TAKEOVER_POLL_S: Final = 0.25
_REFRESH_S: Final = 0.05


class EmbeddedLog:
    """A lake as event log.

    ``committer``: ``thread`` runs it in this process (and fails if another does), ``external`` never does, ``auto``
    does while no other process does, and takes over when that one ends.
    """

    def __init__(
        self,
        lake: Lake,
        committer: CommitterMode = "auto",
        *,
        options: CommitterOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Open the log of ``lake``.

        Raises:
            CommitterFencedError: mode ``thread``, and another committer runs on this machine.
            ConfigError: an unknown mode.
        """
        if committer not in ("auto", "thread", "external"):
            raise ConfigError(f"committer: expected auto, thread or external, got {committer!r}")
        self.lake = lake
        self._marks = Lake.open(lake.location, read_only=True)
        self._host = None if committer == "external" else CommitterHost(lake, committer, options, limits)

    def producer(self, producer_id: str) -> EmbeddedProducer:
        """Open the only live writer of ``producer_id`` on this machine (see :class:`rolltape.ingest.log.EventLog`)."""
        archived = newest_epoch(self._marks.snapshot().transactions, producer_id)
        writer = SpoolWriter(self.lake.spool_path, producer_id, minimum_epoch=archived + 1)
        return EmbeddedProducer(self, writer)

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> LogReader:
        """A reader that tails the lake's commits."""
        return EmbeddedReader(self.lake, start, topics, kinds)

    def end(self) -> Cursor:
        """The cursor after everything that is committed."""
        return self.lake.cursor()

    def num_partitions(self, topic: str) -> int:  # noqa: ARG002  # other logs have several
        """One partition of each topic."""
        return 1

    @property
    def linger_s(self) -> float:
        """Nothing is held back: the committer's group commit gathers what comes."""
        return 0.0

    def wait_until_archived(self, timeout_s: float = 60.0) -> None:
        """What is logged lies in the lake: the log is the lake."""

    def newest_versions(self) -> list[Delivery]:
        """Empty: the lake has them."""
        return []

    @property
    def proof_poll_s(self) -> float:
        """How long a flush waits between two looks at a mark."""
        return _PROOF_POLL_S if self.lake.location.is_local else _REMOTE_PROOF_POLL_S

    def mark(self, lane: Lane) -> int:
        """Last ``lane_seq`` of a lane that the lake's newest version has, -1 for none."""
        return self._transactions().get(lane.app_id, NOTHING)

    def _transactions(self) -> Mapping[str, int]:
        """Marks that are durable: what the committer of this process committed, else what the lake's log says."""
        own = None if self._host is None or self.lake.location.is_local else self._host.committed()
        return self._marks.snapshot().transactions if own is None else own.transactions

    def notify(self) -> None:
        """Tell a committer in this process that there is something to do."""
        if self._host is not None:
            self._host.notify()

    def check_committer(self) -> None:
        """Raise what a committer in this process died of."""
        if self._host is not None:
            self._host.check()

    def explain_delay(self, producer_id: str, lanes: Collection[Lane] = ()) -> str:
        """Why something may not have been committed in time, for error messages."""
        transactions = self._marks.snapshot().transactions
        marks = dict.fromkeys(lanes, NOTHING) | lane_marks(transactions)
        own = {lane: mark for lane, mark in marks.items() if lane.producer_id == producer_id}
        alarms = [row["alarm_raised"] for row in self.lake.read("alarm_raised").to_pylist()]
        for detail in (str(alarm["detail"]) for alarm in alarms if alarm["alarm"] == "lane_gap"):
            if any(detail.startswith(f"lane {lane}: expected lane_seq {mark + 1},") for lane, mark in own.items()):
                return detail
        if not is_locked(self.lake.spool_path / COMMITTER_LOCK):
            return (
                f"no committer runs for {self.lake.location}: start one (python -m rolltape.ingest.committer), or open "
                "the log with 'auto'"
            )
        return "the committer is behind: look at the disk's speed and free space"

    def close(self) -> None:
        """Stop the committer of this handle once it drained the spools. Idempotent."""
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class EmbeddedReader(Tail):
    """A tail of the lake as a log's reader."""

    def close(self) -> None:
        """Nothing is held."""


class CommitterHost:
    """A thread that runs the committer while this process holds its lock."""

    def __init__(
        self, lake: Lake, mode: CommitterMode, options: CommitterOptions | None, limits: Limits | None
    ) -> None:
        """Take the lock now if it is free; mode ``thread`` insists."""
        self._lake = lake
        self._options = options
        self._limits = limits
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._committer = self._try_start(insist=mode == "thread")
        self._thread = threading.Thread(target=self._run, name="rolltape-committer", daemon=True)
        self._thread.start()

    def _try_start(self, *, insist: bool) -> Committer | None:
        if not insist and is_locked(self._lake.spool_path / COMMITTER_LOCK):
            return None
        try:
            # A handle of its own: nobody waits for the lake's lock while a commit is written.
            return Committer(Lake.open(self._lake.location), self._options, limits=self._limits)
        except CommitterFencedError:
            if insist:
                raise
            return None

    def _run(self) -> None:
        try:
            while self._committer is None and not self._stop.wait(_TAKEOVER_POLL_S):
                self._committer = self._try_start(insist=False)
            if self._committer is not None:
                self._committer.run(self._stop)
        except BaseException as error:  # noqa: BLE001  # a thread's error is raised by the next flush
            self._error = error
        finally:
            if self._committer is not None:
                self._committer.close()

    def committed(self) -> Snapshot | None:
        """The lake as this process's committer left it; None where another commits."""
        return None if self._committer is None else self._committer.committed()

    def notify(self) -> None:
        """There is something to do."""
        if self._committer is not None:
            self._committer.wake.set()

    def check(self) -> None:
        """Raise what the thread died of."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop after draining, and raise what the thread died of. Idempotent."""
        self._stop.set()
        self.notify()
        self._thread.join()
        self.check()


class EmbeddedProducer:
    """Writer of one producer id: a spool, and proof from the lake (see :class:`rolltape.ingest.log.LogProducer`)."""

    def __init__(self, log: EmbeddedLog, writer: SpoolWriter) -> None:
        """Use :meth:`EmbeddedLog.producer`."""
        self.producer_id = writer.producer_id
        self.epoch = writer.epoch
        self._log = log
        self._writer = writer
        self._sent: dict[Lane, int] = {}
        self._unproven: deque[tuple[Lane, int, int]] = deque()
        self._unproven_bytes = 0
        self._refreshed = 0.0
        self._lock = threading.Lock()

    @property
    def unacknowledged_bytes(self) -> int:
        """Spooled bytes that the lake is not known to have; looks at the lake every now and then."""
        if self._unproven_bytes and time.monotonic() - self._refreshed > _REFRESH_S:
            self._refresh()
        return self._unproven_bytes

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        with self._lock:
            while self._unproven:
                lane, last, num_bytes = self._unproven[0]
                if self._log.mark(lane) < last:
                    break
                self._unproven.popleft()
                self._unproven_bytes -= num_bytes

    def send(self, record: Record, *, more: bool = False) -> None:  # noqa: ARG002  # the committer looks by itself
        """Append one record to the spool."""
        num_bytes = self._writer.append(record)
        lane = Lane(self.producer_id, self.epoch, record.topic, record.partition)
        with self._lock:
            self._sent[lane] = max(record.headers.last_lane_seq, self._sent.get(lane, NOTHING))
            self._unproven.append((lane, record.headers.last_lane_seq, num_bytes))
            self._unproven_bytes += num_bytes
        self._log.notify()

    def acknowledged(self, partition: Partition) -> int:
        """Last ``lane_seq`` that the lake's newest version has."""
        return self._log.mark(Lane(self.producer_id, self.epoch, *partition))

    def flush(self, level: Level, timeout_s: float) -> None:
        """Sync the spool; at level ``logged`` also wait until the lake's commits show every lane's mark."""
        self._writer.sync()
        if level == "spooled":
            return
        with self._lock:
            wanted = dict(self._sent)
        deadline = time.monotonic() + timeout_s
        while wanted := {lane: last for lane, last in wanted.items() if self._log.mark(lane) < last}:
            self._log.check_committer()
            if time.monotonic() >= deadline:
                raise self._late(f"everything sent to be logged within {timeout_s} s, got {len(wanted)} lanes behind")
            time.sleep(self._log.proof_poll_s)
        self._refresh()

    def _late(self, what: str) -> FlushTimeout | LaneGapError:
        why = self._log.explain_delay(self.producer_id, list(self._sent))
        kind = LaneGapError if why.startswith("lane ") else FlushTimeout
        return kind(f"producer {self.producer_id!r}: expected {what}; {why}. Nothing is lost: the spool keeps it")

    def wait_for_older_epochs(self, timeout_s: float) -> None:
        """Wait until the committer archived and removed the spools of older epochs."""
        deadline = time.monotonic() + timeout_s
        while older := [epoch for epoch in epochs_of(self._writer.producer_folder) if epoch < self.epoch]:
            self._log.check_committer()
            if time.monotonic() >= deadline:
                raise self._late(f"older epochs to be logged within {timeout_s} s, got epochs {older} in the spool")
            time.sleep(self._log.proof_poll_s)

    def close(self) -> None:
        """Sync and seal the spool, and give the producer id back. Idempotent."""
        self._writer.close()
