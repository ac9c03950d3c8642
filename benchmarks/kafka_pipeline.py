"""A broker, a sink and writers as processes of their own, for the benchmarks over Kafka.

The broker is the cluster that ``ROLLTAPE_KAFKA_BOOTSTRAP`` names, else one node of real Apache Kafka where
``ROLLTAPE_KAFKA_HOME`` names its folder, else noida-db (figures say which: noida-db syncs nothing).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import psutil

from rolltape.ingest import open_log
from rolltape.ingest.kafka.client import connect
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.ingest.log import EventLog
from rolltape.store.lake import Lake

ROOT = Path(__file__).parents[1]


class Broker(NamedTuple):
    """What runs, and where."""

    name: str
    bootstrap: str


def report(case: str, **figures: Any) -> None:
    """One JSON line; floats to four digits behind the point."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    sys.stdout.write(json.dumps({"case": case, **rounded}) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def broker(folder: Path, nodes: int = 1) -> Iterator[Broker]:
    """The best broker that this machine can run; of real Kafka ``nodes`` (1 or 3)."""
    if bootstrap := os.environ.get("ROLLTAPE_KAFKA_BOOTSTRAP"):
        yield Broker("a cluster of yours", bootstrap)
        return
    # The servers are the tests' own.
    sys.path.append(str(ROOT))
    if home := os.environ.get("ROLLTAPE_KAFKA_HOME"):
        from tests.servers.apache_kafka import KafkaCluster

        with KafkaCluster(home, folder, nodes) as cluster:
            yield Broker(f"Apache Kafka, nodes: {nodes}", cluster.bootstrap)
        return
    from tests.servers.noida_db import NoidaDb

    with NoidaDb(folder) as server:
        yield Broker("noida-db", server.bootstrap)


class Pipeline:
    """Topics of their own and a lake of its own on one broker."""

    def __init__(self, bootstrap: str, folder: Path, *, partitions: int = 4) -> None:
        """Make lake and topics."""
        name = uuid.uuid4().hex[:8]
        self.lake = Lake.create(folder / f"lake-{name}")
        self.spool = folder / f"spool-{name}"
        self.address = f"kafka://{bootstrap}/bench-{name}"
        self.url = f"{self.address}?lake={self.lake.location.path}"
        admin = connect(KafkaConfig.from_url(self.address)).admin()
        ensure_topics(admin, TopicPlan.of(partitions={"rollout": partitions}), create=True)
        admin.close()

    def open(self, name: str = "bench") -> EventLog:
        """The log, with a spool folder of its own for each ``name``."""
        return open_log(self.url, spool=self.spool / name)

    def lag(self, log: EventLog) -> int:
        """Records that are in the log and not in the lake."""
        end, archived = log.end(), Lake.open(self.lake.location, read_only=True).cursor()
        return sum(max(0, end[partition] - archived[partition]) for partition in end)

    def wait_until_archived(self, log: EventLog, timeout_s: float = 600.0) -> float:
        """Wait until the lake has everything that the log holds now; the clock at that moment."""
        end = log.end()
        watched = Lake.open(self.lake.location, read_only=True)
        deadline = time.monotonic() + timeout_s
        while not all(watched.cursor()[partition] >= end[partition] for partition in end):
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {end} in the lake within {timeout_s} s, got {watched.cursor()}")
            time.sleep(0.005)
        return time.monotonic()


def num_records(log: EventLog) -> int:
    """Records in the log so far, of all partitions."""
    end = log.end()
    return sum(end[partition] for partition in end)


class Process:
    """A process of this benchmark; ends with the context."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """Start it, with options of ``Popen``."""
        self.popen = subprocess.Popen([sys.executable, *command], **options)
        self.seen = psutil.Process(self.popen.pid)

    @property
    def resident_mib(self) -> float:
        """Resident memory."""
        return float(self.seen.memory_info().rss) / (1 << 20)

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far."""
        times = self.seen.cpu_times()
        return float(times.user + times.system)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal it and wait; idempotent."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        self.popen.wait(120)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def sink(pipeline: Pipeline) -> Process:
    """A sink of the pipeline."""
    log, lake = pipeline.address, pipeline.lake.location.path
    return Process(["-m", "rolltape.recipes.cli", "sink", "--log", log, "--lake", lake])


PACED_WRITER = """
import sys, time
import numpy as np
from rolltape.ingest import Recorder, open_log
from rolltape.schema.identity import uuid7_many
(url, spool), (rate, num_rows, num_tokens) = sys.argv[1:3], map(int, sys.argv[3:])
rng = np.random.default_rng(7)
ids = [rng.integers(0, 50_000, (num_rows, num_tokens), dtype=np.int32) for _ in range(64)]
probs = [-rng.exponential(size=(num_rows, num_tokens)).astype(np.float32) for _ in range(64)]
with open_log(url, spool=spool) as log, Recorder(log, producer_id="paced", run_id="run") as recorder:
    started, number = time.monotonic(), 0
    while True:
        names, group = uuid7_many(num_rows), uuid7_many(1)[0]
        where = {"trajectory_id": names, "attempt": 0, "group_id": group}
        recorder.record_batch("action_sampled", {
            "token_ids": list(ids[number % 64]), "rollout_log_probs": list(probs[number % 64]), **where}, num_rows)
        recorder.record_batch("rollout_ended", {"status": "completed", **where}, num_rows)
        number += 1
        time.sleep(max(0.0, started + number / rate - time.monotonic()))
"""


def paced_writer(pipeline: Pipeline, *, rate: float, num_rows: int = 8, num_tokens: int = 200) -> Process:
    """Records ``rate`` batches a second of ``num_rows`` actions (and as many ends) until it is ended."""
    arguments = [pipeline.url, str(pipeline.spool / "paced"), str(round(rate / 2)), str(num_rows), str(num_tokens)]
    return Process(["-c", PACED_WRITER, *arguments])


def quantiles(values_s: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest, in milliseconds."""
    milliseconds = np.array(values_s) * 1e3
    found = {f"p{q}_ms": round(float(np.quantile(milliseconds, q / 100)), 1) for q in (50, 90, 99)}
    return {**found, "max_ms": round(float(milliseconds.max()), 1)}
