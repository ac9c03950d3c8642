"""How far a sink is behind: offsets, and the age of the oldest record that is not archived."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rolltape.ingest.kafka.metrics import SinkMetrics
from rolltape.schema.cursor import Partition


class Lag:
    """Notes the log's time stamps of what is read until a commit archives it."""

    def __init__(self, metrics: SinkMetrics) -> None:
        """Nothing was read."""
        self._metrics = metrics
        self._oldest_ms: dict[Partition, int] = {}
        self._newest_ms: dict[Partition, int] = {}
        self.partitions: frozenset[Partition] = frozenset()
        """Those that are ours."""

    def start(self, starts: Mapping[Partition, int], ends: Mapping[Partition, int]) -> None:
        """Partitions are ours from here on, each at its next offset and with its end."""
        self._oldest_ms.clear()
        self._newest_ms.clear()
        self.partitions = frozenset(starts)
        self.report(starts, ends)

    def read(self, partition: Partition, timestamp_ms: int) -> None:
        """A record was read."""
        if partition not in self._oldest_ms:
            self._oldest_ms[partition] = timestamp_ms
            self._metrics.waits(partition, timestamp_ms)
        self._newest_ms[partition] = timestamp_ms

    def committed(self) -> None:
        """What was read is archived; what comes next is younger than the last of it."""
        self._oldest_ms = dict(self._newest_ms)
        for partition, time_ms in self._oldest_ms.items():
            self._metrics.waits(partition, time_ms)

    def report(
        self,
        archived: Mapping[Partition, int],
        ends: Mapping[Partition, int],
        waiting_ms: Mapping[Partition, int] = MappingProxyType({}),
    ) -> None:
        """Set lag and age of each partition: its next offset to archive, its end, and since when a record waits."""
        for partition, offset in archived.items():
            lag = max(ends[partition] - offset, 0)
            if not lag:
                self._oldest_ms.pop(partition, None)
            known = [times[partition] for times in (self._oldest_ms, waiting_ms) if partition in times]
            self._metrics.lag(partition, lag)
            # Of what waits and was not read yet nothing better is known than before.
            if known or not lag:
                self._metrics.waits(partition, min(known) if lag else None)
