"""How a sink bears up: ``python -m benchmarks kafka_soak [memory] [outage] [--minutes 30] [--outage-minutes 5]``.

* ``memory``: resident memory of a sink under steady load; means of each minute, after a tenth of the time (at least a
  minute) in which buffers reach their size. Asked: within ± 10 % of their mean.
* ``outage``: the sink is killed −9 under steady load and started again after some minutes; how long until the lag is
  back to what one second brings, and how many times the incoming rate it archived meanwhile. Asked: at least twice.

Prints one JSON line a case (and one a minute on stderr). Memory does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from kafka_pipeline import Broker, Pipeline, Process, broker, num_records, paced_writer, report, sink

CASES = ("memory", "outage")


def bench_memory(where: Broker, folder: Path, minutes: float, rate: float) -> None:
    """Resident memory by minute."""
    pipeline = Pipeline(where.bootstrap, folder)
    with sink(pipeline) as archiver, paced_writer(pipeline, rate=rate) as writer, pipeline.open("look") as log:
        found = watch(archiver, minutes * 60)
        lag = pipeline.lag(log)
        writer.end(signal.SIGKILL)
        cpu_s = archiver.cpu_s
        pipeline.wait_until_archived(log)
        num_rows = pipeline.lake.sql("SELECT count(*) AS n FROM action_sampled").rows()[0]["n"]
        num_files = len(pipeline.lake.snapshot().files)
    skipped = max(1, round(len(found) / 10)) if len(found) > 2 else 0
    steady = np.array(found[skipped:])
    slope = float(np.polyfit(np.arange(len(steady)), steady, 1)[0]) * 60 if len(steady) > 1 else 0.0
    report(
        "memory",
        broker=where.name,
        minutes=minutes,
        batches_per_s=rate,
        actions=num_rows,
        data_files=num_files,
        lag_at_the_end=lag,
        sink_cpu_share=cpu_s / (minutes * 60),
        first_minute_mib=float(found[0]),
        mean_mib=float(steady.mean()),
        lowest=float(steady.min() / steady.mean() - 1),
        highest=float(steady.max() / steady.mean() - 1),
        mib_an_hour=slope,
        asked=0.1,
    )


def watch(process: Process, seconds: float) -> list[float]:
    """Mean resident MiB of each minute (of each tenth, where the time is shorter than ten minutes)."""
    span = min(60.0, seconds / 10)
    found: list[float] = []
    started = time.monotonic()
    while len(found) * span < seconds - span / 2:
        samples = []
        while time.monotonic() < started + (len(found) + 1) * span:
            samples.append(process.resident_mib)
            time.sleep(min(1.0, span / 10))
        found.append(float(np.mean(samples)))
        sys.stderr.write(json.dumps({"minute": round(len(found) * span / 60, 1), "mib": round(found[-1], 1)}) + "\n")
        sys.stderr.flush()
    return found


def bench_outage(where: Broker, folder: Path, minutes: float, rate: float) -> None:
    """Time until the backlog of an outage is archived, while the load goes on."""
    pipeline = Pipeline(where.bootstrap, folder)
    first = sink(pipeline)
    with paced_writer(pipeline, rate=rate) as writer, pipeline.open("look") as log:
        time.sleep(min(30.0, minutes * 60))
        first.end(signal.SIGKILL)
        before = num_records(log)
        started = time.monotonic()
        time.sleep(minutes * 60)
        incoming = (num_records(log) - before) / (time.monotonic() - started)
        with sink(pipeline) as second:
            restarted = time.monotonic()
            backlog = archived = pipeline.lag(log)
            end = num_records(log)
            while (lag := pipeline.lag(log)) > incoming:
                time.sleep(0.1)
            took = time.monotonic() - restarted
            archived = backlog + num_records(log) - end - lag
            highest_mib = second.resident_mib
            writer.end(signal.SIGKILL)
            pipeline.wait_until_archived(log)
            left = pipeline.lag(log)
    report(
        "outage",
        broker=where.name,
        minutes=minutes,
        records_per_s=incoming,
        backlog_records=backlog,
        seconds_until_caught_up=took,
        times_the_incoming_rate=archived / took / incoming,
        sink_mib_after=highest_mib,
        lag_at_the_end=left,
        asked=2.0,
    )


def main() -> None:
    """Run the cases that were named, or both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the memory case")
    parser.add_argument("--outage-minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=200.0, help="batches of eight events a second")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="of real Kafka")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, broker(Path(name) / "broker", options.nodes) as where:
        for case in options.cases or CASES:
            if case == "memory":
                bench_memory(where, Path(name), options.minutes, options.rate)
            else:
                bench_outage(where, Path(name), options.outage_minutes, options.rate)


if __name__ == "__main__":
    main()
