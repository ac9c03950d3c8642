"""What the pipeline over Kafka costs: ``python -m benchmarks kafka [producer] [pipeline] [freshness]``.

* ``producer``: recorder → spool → brokers' acknowledgement, against a bare kafka-python producer of the same bytes, as
  it comes and tuned for records of this size, and against the floor: one thread that does what nobody can leave out who
  starts from columns, encode each record and give it to the tuned producer (``bare_producer.py``, in a process without
  Rolltape's client). Also the CPU time of each side's process.
* ``pipeline``: recorder → Kafka → sink → committed in Delta, against the same machine writing the same rows to Delta
  without Kafka, in two ways: through the embedded log (the same recorder, a committer in a process of its own), and as
  ready-made tables by ``Lake.append`` (no recorder, no log at all).
* ``freshness``: rollout finished → decoded in a reader's process, at 100 events a second, a sink running beside.

Prints one JSON line a case, which names the broker. Sides of a ratio are measured by turns, and the ratio is that of
the medians, because other programs disturb absolute times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from bare_producer import SIDES, Sent, write_messages
from bench_store import GROUP_SIZE, Rollouts, lists, make_rollouts
from kafka_pipeline import Broker, Pipeline, Process, broker, quantiles, report, sink

from rolltape.ingest import EmbeddedLog, EventLog, Recorder
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.memory import MemoryLog
from rolltape.schema.codec import Record, decode
from rolltape.schema.cursor import Cursor
from rolltape.schema.identity import uuid7_many
from rolltape.store.lake import Lake

PARTITIONS = 4
CASES = ("producer", "pipeline", "freshness")


# The load: kind by kind for all rollouts that were generated together, as the worker records them.


class Load:
    """Columns of rollouts of real words and log-probs, in groups of 16; ``batch`` of them are generated together."""

    def __init__(self, num_rollouts: int, mean_tokens: int, batch: int) -> None:
        """Make the tokens once."""
        self.batch = batch
        self.rollouts: Rollouts = make_rollouts(num_rollouts, mean_tokens)
        self.num_tokens = self.rollouts.num_tokens
        self._token_ids = lists(self.rollouts.ends, self.rollouts.token_ids)
        self._log_probs = lists(self.rollouts.ends, self.rollouts.log_probs)
        self._prompts = lists(self.rollouts.prompt_ends, self.rollouts.prompt_ids)

    def record(self, recorder: Recorder) -> None:
        """Record all of it under new names."""
        num_rollouts = len(self.rollouts.trajectory_ids)
        names, groups = uuid7_many(num_rollouts), uuid7_many(-(-num_rollouts // GROUP_SIZE))
        group_ids = [groups[row // GROUP_SIZE] for row in range(num_rollouts)]
        for first in range(0, num_rollouts, self.batch):
            rows = slice(first, first + self.batch)
            self._record_batch(recorder, rows, {"trajectory_id": names[rows], "group_id": group_ids[rows]})

    def _record_batch(self, recorder: Recorder, rows: slice, names: dict[str, Any]) -> None:
        where: dict[str, Any] = {"attempt": 0, **names}
        sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs_mode": "processed_logprobs"}
        recorder.record_batch("rollout_started", {"prompt_token_ids": self._prompts[rows], **where})
        action = {"token_ids": self._token_ids[rows], "rollout_log_probs": self._log_probs[rows]}
        recorder.record_batch(
            "action_sampled", {**action, "sampling": sampling, "prefix_source": "engine", "turn_index": 0, **where}
        )
        recorder.record_batch("rollout_ended", {"status": "completed", **where})
        rewards = {"state": "earned", "scalar": self.rollouts.rewards[rows], "scalariser_version": "1"}
        recorder.record_batch("reward_assigned", {**rewards, **where})


class _Captured(MemoryLog):
    """A log that only notes what a recorder sends, with the partitions of the real one."""

    def __init__(self) -> None:
        super().__init__(linger_s=0.005)
        self.records: list[Record] = []

    def num_partitions(self, topic: str) -> int:
        return PARTITIONS if topic == "rollout" else 1

    def producer(self, producer_id: str) -> Any:
        return _CapturingProducer(producer_id, self.records)


class _CapturingProducer:
    """Takes records and keeps them."""

    epoch = 1
    unacknowledged_bytes = 0

    def __init__(self, producer_id: str, records: list[Record]) -> None:
        self.producer_id = producer_id
        self._records = records

    def send(self, record: Record, *, more: bool = False) -> None:  # noqa: ARG002
        """Keep it."""
        self._records.append(record)

    def flush(self, level: str, timeout_s: float) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to release."""


def captured(load: Load) -> list[Record]:
    """The records that a recorder makes of the load, as they would lie in the log."""
    log = _Captured()
    with Recorder(log, producer_id="capture", run_id="run") as recorder:
        load.record(recorder)
    return log.records


