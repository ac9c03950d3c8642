"""The sink: it archives the log in the lake, exactly once (design §6).

Any number of sinks share the partitions as members of one group. The group only hands partitions out: where a sink goes
on reading is what the lake's transactions say, and they move in the commit that carries the rows. On every change of
the assignment a sink commits or drops what it staged, reads the lake's marks again and seeks. A sink that lost its
partitions without noticing is fenced by those transactions. What a commit came to whose answer was lost, the lake says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Self

from rolltape.ingest.archive import Archive
from rolltape.ingest.kafka.blobs import BlobStore
from rolltape.ingest.kafka.client import BrokerConsumer, KafkaClient, Message, connect
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.feed import feed
from rolltape.ingest.kafka.footprint import give_back
from rolltape.ingest.kafka.gap_alarms import GapAlarms
from rolltape.ingest.kafka.metrics import SinkMetrics
from rolltape.ingest.kafka.positions import check_topics, identify, log_bases
from rolltape.ingest.kafka.reader import SINK_ID
from rolltape.ingest.kafka.retention import BlobRetention
from rolltape.ingest.kafka.seam import Seam
from rolltape.ingest.kafka.sink_options import SinkOptions
from rolltape.ingest.kafka.target import MeasuredTarget
from rolltape.ingest.kafka.watch import Watch
from rolltape.ingest.lanes import NOTHING
from rolltape.ingest.upkeep import Upkeep
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    CommitterFencedError,
    LogAuthenticationError,
    LogAuthorizationError,
    LogError,
    LogMismatchError,
    LogUnreachableError,
    OffsetGoneError,
    StorageFullError,
    StoreUnreachableError,
)
from rolltape.schema.kinds import TOPICS
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake
from rolltape.store.maintenance import Maintenance
from rolltape.store.recent import RecentTables

_LOG: Final = logging.getLogger(__name__)

MAINTAINS: Final = Partition("control", 0)
"""Whoever archives this partition looks after the lake: one sink at a time."""

_FINAL: Final = (LogMismatchError, LogAuthenticationError, LogAuthorizationError)
_PASSING: Final = (StorageFullError, StoreUnreachableError, LogUnreachableError, CommitterFencedError)
_POLL_RECORDS: Final = 2_000
_POLL_S: Final = 0.1
"""A round takes no longer where nothing comes, so that a stop is heard."""
_DOUBTFUL_S: Final = 60.0
"""How long other refusals of the brokers are waited out: one that was just restarted does not know its topics yet."""

__all__ = ["MAINTAINS", "Sink", "SinkOptions"]


class Sink:
    """Archives the partitions that the group gives it, or all of them. For one thread."""

    def __init__(
        self,
        config: KafkaConfig,
        lake: Lake,
        *,
        options: SinkOptions | None = None,
        limits: Limits | None = None,
        alone: bool = False,
    ) -> None:
        """Connect and join the group; ``alone`` takes all partitions at once instead.

        Raises:
            LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
            TopicError: topics are missing; names the command that makes them.
            LogMismatchError: log and lake do not belong together; names the ways out.
        """
        self.options = options or SinkOptions()
        self.metrics = SinkMetrics()
        self.num_commits = 0
        self._config, self._lake = config, lake
        self._client: KafkaClient = connect(config)
        self._blobs = BlobStore(lake.location)
        self._identity = identify(self._client)
        check_topics(self._identity, lake.snapshot().transactions, TOPICS)
        self._target = MeasuredTarget(lake, self.metrics)
        self._archive = Archive(
            self._target, limits=limits, archiver_id=SINK_ID, max_parked_bytes=self.options.max_parked_bytes
        )
        self._bases: Mapping[Partition, int] = {}
        self._seam = Seam(self._identity, {})
        group = None if alone else f"{config.prefix}.sink"
        alarms = GapAlarms(self._client, self._identity.topics, self.options.alarm_after_s)
        self._watch = Watch(self.metrics, alarms, group, self.options.status_s)
        self._upkeep: Upkeep | None = None
        self._retention = BlobRetention(self._client, lake)
        # Compaction is another handle's work here: tables that were just written would be kept in vain.
        lake.recent = RecentTables(max_bytes=0)
        self._is_stale = alone
        self._first_staged_s: float | None = None
        self._last_record_s = 0.0
        self._consumer: BrokerConsumer = self._client.consumer(group)
        try:
            port = self.options.metrics_port
            self.metrics_port = None if port is None else self.metrics.serve(port)
            self._join(alone=alone)
        except BaseException:
            self.close()
            raise

    def _join(self, *, alone: bool) -> None:
        if alone:
            self._consumer.assign(self._identity.partitions())
            self._consumer.pause(self._identity.partitions())
        else:
            self._consumer.subscribe(TOPICS, self._on_rebalance, self._on_rebalance)

    def _on_rebalance(self, partitions: Collection[Partition]) -> None:
        """Read nothing more before what was staged is decided and the lake was asked where to go on."""
        self._is_stale = True
        for partition in set(partitions) & self._consumer.assignment():
            self._consumer.seek(partition, 0)

    @property
    def assignment(self) -> set[Partition]:
        """Partitions that this sink archives, once it knows where to go on."""
        return set() if self._is_stale else self._consumer.assignment()

    # One round.

    def run_once(self, timeout_s: float | None = None) -> bool:
        """Read what is there, waiting at most ``timeout_s`` for the first record; True if something was committed.

        Raises:
            StorageFullError, StoreUnreachableError, LogUnreachableError: for now; the next round starts again from what
                the lake says.
            CommitterFencedError: another sink archived the same; likewise.
            LogMismatchError: log and lake do not belong together; names the ways out.
        """
        before = self.num_commits
        try:
            if self._is_stale:
                self._align()
            polled = self._poll(timeout_s)
            if not self._is_stale:
                for partition, messages in polled.items():
                    self._take(partition, messages)
                if self._is_due():
                    self.commit()
            self._look_around()
        except OffsetGoneError:
            # Said by name, with what is lost and the way out, when the positions are compared. What was read before may
            # lie nowhere else by now.
            self._is_stale = True
            self.commit()
        except BaseException:
            self._is_stale = True
            raise
        return self.num_commits > before

    def _poll(self, timeout_s: float | None) -> dict[Partition, list[Message]]:
        if timeout_s is None:
            timeout_s = _POLL_S if self._first_staged_s is None else min(self.options.linger_s, _POLL_S)
        polled = self._consumer.poll(timeout_s, _POLL_RECORDS)
        # Where something came, more comes: it costs less together. What comes alone is not kept waiting.
        self._consumer.gather(much=bool(polled))
        if self._is_stale:
            # Partitions came or went during the poll. What is staged may still be ours to commit: the lake decides.
            self._consumer.pause(self._consumer.assignment())
            self.commit()
        return polled

    def _align(self) -> None:
        """Go on where the lake says, in every partition that is ours now."""
        self._first_staged_s = None
        # Marks and positions of one version: another sink may be committing its last records of our partitions.
        transactions = self._archive.reload()
        places = self._consumer.assignment()
        if not places:
            self._note_assignment(places)
            return
        self._identity = identify(self._client)
        generations = check_topics(self._identity, transactions, {place.topic for place in places})
        self._bases = log_bases(transactions, self._identity.topic_ids)
        begins, ends = self._consumer.begin_offsets(places), self._consumer.end_offsets(places)
        starts = {
            place: self._identity.start(transactions, place, begins[place], ends[place]) for place in sorted(places)
        }
        self._seam = Seam(self._identity, transactions)
        for place, start in starts.items():
            self._consumer.seek(place, self._seam.read_from(place, begins[place], start))
        for app_id, number in generations.items():
            self._archive.stage_transaction(app_id, number)
        self.commit()
        self._consumer.resume(places)
        self._note_assignment(places)
        self._watch.lag.start(starts, ends)

    def _note_assignment(self, places: Collection[Partition]) -> None:
        self._is_stale = False
        self.metrics.assign(places)
        _LOG.info("archives %s", ", ".join(map(str, sorted(places))) or "nothing")
        if self._upkeep is not None and MAINTAINS not in places:
            self._upkeep.close()
            self._upkeep = None
        elif self._upkeep is None and MAINTAINS in places and self.options.maintenance:
            self._upkeep = Upkeep(self._lake, self._after_maintenance)

    def _after_maintenance(self, done: Maintenance) -> None:
        """Count what was done, and delete claimed payloads that nobody needs any more; in the thread of the upkeep."""
        acts = {
            "compaction": int(done.compaction is not None and done.compaction.version is not None),
            "checkpoint": int(done.checkpoint_version is not None),
            "log_files": done.num_log_files_deleted,
            "data_files": done.num_data_files_deleted,
            "blobs": self._retention.run(),
        }
        for act, number in acts.items():
            self.metrics.maintain(act, number)
        give_back()

    def _take(self, partition: Partition, messages: Sequence[Message]) -> None:
        self._last_record_s = time.monotonic()
        messages = self._seam.passed(partition, messages)
        for fed in feed(self._archive, partition, messages, self._bases, self._blobs):
            self.metrics.record(partition.topic, fed.outcome.value, fed.num_bytes)
            self._watch.lag.read(partition, fed.timestamp_ms)
            if fed.seek_to is not None:
                self._consumer.seek(partition, fed.seek_to)
            if self._first_staged_s is None:
                # Set here, not before: after a commit in between the rest of the messages waits for the next one.
                self._first_staged_s = self._last_record_s
            if self._archive.staged_bytes >= self.options.max_commit_bytes:
                self.commit()

    def _is_due(self) -> bool:
        if self._first_staged_s is None:
            return False
        now = time.monotonic()
        return (
            now - self._last_record_s >= self.options.linger_s
            or now - self._first_staged_s >= self.options.max_linger_s
        )

    def commit(self) -> None:
        """Commit what is staged now."""
        self._first_staged_s = None
        if self._archive.commit() is not None:
            self.num_commits += 1
            self._watch.lag.committed()
            if self._upkeep is not None:
                self._upkeep.after_round(committed=True, version=self._lake.known_snapshot().version)

    def _look_around(self) -> None:
        """Every now and then: alarms about gaps, lag and age, the group's offsets, and what the lake needs."""
        if self._is_stale or not self._watch.is_due():
            return
        snapshot = self._lake.snapshot()
        if any(snapshot.transactions.get(gap.lane.app_id, NOTHING) >= gap.first for gap in self._archive.gaps()):
            # Another sink archived what seems to be missing: this one lost the partition and has not heard of it.
            self._is_stale = True
            return
        self._watch.look(self._archive, snapshot, self._consumer, self._bases)
        if self._upkeep is not None:
            self._upkeep.after_round(committed=False, version=snapshot.version)

    # Many rounds.

    def run(self, stop: threading.Event) -> None:
        """Archive until ``stop`` is set; errors that pass are waited out. What is staged then is committed.

        Raises:
            LogMismatchError: log and lake do not belong together; names the ways out.
            LogError, StoreError: one that does not pass.
        """
        pause_s, last_good_s = self.options.retry_s, time.monotonic()
        while not stop.is_set():
            try:
                self.run_once()
            except (*_PASSING, LogError) as error:
                if isinstance(error, _FINAL):
                    raise
                if not isinstance(error, _PASSING) and time.monotonic() - last_good_s > _DOUBTFUL_S:
                    raise
                self._wait_out(error, pause_s, stop)
                pause_s = min(2 * pause_s, self.options.max_retry_s)
            else:
                pause_s, last_good_s = self.options.retry_s, time.monotonic()
        self._finish()

    def _wait_out(self, error: Exception, pause_s: float, stop: threading.Event) -> None:
        self.metrics.retry(error)
        if isinstance(error, CommitterFencedError):
            _LOG.info("another sink archived the same, starting again from the lake: %s", error)
            return
        _LOG.warning("the sink waits, nothing is lost: %s", error)
        if not isinstance(error, LogError):
            self._watch.look_at_lag(self._lake.known_snapshot(), self._consumer, self._bases)
        stop.wait(pause_s)

    def _finish(self) -> None:
        if not self._is_stale:
            try:
                self.commit()
            except _PASSING as error:
                _LOG.warning("the last commit is left to the next sink, nothing is lost: %s", error)

    def drain(self, timeout_s: float = 600.0) -> None:
        """Archive everything that the log holds now, of the partitions that are ours.

        Raises:
            LogUnreachableError: not done in time.
        """
        deadline = time.monotonic() + timeout_s
        ends: dict[Partition, int] | None = None
        while time.monotonic() < deadline:
            try:
                if self._is_stale:
                    self._align()
                if ends is None:
                    ends = self._consumer.end_offsets(self._consumer.assignment())
                if all(self._position(place) >= end for place, end in ends.items()):
                    self.commit()
                    return
                self.run_once()
            except CommitterFencedError as error:
                self.metrics.retry(error)
                self._is_stale = True
        raise LogUnreachableError(f"expected to archive up to {ends} within {timeout_s} s; run it again")

    def _position(self, place: Partition) -> int:
        """The next offset to read, by the brokers' count, once what lies before is staged or archived."""
        return NOTHING if self._is_stale else self._consumer.position(place)

    def close(self) -> None:
        """Leave the group, finish maintenance that runs, and close the connections. Idempotent."""
        if self._upkeep is not None:
            self._upkeep.close()
            self._upkeep = None
        self._consumer.close()
        self.metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
