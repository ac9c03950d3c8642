"""The sink's metrics, as Prometheus reads them: the only module that imports ``prometheus_client``.

Gauges of lag and age are there from the first moment of an assignment, as 0 where nothing waits: absent is not zero.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from rolltape.schema.cursor import Partition
from rolltape.schema.errors import ConfigError
from rolltape.schema.reasons import DEAD_LETTER_REASONS

try:
    import prometheus_client as prometheus
except ImportError as error:
    raise ConfigError(f"metrics need prometheus-client, got {error}; install rolltape[kafka]") from error

OUTCOMES: Final = ("accepted", "duplicate", "parked")
_STATM: Final = Path("/proc/self/statm")
_COMMIT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class SinkMetrics:
    """Counters and gauges of one sink, in a registry of their own. Threads may share it."""

    def __init__(self) -> None:
        """All start at 0."""
        self.registry = prometheus.CollectorRegistry(auto_describe=True)
        counter, gauge = self._counter, self._gauge
        self._records = counter("records", "Records read from the log", "topic", "outcome")
        self._bytes = counter("bytes", "Bytes of payloads read from the log", "topic")
        self._rows = counter("rows", "Rows archived in the lake", "kind")
        self._letters = counter("dead_letters", "Dead letters archived, by reason", "reason")
        self._commits = counter("commits", "Commits of the lake")
        self._commit_s = prometheus.Histogram(
            "rolltape_sink_commit_seconds",
            "Time that a commit of the lake takes",
            registry=self.registry,
            buckets=_COMMIT_BUCKETS_S,
        )
        self._retries = counter("retries", "Rounds that were done again, by the error's name", "error")
        self._rebalances = counter("rebalances", "Changes of the assignment of partitions")
        self._maintenance = counter("maintenance", "Acts of maintenance of the lake", "act")
        self._partitions = gauge("partitions", "Partitions that this sink archives")
        self._lag = gauge("lag_records", "Offsets in the log that are not archived yet", "topic", "partition")
        self._age = gauge("age_seconds", "Age of the oldest record that is not archived yet", "topic", "partition")
        self._standing = gauge("lanes_standing", "Lanes that stand still because a record of them is missing")
        self._parked_bytes = gauge("parked_bytes", "Bytes of records that wait in memory for missing ones")
        self._staged_bytes = gauge("staged_bytes", "Bytes of rows that wait in memory for their commit")
        self._data_files = gauge("data_files", "Data files of the lake's table")
        self._memory = gauge("resident_bytes", "Memory of this process")
        for reason in DEAD_LETTER_REASONS:
            self._letters.labels(reason)
        self._of_record: dict[tuple[str, str], tuple[prometheus.Counter, prometheus.Counter]] = {}
        self._oldest_ms: dict[Partition, int | None] = {}
        self._assigned: set[Partition] = set()
        self._server: tuple[Any, Any] | None = None

    def _counter(self, name: str, doc: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(f"rolltape_sink_{name}", doc, labels, registry=self.registry)

    def _gauge(self, name: str, doc: str, *labels: str) -> prometheus.Gauge:
        return prometheus.Gauge(f"rolltape_sink_{name}", doc, labels, registry=self.registry)

    def serve(self, port: int, address: str = "0.0.0.0") -> int:  # noqa: S104  # Prometheus asks from elsewhere
        """Answer Prometheus on ``port`` (0: a free one) until :meth:`close`; returns the port.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            self._server = prometheus.start_http_server(port, address, registry=self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--metrics-port: expected a free port, got {port}: {error}; choose another") from error
        return int(self._server[0].server_port)

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def text(self) -> str:
        """What Prometheus would get now."""
        return prometheus.generate_latest(self.registry).decode()

    # What happened.

    def record(self, topic: str, outcome: str, num_bytes: int) -> None:
        """One record was read."""
        # Finding a labelled counter takes a lock each time, and records come by the ten thousand.
        if (topic, outcome) not in self._of_record:
            self._of_record[topic, outcome] = (self._records.labels(topic, outcome), self._bytes.labels(topic))
        records, payload_bytes = self._of_record[topic, outcome]
        records.inc()
        payload_bytes.inc(num_bytes)

    def commit(self, seconds: float, rows: Mapping[str, int], letters: Mapping[str, int]) -> None:
        """One commit was made, of so many rows by kind and dead letters by reason."""
        self._commits.inc()
        self._commit_s.observe(seconds)
        for kind, number in rows.items():
            self._rows.labels(kind).inc(number)
        for reason, number in letters.items():
            self._letters.labels(reason).inc(number)

    def retry(self, error: BaseException) -> None:
        """A round failed of something that passes."""
        self._retries.labels(type(error).__name__).inc()

    def maintain(self, act: str, number: int = 1) -> None:
        """Something was done for the lake: compaction, checkpoint, log_files, data_files, blobs."""
        self._maintenance.labels(act).inc(number)

    def assign(self, partitions: Collection[Partition]) -> None:
        """The assignment changed; gauges of partitions that went go too."""
        self._rebalances.inc()
        for partition in self._assigned - set(partitions):
            for gauge in (self._lag, self._age):
                gauge.remove(partition.topic, str(partition.partition))
        for partition in set(partitions) - self._assigned:
            for topic_outcome in OUTCOMES:
                self._records.labels(partition.topic, topic_outcome)
            self._bytes.labels(partition.topic)
            self._oldest_ms[partition] = None
            age = self._age.labels(partition.topic, str(partition.partition))
            age.set_function(partial(self._age_s, partition))
            self.lag(partition, 0)
        self._assigned = set(partitions)
        self._partitions.set(len(self._assigned))

    # How it stands.

    def lag(self, partition: Partition, num_offsets: int) -> None:
        """How far a partition is behind."""
        self._lag.labels(partition.topic, str(partition.partition)).set(num_offsets)

    def waits(self, partition: Partition, oldest_ms: int | None) -> None:
        """The log's time of the oldest record of a partition that is not archived; None where none is known.

        Its age is what it is when it is asked for: it grows while a sink waits for the lake and reports nothing.
        """
        self._oldest_ms[partition] = oldest_ms

    def _age_s(self, partition: Partition) -> float:
        oldest_ms = self._oldest_ms.get(partition)
        return 0.0 if oldest_ms is None else max(time.time() - oldest_ms / 1000, 0.0)

    def memory(self, *, lanes: int, parked_bytes: int, staged_bytes: int, data_files: int) -> None:
        """What is held, and how the lake looks."""
        self._standing.set(lanes)
        self._parked_bytes.set(parked_bytes)
        self._staged_bytes.set(staged_bytes)
        self._data_files.set(data_files)
        self._memory.set(_resident_bytes())


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
