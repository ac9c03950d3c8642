"""The embedded log's one committer: it archives all spools of a machine into the lake by group commit.

It looks at the sizes of the spool files every two milliseconds (every twenty after a while without work), commits what
is there at once, and lets what comes during a commit gather for the next. ``python -m rolltape.ingest.committer LAKE``
runs one until SIGTERM, which drains first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from rolltape.ingest.archive import Archive, Outcome
from rolltape.ingest.lake_target import LakeTarget
from rolltape.ingest.lanes import Lane
from rolltape.ingest.locks import FileLock
from rolltape.ingest.memory import MemoryTarget
from rolltape.ingest.parking import Refused
from rolltape.ingest.refused import microseconds
from rolltape.ingest.spool_layout import (
    COMMITTER_LOCK,
    LOSSES,
    WatchedFolder,
    make_folder,
    producers_folder,
    spool_error,
)
from rolltape.ingest.spool_reader import EpochReader, Place, ProducerReader
from rolltape.ingest.upkeep import Upkeep
from rolltape.schema.build import build_batch
from rolltape.schema.codec import make_record
from rolltape.schema.errors import (
    CommitterFencedError,
    ConfigError,
    LogMismatchError,
    StorageFullError,
    StoreUnreachableError,
)
from rolltape.schema.reasons import TRUNCATED_PAYLOAD
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake
from rolltape.store.parquet import encode_file
from rolltape.store.snapshot import KAFKA_TRANSACTION, Snapshot

CommitterMode = Literal["auto", "thread", "external"]

_LOG: Final = logging.getLogger(__name__)

_DAMAGED: Final = Refused(
    TRUNCATED_PAYLOAD,
    "expected a value with the checksum of its frame, got other bytes: they were damaged on disk",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitterOptions:
    """How the committer trades latency against commits.

    Times in seconds. ``linger_s`` is how long the spools must be quiet before a commit starts, and ``max_linger_s`` how
    long it waits for that at most: events that are recorded one after the other then share a commit.
    """

    poll_s: float = 0.002
    idle_poll_s: float = 0.02
    idle_after_s: float = 10.0
    rescan_s: float = 0.02
    linger_s: float = 0.0015
    max_linger_s: float = 0.006
    max_commit_bytes: int = 64 << 20
    retry_s: float = 0.25
    maintenance: bool = True

    def __post_init__(self) -> None:
        for name in ("poll_s", "idle_poll_s", "rescan_s", "retry_s", "max_commit_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")


@cache
def _warm_up() -> None:
    """Pay for first uses (imports, schemas) before the first event waits for its commit."""
    fields = {"event_id": "e", "run_id": "r", "run_epoch": 0, "producer_id": "p", "producer_epoch": 1, "lane_seq": [0]}
    attempt = {"trajectory_id": "t", "attempt": 0, "event_index": 0, "recorded_at": microseconds(0, 1)}
    target = MemoryTarget()
    archive = Archive(target)
    archive.offer(make_record(build_batch("rollout_started", {**fields, **attempt}, 1).batch))
    archive.commit()
    for delivery in target.commits[0]:
        encode_file(delivery.kind, delivery.table)


def _refuse_kafka(lake: Lake) -> None:
    sources = [app_id for app_id in lake.snapshot().transactions if app_id.startswith(f"{KAFKA_TRANSACTION}/")]
    if sources:
        raise LogMismatchError(
            f"expected a lake that is empty or that an embedded log's committer fed, got {lake.location}, in which "
            f"Kafka topics are archived ({sources[0]}): run `rolltape sink` for it, or name another lake"
        )


class Committer:
    """Archives the spools of one lake on this machine. Holds the committer's lock while it lives."""

    def __init__(self, lake: Lake, options: CommitterOptions | None = None, *, limits: Limits | None = None) -> None:
        """Take the lock and the lake's marks.

        Raises:
            CommitterFencedError: another process (or handle) commits for this lake on this machine.
            LogMismatchError: a Kafka log is archived in this lake; that is a sink's work.
            StoreError: the spool cannot be written.
        """
        _refuse_kafka(lake)
        self._lake = lake
        self._options = options or CommitterOptions()
        try:
            make_folder(producers_folder(lake.spool_path))
            # Others look for an instant whether it is held (rolltape.ingest.locks.is_locked).
            lock = FileLock.acquire(lake.spool_path / COMMITTER_LOCK, wait_s=0.05)
        except OSError as error:
            raise spool_error(error, lake.spool_path) from error
        if lock is None:
            raise CommitterFencedError(
                f"expected to be the only committer of {lake.location}, got a lock held by another at "
                f"{lake.spool_path}; use the one that runs (committer='external' or 'auto')"
            )
        self._lock = lock
        _warm_up()
        self.archive = Archive(LakeTarget(lake), limits=limits)
        self._must_rewind = False
        self._producers: dict[str, ProducerReader] = {}
        self._busy: list[ProducerReader] = []
        self._watched = WatchedFolder(producers_folder(lake.spool_path))
        self._parked: dict[Lane, tuple[EpochReader, Place]] = {}
        self._last_rescan = 0.0
        self._upkeep = Upkeep(lake) if self._options.maintenance else None
        self.num_commits = 0
        self.wake = threading.Event()

    # One round.

    def run_once(self) -> bool:
        """Archive what is there now; True if something was committed.

        Raises:
            StorageFullError: no room; nothing was lost, the same round may be run again.
            StoreUnreachableError: the store does not answer; likewise.
            CommitterFencedError: another committer moved the marks.
        """
        if self._must_rewind:
            self._rewind()
        try:
            self._rescan()
            self._gather()
            self.archive.raise_alarms()
            committed = self.archive.commit() is not None
        except BaseException:
            self._rewind()
            raise
        self._confirm()
        self.num_commits += committed
        return committed

    def _gather(self) -> None:
        """Offer everything that is there, then what comes until the spools are quiet."""
        started = time.monotonic()
        num_bytes, quiet_since = 0, started
        while num_bytes < self._options.max_commit_bytes:
            taken = sum(self._offer_from(producer) for producer in self._busy)
            self._resume_lanes()
            now = time.monotonic()
            if taken:
                num_bytes, quiet_since = num_bytes + taken, now
            if not num_bytes:
                return
            if now - quiet_since >= self._options.linger_s or now - started >= self._options.max_linger_s:
                break
            time.sleep(0.0005)

    def _offer_from(self, producer: ProducerReader) -> int:
        taken = 0
        for epoch, spooled in producer.read(self._options.max_commit_bytes):
            refused = None if spooled.intact else _DAMAGED
            outcome = self.archive.offer(spooled.record, checksum=spooled.checksum, refused=refused)
            if outcome is Outcome.PARKED:
                headers = spooled.record.headers
                lane = Lane(headers.producer_id, headers.producer_epoch, spooled.record.topic, spooled.record.partition)
                self._parked.setdefault(lane, (epoch, spooled.place))
            taken += spooled.num_bytes
        return taken

    def _resume_lanes(self) -> None:
        """Read again what waited for records that came since; what else lies behind it is known and costs little."""
        for lane in self.archive.resumable():
            epoch, place = self._parked.pop(lane)
            self.archive.unpark(lane)
            epoch.rewind_to(place)

    def _confirm(self) -> None:
        oldest: dict[int, Place] = {}
        for epoch, place in self._parked.values():
            oldest[id(epoch)] = min(place, oldest.get(id(epoch), place))
        for producer in self._busy:
            for epoch in producer.epochs():
                epoch.confirm(oldest.get(id(epoch), epoch.place))

    def _rewind(self) -> None:
        """Start again from what the lake says; where it does not answer, the next round does."""
        self._must_rewind = True
        self._parked.clear()
        for producer in self._producers.values():
            for epoch in producer.epochs():
                epoch.rewind()
        self.archive.reload()
        self._must_rewind = False

    def committed(self) -> Snapshot:
        """The lake as the last commit left it, or as it was read since; asks nobody."""
        return self._lake.known_snapshot()

    def _rescan(self) -> None:
        now = time.monotonic()
        if now - self._last_rescan < self._options.rescan_s:
            return
        self._last_rescan = now
        if self._watched.changed():
            for folder in self._watched.path.iterdir():
                if folder.name not in self._producers:
                    self._producers[folder.name] = ProducerReader(folder)
        for producer in self._producers.values():
            producer.rescan()
            producer.forget_drained()
        # Spools of producers that came and went stay as empty folders; only these are polled.
        self._busy = [producer for producer in self._producers.values() if not producer.is_idle]
        self._accept_losses()

    def _accept_losses(self) -> None:
        """Close gaps whose loss an operator accepted; the request goes once its dead letter is committed."""
        for path in sorted((self._lake.spool_path / LOSSES).glob("*.json")):
            request = json.loads(path.read_text())
            self.archive.accept_loss(Lane(*request["lane"]), request["through"])
            self.archive.commit()
            path.unlink()
            self._resume_lanes()

    # Many rounds.

    def run(self, stop: threading.Event) -> None:
        """Archive until ``stop`` is set, then what is still there. Waits where the disk is full.

        Raises:
            CommitterFencedError: another committer took over.
        """
        last_work = time.monotonic()
        while not stop.is_set():
            try:
                worked = self.run_once()
            except (StorageFullError, StoreUnreachableError) as error:
                _LOG.warning("commit waits, nothing is lost: %s", error)
                stop.wait(self._options.retry_s)
                continue
            now = time.monotonic()
            last_work = now if worked else last_work
            if self._upkeep is not None:
                self._upkeep.after_round(committed=worked)
            if worked:
                continue
            idle = now - last_work > self._options.idle_after_s
            self.wake.wait(self._options.idle_poll_s if idle else self._options.poll_s)
            self.wake.clear()
        self.drain()

    def drain(self) -> None:
        """Archive everything that is spooled now."""
        self._last_rescan = 0.0
        while self.run_once():
            self._last_rescan = 0.0

    def close(self) -> None:
        """Wait for maintenance that runs, and give the lock back. Idempotent."""
        if self._upkeep is not None:
            self._upkeep.close()
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()
        self._lock.release()


def main(arguments: list[str] | None = None) -> int:
    """Run the committer of one lake until SIGTERM or SIGINT; drains before it ends."""
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) != 1:
        sys.stderr.write("usage: python -m rolltape.ingest.committer LAKE\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.closing(Committer(Lake.open(names[0]))) as committer:
        sys.stdout.write(json.dumps({"committer": "running", "lake": names[0]}) + "\n")
        sys.stdout.flush()
        committer.run(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