# Recorder against a bare producer


def bench_producer(where: Broker, folder: Path, load: Load, rounds: int) -> None:
    """Bytes a second until everything is acknowledged."""
    records = captured(load)
    messages = [Sent(record.partition, *to_message(record)) for record in records]
    write_messages(folder / "messages", messages)
    num_bytes = sum(memoryview(message.value).nbytes for message in messages)
    pipeline = Pipeline(where.bootstrap, folder, partitions=PARTITIONS)
    topic = pipeline.address.rpartition("/")[2] + ".rollout"
    with (
        Bare(where.bootstrap, topic, folder / "messages") as bare,
        pipeline.open() as log,
        Recorder(log, producer_id="bench", run_id="run") as recorder,
    ):
        sides: dict[str, Callable[[], Turn]] = {side: partial(bare.turn, side) for side in SIDES}
        sides["recorder"] = lambda: timed(lambda: record_and_flush(load, recorder))
        found = by_turns(sides, rounds)
    report(
        "producer",
        broker=where.name,
        tokens_a_rollout=load.num_tokens // len(load.rollouts.trajectory_ids),
        rollouts_a_batch=load.batch,
        num_records=len(records),
        mean_record_bytes=num_bytes // len(records),
        **{f"{name}_mb_s": num_bytes / turn.wall_s / 1e6 for name, turn in found.items()},
        recorder_mtok_s=load.num_tokens / found["recorder"].wall_s / 1e6,
        **{f"{name}_cpu_ns_token": turn.cpu_s / load.num_tokens * 1e9 for name, turn in found.items()},
        **{f"ratio_to_{side}": found[side].wall_s / found["recorder"].wall_s for side in SIDES},
        asked=0.8,
    )


class Turn(NamedTuple):
    """Wall and CPU seconds (of the side's process) of a round."""

    wall_s: float
    cpu_s: float


