"""The reader of a Kafka log: the lake's rows from a cursor on, then the brokers'; the same events as the sink archives.

It takes one snapshot of the lake: rows, positions and lane marks of one version. After the rows it goes on in the log
at the snapshot's positions, through an archive that starts from the snapshot's marks and only delivers. So what lies in
both comes once, and dead letters, repeats and gaps are what they are in the lake. Where retention passed it, it does
the same again from its own cursor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.archive import Archive
from rolltape.ingest.conflicts import rows_by_id
from rolltape.ingest.kafka.catchup import Portion, catch_up
from rolltape.ingest.kafka.client import BrokerConsumer, Message
from rolltape.ingest.kafka.feed import feed
from rolltape.ingest.kafka.positions import LogIdentity, check_topics, log_bases
from rolltape.ingest.kafka.seam import Seam
from rolltape.ingest.lake_target import LakeTarget
from rolltape.ingest.lanes import NOTHING, log_app_id
from rolltape.ingest.recent_events import recent_event_ids
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import OffsetGoneError, OffsetLostError, TopicError, VacuumedError
from rolltape.schema.kinds import TOPICS
from rolltape.store.lake import Lake
from rolltape.store.snapshot import EMPTY, Snapshot
from rolltape.store.tail import Delivery, split_by_partition

if TYPE_CHECKING:
    from rolltape.ingest.kafka.log import KafkaLog

SINK_ID: Final = "sink"
"""Producer of the dead letters that a sink makes; a reader makes the same ones."""

NOT_FROM_LAKE: Final = -1
"""The table version of deliveries that come from the brokers."""

_POLL_RECORDS: Final = 2_000
_LOOK_S: Final = 5.0
_REMEMBERED_BYTES: Final = 32 << 20


class _Deliveries:
    """What an archive that only delivers commits to: the newest commit's rows, and recent ones to compare with."""

    def __init__(self, lake: Lake | None, snapshot: Snapshot) -> None:
        self._lake = lake
        self._snapshot = snapshot
        self._recent: deque[Mapping[str, pa.Table]] = deque()
        self._recent_bytes = 0
        self.newest: Mapping[str, pa.Table] = {}

    def transactions(self) -> Mapping[str, int]:
        return self._snapshot.transactions

    def append(
        self,
        tables: Mapping[str, pa.Table],
        transactions: Mapping[str, int],  # noqa: ARG002  # the archive keeps them itself
        expected: Mapping[str, int | None],  # noqa: ARG002
    ) -> None:
        self.newest = tables
        self._recent.append(tables)
        self._recent_bytes += _num_bytes(tables)
        while self._recent_bytes > _REMEMBERED_BYTES and len(self._recent) > 1:
            self._recent_bytes -= _num_bytes(self._recent.popleft())

    def read_events(
        self, kind: str, event_ids: Collection[str], trajectory_ids: Collection[str] | None
    ) -> Mapping[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for tables in self._recent:
            if kind in tables:
                found.update(rows_by_id(tables[kind], event_ids))
        missing = [event_id for event_id in event_ids if event_id not in found]
        if missing and self._lake is not None:
            found.update(LakeTarget(self._lake).read_events(kind, missing, trajectory_ids))
        return found

    def recent_event_ids(self, capacity: int, kinds: Collection[str] | None) -> Mapping[str, Sequence[str]]:
        return {} if self._lake is None else recent_event_ids(self._lake, self._snapshot, capacity, kinds)


def _num_bytes(tables: Mapping[str, pa.Table]) -> int:
    return sum(int(table.get_total_buffer_size()) for table in tables.values())


class KafkaReader:
    """Reads a Kafka log (see :class:`rolltape.ingest.log.LogReader`). For one thread."""

    def __init__(
        self, log: KafkaLog, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> None:
        """Start at ``start``.

        Raises:
            LogMismatchError: log and lake do not belong together, or records were lost before they were archived.
            LogUnreachableError: no broker answers.
        """
        self._log = log
        self._cursor = start
        self._topics = [topic for topic in TOPICS if topics is None or topic in topics]
        self._kinds = None if kinds is None else frozenset(kinds)
        self._lake = None if log.lake is None else Lake.open(log.lake.location, read_only=True)
        self._identity = LogIdentity(
            log.config.url, log.cluster_id, {topic: log.topic(topic) for topic in self._topics}
        )
        self._consumer: BrokerConsumer | None = None
        self._version = EMPTY.version
        self._looked_s = time.monotonic()
        self._must_begin = True
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def cursor(self) -> Cursor:
        """After everything that was delivered."""
        return self._cursor

    def poll(self, timeout_s: float) -> list[Delivery]:
        """What came since, waiting at most ``timeout_s`` for the first.

        Raises:
            LogMismatchError: the log lost what was not archived, or was created anew.
            TopicError: a topic has more partitions by now, which are not read.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            deliveries = self._next(max(deadline - time.monotonic(), 0.0))
            if deliveries or time.monotonic() >= deadline:
                return deliveries

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    # One snapshot, then the log.

    def _begin(self) -> None:
        """Start from the newest snapshot of the lake, at the cursor; what fails halfway is done again."""
        self._must_begin = True
        snapshot = EMPTY if self._lake is None else self._lake.snapshot()
        check_topics(self._identity, snapshot.transactions, self._topics)
        self._version = snapshot.version
        self._bases = log_bases(snapshot.transactions, self._identity.topic_ids)
        self._target = _Deliveries(self._lake, snapshot)
        # A row that is refused becomes a dead letter, so whoever wants those needs every record decoded.
        kinds = None if self._kinds is None or "dead_letter" in self._kinds else {*self._kinds, "dead_letter"}
        self._archive = Archive(self._target, limits=self._log.limits, archiver_id=SINK_ID, kinds=kinds)
        self._first = self._cursor
        self._catching_up: Iterator[Portion] = iter(())
        if self._lake is not None:
            self._catching_up = catch_up(self._lake, snapshot, self._cursor, self._topics, self._kinds)
        self._seek(snapshot)
        self._must_begin = False

    def _seek(self, snapshot: Snapshot) -> None:
        if self._consumer is None:
            self._consumer = self._log.client.consumer()
        places = self._identity.partitions()
        self._consumer.assign(places)
        begins, ends = self._consumer.begin_offsets(places), self._consumer.end_offsets(places)
        self._seam = Seam(self._identity, snapshot.transactions)
        for place in places:
            begin = begins[place]
            if self._lake is None and begin > 0:
                # Nobody archived what retention took: lanes begin where the log does.
                self._archive.begin_lanes_late(place)
                self._consumer.seek(place, begin)
                continue
            start = self._identity.start(snapshot.transactions, place, begin, ends[place])
            self._consumer.seek(place, self._seam.read_from(place, begin, start))

    def _next(self, timeout_s: float) -> list[Delivery]:
        if self._must_begin:
            self._begin()
        try:
            for portion in self._catching_up:
                self._cursor = portion.cursor
                if portion.deliveries:
                    return portion.deliveries
            return self._from_log(timeout_s)
        except (VacuumedError, OffsetGoneError) as error:
            self._begin_again(error)
            return []

    def _begin_again(self, error: VacuumedError | OffsetGoneError) -> None:
        """Go on from a newer snapshot; where there is none, records are gone that nobody archived."""
        if isinstance(error, VacuumedError):
            if self._lake is None or self._lake.snapshot().version == self._version:
                raise error
            self._begin()
            return
        if self._lake is None:
            raise OffsetLostError(
                f"expected the log to hold what the reader has not read yet, at {self._cursor}: {error}. No lake is "
                "named to read it from: open the log with kafka://…?lake=URL"
            ) from error
        # Said by name where the lake lacks what retention took, or the log what the lake has.
        self._begin()
        if error.partition is None:
            return
        place = Partition(*error.partition)
        archived = self._target.transactions().get(log_app_id(place), NOTHING) + 1
        if archived < self._cursor[place]:
            raise OffsetLostError(
                f"{place}: expected the log to keep offsets {archived} to {self._cursor[place] - 1}, which this reader "
                f"has delivered and no sink has archived, got a log that was truncated: {error}. They are lost; what "
                "was made of them cannot be replayed"
            ) from error

    def _from_log(self, timeout_s: float) -> list[Delivery]:
        assert self._consumer is not None
        self._look_for_partitions(self._consumer)
        polled = self._consumer.poll(timeout_s, _POLL_RECORDS)
        if not polled:
            self._pass_holes()
            return []
        for partition, messages in polled.items():
            self._take(partition, messages)
        self._target.newest = {}
        self._archive.commit()
        deliveries = self._deliveries(self._target.newest)
        for partition in polled:
            self._advance(partition)
        return deliveries

    def _look_for_partitions(self, consumer: BrokerConsumer) -> None:
        """Nobody should add partitions to a topic in use; where somebody did, it is said before events are missed."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        for topic, info in self._identity.topics.items():
            found = consumer.num_partitions(topic)
            if found > info.num_partitions:
                raise TopicError(
                    f"topic {topic}: expected the {info.num_partitions} partitions that it had when this log was "
                    f"opened, got {found}: what is written to the others is not read here. Open the log again to read "
                    "all of them, from this reader's cursor; groups that were under way may lie in two partitions"
                )

    def _take(self, partition: Partition, messages: Sequence[Message]) -> None:
        assert self._consumer is not None
        messages = self._seam.passed(partition, messages)
        for fed in feed(self._archive, partition, messages, self._bases, self._log.blobs):
            if fed.seek_to is not None:
                self._consumer.seek(partition, fed.seek_to)

    def _advance(self, partition: Partition) -> None:
        """Move the cursor behind what was delivered; what is to be read again belongs to the last offset still."""
        last = self._archive.last_offset(partition)
        is_whole = self._archive.reread_from(partition) is None
        self._cursor = self._cursor.advanced(partition, last + 1 if is_whole else last)

    def _pass_holes(self) -> None:
        """Offsets without a record (marks of transactions, say) are behind us too."""
        assert self._consumer is not None
        for partition in self._identity.partitions():
            offset = self._consumer.position(partition) + self._bases.get(partition, 0)
            if offset > self._cursor[partition] and self._archive.reread_from(partition) is None:
                self._cursor = self._cursor.advanced(partition, offset)

    def _deliveries(self, tables: Mapping[str, pa.Table]) -> list[Delivery]:
        found = []
        for kind, table in tables.items():
            if self._kinds is not None and kind not in self._kinds:
                continue
            for place, rows in split_by_partition(table):
                since = self._first[place]
                part = rows if rows["log_offset"][0].as_py() >= since else _since(rows, since)
                if part.num_rows:
                    found.append(Delivery.of(kind, place, part, NOT_FROM_LAKE))
        return sorted(found, key=lambda item: (item.partition, item.first_offset, item.last_offset))


def _since(rows: pa.Table, offset: int) -> pa.Table:
    return rows.filter(pc.greater_equal(rows["log_offset"], offset))
