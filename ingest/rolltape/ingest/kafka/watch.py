"""What a sink looks at every now and then, beside the rows: gaps, lag and age, memory, and whether it has work."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Final

from rolltape.ingest.archive import Archive
from rolltape.ingest.kafka.client import BrokerConsumer
from rolltape.ingest.kafka.footprint import give_back
from rolltape.ingest.kafka.gap_alarms import GapAlarms
from rolltape.ingest.kafka.lag import Lag
from rolltape.ingest.kafka.metrics import SinkMetrics
from rolltape.ingest.lanes import NOTHING, Gap, log_app_id
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import LogError
from rolltape.store.snapshot import Snapshot

_LOG: Final = logging.getLogger(__name__)
_IDLE_S: Final = 10.0
_GIVE_BACK_S: Final = 20.0


class Watch:
    """Reports how a sink stands. Nothing here is worth a failure of the sink."""

    def __init__(self, metrics: SinkMetrics, alarms: GapAlarms, group: str | None, interval_s: float) -> None:
        """Look every ``interval_s`` seconds; ``group`` is the one that hands partitions out, if one does."""
        self.lag = Lag(metrics)
        self._metrics = metrics
        self._alarms = alarms
        self._group = group
        self._interval_s = interval_s
        self._last_s = 0.0
        self._idle_since_s: float | None = None
        self._gave_back_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time for :meth:`look`."""
        return time.monotonic() - self._last_s >= self._interval_s

    def look(
        self, archive: Archive, snapshot: Snapshot, consumer: BrokerConsumer, bases: Mapping[Partition, int]
    ) -> None:
        """Send alarms that are due, report lag and memory, and store the group's offsets for tools that show lag."""
        self._last_s = time.monotonic()
        gaps, places = archive.gaps(), consumer.assignment()
        self._say_if_idle(places)
        if self._last_s - self._gave_back_s >= _GIVE_BACK_S:
            self._gave_back_s = self._last_s
            give_back()
        self._metrics.memory(
            lanes=len(gaps),
            parked_bytes=archive.parked_bytes,
            staged_bytes=archive.staged_bytes,
            data_files=len(snapshot.files),
        )
        archived = _archived(snapshot, places, bases)
        try:
            self._alarms.send(gaps, archive.waiting_since)
            self.lag.report(archived, consumer.end_offsets(places), _waiting_ms(archive, gaps))
            if self._group is not None:
                consumer.commit(archived)
        except LogError as error:
            _LOG.info("lag is not known for now: %s", error)

    def look_at_lag(self, snapshot: Snapshot, consumer: BrokerConsumer, bases: Mapping[Partition, int]) -> None:
        """Report the lag alone, if it is time: while the lake cannot be reached, ``snapshot`` is the last one known."""
        places = self.lag.partitions & consumer.assignment()
        if not places or not self.is_due():
            return
        self._last_s = time.monotonic()
        try:
            self.lag.report(_archived(snapshot, places, bases), consumer.end_offsets(places))
        except LogError as error:
            _LOG.info("lag is not known for now: %s", error)

    def _say_if_idle(self, places: Collection[Partition]) -> None:
        now = time.monotonic()
        if places:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now
        elif now - self._idle_since_s >= _IDLE_S:
            self._idle_since_s = now
            _LOG.warning(
                "has no partitions: expected the group %s to give this sink some; other sinks hold all of them, or "
                "the brokers still count one that died",
                self._group,
            )


def _archived(
    snapshot: Snapshot, places: Collection[Partition], bases: Mapping[Partition, int]
) -> dict[Partition, int]:
    """The broker's next offset to archive of each partition."""
    marks = snapshot.transactions
    return {place: max(marks.get(log_app_id(place), NOTHING) + 1 - bases.get(place, 0), 0) for place in places}


def _waiting_ms(archive: Archive, gaps: Collection[Gap]) -> dict[Partition, int]:
    """The log's time stamps, in milliseconds, of the oldest record behind a gap of each partition."""
    oldest: dict[Partition, int] = {}
    for gap in gaps:
        time_us = archive.waiting_since(gap.lane)
        if time_us is not None:
            place = gap.lane.log_partition
            oldest[place] = min(time_us // 1000, oldest.get(place, time_us // 1000))
    return oldest