class Bare(Process):
    """A producer without Rolltape (``bare_producer.py``)."""

    def __init__(self, bootstrap: str, topic: str, messages: Path) -> None:
        """Start it."""
        program = str(Path(__file__).with_name("bare_producer.py"))
        super().__init__([program, bootstrap, topic, str(messages)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def turn(self, side: str) -> Turn:
        """One round of a side."""
        (asked, told) = self.popen.stdin, self.popen.stdout
        assert asked is not None
        assert told is not None
        asked.write(f"{side}\n".encode())
        asked.flush()
        return Turn(**json.loads(told.readline()))


def record_and_flush(load: Load, recorder: Recorder) -> None:
    """Record the load and wait until it is logged."""
    load.record(recorder)
    recorder.flush("logged", 300)


def timed(call: Callable[[], object]) -> Turn:
    """What a call takes in this process."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return Turn(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def by_turns(sides: Mapping[str, Callable[[], Turn]], rounds: int) -> dict[str, Turn]:
    """The medians of a round of each side, after one round that is not counted."""
    found: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, call in sides.items():
            turn = call()
            if number:
                found[name].append(turn)
    return {
        name: Turn(statistics.median(turn.wall_s for turn in turns), statistics.median(turn.cpu_s for turn in turns))
        for name, turns in found.items()
        if turns
    }


# The whole pipeline against Delta without Kafka


def bench_pipeline(where: Broker, folder: Path, load: Load, rounds: int) -> None:
    """Tokens a second until everything is committed in the lake."""
    pipeline = Pipeline(where.bootstrap, folder, partitions=PARTITIONS)
    embedded = Lake.create(folder / "embedded")
    direct = Lake.create(folder / "direct")
    tables = tables_of(captured(load))
    offsets = iter(range(1_000_000))
    commit = ["-m", "rolltape.ingest.committer", embedded.location.path]
    with (
        sink(pipeline) as archiver,
        Process(commit) as committer,
        pipeline.open() as log,
        EmbeddedLog(embedded, "external") as without,
        Recorder(log, producer_id="bench", run_id="run") as over_kafka,
        Recorder(without, producer_id="bench", run_id="run") as over_lake,
    ):
        sides = {
            "kafka": lambda: timed(lambda: until_archived(load, over_kafka, pipeline, log)),
            "embedded": lambda: timed(lambda: record_and_flush(load, over_lake)),
            "append": lambda: timed(lambda: direct.append(tables, {"log/rollout/0": next(offsets)})),
        }
        by_turns(sides, 0)
        before = archiver.cpu_s, committer.cpu_s
        found = {name: turn.wall_s for name, turn in by_turns(sides, rounds).items()}
        after = archiver.cpu_s, committer.cpu_s
        sink_mib = archiver.resident_mib
    mtok = load.num_tokens * (rounds + 1) / 1e6
    report(
        "pipeline",
        broker=where.name,
        tokens_a_rollout=load.num_tokens // len(load.rollouts.trajectory_ids),
        rollouts_a_batch=load.batch,
        num_tokens=load.num_tokens,
        kafka_mtok_s=load.num_tokens / found["kafka"] / 1e6,
        embedded_mtok_s=load.num_tokens / found["embedded"] / 1e6,
        append_mtok_s=load.num_tokens / found["append"] / 1e6,
        ratio_to_embedded=found["embedded"] / found["kafka"],
        ratio_to_append=found["append"] / found["kafka"],
        asked=0.6,
        sink_mib=sink_mib,
        sink_mtok_per_cpu_s=mtok / (after[0] - before[0]),
        committer_mtok_per_cpu_s=mtok / (after[1] - before[1]),
    )


def until_archived(load: Load, recorder: Recorder, pipeline: Pipeline, log: EventLog) -> None:
    """Record the load and wait until the lake has it."""
    record_and_flush(load, recorder)
    pipeline.wait_until_archived(log)


def tables_of(records: Sequence[Record]) -> dict[str, pa.Table]:
    """The rows of the records, as one commit takes them."""
    batches: dict[str, list[pa.RecordBatch]] = {}
    for record in records:
        kind = record.headers.kind
        batches.setdefault(kind, []).append(decode(record.value, kind=kind))
    return {kind: pa.Table.from_batches(parts) for kind, parts in batches.items()}


# Freshness

WRITER = """
import sys, time
from rolltape.ingest import Recorder, open_log
url, spool, num_rollouts, gap_s, warm_up = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), 100
with open_log(url, spool=spool) as log, Recorder(log, producer_id="w", run_id="r") as recorder:
    started = time.monotonic()
    for number in range(num_rollouts + warm_up):
        name = {"trajectory_id": f"t{number}", "attempt": 0, "group_id": f"g{number // 8}"}
        recorder.record("action_sampled", token_ids=[1] * 500, rollout_log_probs=[-0.5] * 500, **name)
        recorder.record("rollout_ended", status="completed", cause=repr(time.monotonic()), **name)
        time.sleep(max(0.0, started + (number + 1) * gap_s - time.monotonic()))
    recorder.flush()
"""


def bench_freshness(where: Broker, folder: Path, seconds: float, events_per_s: float) -> None:
    """Milliseconds from a rollout's end in one process to its decoded arrival in another."""
    pipeline = Pipeline(where.bootstrap, folder, partitions=PARTITIONS)
    # A rollout is two events; the first hundred rollouts pay for imports and first uses and are not counted.
    num_rollouts, warm_up = int(seconds * events_per_s / 2), 100
    arguments = [pipeline.url, str(pipeline.spool / "w"), str(num_rollouts), str(2 / events_per_s)]
    waits: list[float] = []
    with sink(pipeline), pipeline.open("reader") as log:
        reader = log.reader(Cursor(), topics=["rollout"])
        reader.poll(0.1)
        with subprocess.Popen([sys.executable, "-c", WRITER, *arguments]) as writer:
            while len(waits) < num_rollouts + warm_up:
                deliveries = reader.poll(30.0)
                now = time.monotonic()
                for delivery in deliveries:
                    if delivery.kind == "rollout_ended":
                        waits += [now - float(row["cause"]) for row in delivery.table["rollout_ended"].to_pylist()]
            writer.wait()
    report(
        "freshness",
        broker=where.name,
        rollouts=num_rollouts,
        events_per_s=events_per_s,
        **quantiles(waits[warm_up:]),
        asked_p50_ms=25,
        asked_p99_ms=150,
    )


def main() -> None:
    """Run the cases that were named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--rollouts", type=int, default=12288, help="rollouts a round")
    parser.add_argument("--tokens", type=int, default=2000, help="mean tokens a rollout")
    parser.add_argument("--batch", type=int, default=256, help="rollouts that are generated and recorded together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the freshness case")
    parser.add_argument("--events-per-s", type=float, default=100.0)
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="of real Kafka")
    options = parser.parse_args()
    cases = options.cases or CASES
    with tempfile.TemporaryDirectory() as name, broker(Path(name) / "broker", options.nodes) as where:
        folder = Path(name)
        if {"producer", "pipeline"} & set(cases):
            load = Load(options.rollouts, options.tokens, options.batch)
            if "producer" in cases:
                bench_producer(where, folder, load, options.rounds)
            if "pipeline" in cases:
                bench_pipeline(where, folder, load, options.rounds)
        if "freshness" in cases:
            bench_freshness(where, folder, options.seconds, options.events_per_s)


if __name__ == "__main__":
    main()
