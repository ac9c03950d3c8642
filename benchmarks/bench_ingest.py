"""What recording costs and how fast it is seen: ``python benchmarks/bench_ingest.py``.

Prints one JSON line a measurement: CPU time and spooled bytes of an event, alone and in batches; and the time from the
end of a rollout to its arrival, decoded, in another process, through spool, committer and lake (fsyncs included).
CPU times are the smallest of several rounds: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from rolltape.ingest import EmbeddedLog, Recorder
from rolltape.schema.cursor import Cursor
from rolltape.schema.identity import uuid7_many
from rolltape.store.lake import Lake

_SAMPLING: Final = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 7,
    "max_tokens": 1024,
    "logprobs_mode": "processed_logprobs",
}
_ENGINE: Final = {"id": "worker-0", "name": "transformers", "version": "5.24", "dtype": "float32"}
_DIGEST: Final = "sha256:" + "0123456789abcdef" * 4

WRITER = """
import sys, time
from rolltape.ingest import EmbeddedLog, Recorder
from rolltape.store.lake import Lake
num_rollouts, gap_s = int(sys.argv[2]), float(sys.argv[3])
with EmbeddedLog(Lake.open(sys.argv[1]), "external") as log, Recorder(log, producer_id="w", run_id="r") as recorder:
    for number in range(num_rollouts):
        name = {"trajectory_id": f"t{number}", "attempt": 0}
        recorder.record("action_sampled", token_ids=[1] * 500, rollout_log_probs=[-0.5] * 500, **name)
        recorder.record("rollout_ended", status="completed", cause=repr(time.monotonic()), **name)
        time.sleep(gap_s)
    recorder.flush()
"""


def action_columns(num_rows: int, num_tokens: int) -> dict[str, Any]:
    """Columns of ``num_rows`` actions as a worker records them."""
    rng = np.random.default_rng(7)
    run = {
        "start": 0,
        "length": num_tokens,
        "policy_id": "policy",
        "run_epoch": 1,
        "version": 3,
        "weights_digest": _DIGEST,
    }
    return {
        "trajectory_id": uuid7_many(num_rows),
        "attempt": 0,
        "group_id": uuid7_many(1)[0],
        "problem_id": "problem-17",
        "segment_index": 0,
        "turn_index": 0,
        "token_ids": list(rng.integers(0, 50_000, (num_rows, num_tokens), dtype=np.int32)),
        "rollout_log_probs": list(-rng.exponential(size=(num_rows, num_tokens)).astype(np.float32)),
        "action_kind": "execution",
        "version_runs": [[run]] * num_rows,
        "sampling": _SAMPLING,
        "finish_reason": "stop",
        "truncated": False,
        "prefix_length": 12,
        "prefix_digest": _DIGEST,
        "prefix_source": "engine",
        "engine": _ENGINE,
    }


def reward_columns(num_rows: int) -> dict[str, Any]:
    """Columns of ``num_rows`` rewards with two components."""
    component = {"source": "rule", "value": 0.5, "weight": 1.0, "required": True, "status": "ok"}
    return {
        "trajectory_id": uuid7_many(num_rows),
        "attempt": 0,
        "group_id": uuid7_many(1)[0],
        "components": [[{"name": "exact", **component}, {"name": "positions", **component}]] * num_rows,
        "scalar": np.ones(num_rows),
        "state": "earned",
        "scalariser_version": "1",
    }


def end_columns(num_rows: int) -> dict[str, Any]:
    """Columns of ``num_rows`` ends."""
    return {
        "trajectory_id": uuid7_many(num_rows),
        "attempt": 0,
        "group_id": uuid7_many(1)[0],
        "status": "completed",
        "num_action_tokens": 24,
        "num_observation_tokens": 0,
    }


def measure_recorder(folder: Path, rounds: int) -> None:
    """CPU milliseconds and spooled bytes of an event, alone and in batches."""
    log = EmbeddedLog(Lake.create(folder / "recorder"), "external")
    with Recorder(log, producer_id="bench", run_id="run") as recorder:

        def measure(name: str, events: int, record: Callable[[], object], **limits: float) -> None:
            for _ in range(10):
                record()
            best = min(_cpu_ms(record, 20) for _ in range(rounds))
            size = _spooled_bytes(log, record)
            _print(name, events=events, cpu_ms=round(best / events, 4), bytes=round(size / events), **limits)

        one = {name: value[0] if isinstance(value, list) else value for name, value in action_columns(1, 1000).items()}
        measure("action of 1,000 tokens alone", 1, lambda: recorder.record("action_sampled", **one), limit_ms=1.0)
        for num_rows in (16, 64, 256):
            columns = action_columns(num_rows, 24)
            measure(
                "actions of 24 tokens",
                num_rows,
                lambda c=columns: recorder.record_batch("action_sampled", c),
                limit_ms=0.05,
            )
            columns = reward_columns(num_rows)
            measure("rewards", num_rows, lambda c=columns: recorder.record_batch("reward_assigned", c), limit_ms=0.05)
            columns = end_columns(num_rows)
            measure("ends", num_rows, lambda c=columns: recorder.record_batch("rollout_ended", c), limit_ms=0.05)


def _cpu_ms(call: Callable[[], object], repeats: int) -> float:
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats * 1e3


def _spooled_bytes(log: EmbeddedLog, call: Callable[[], object]) -> int:
    def total() -> int:
        return sum(path.stat().st_size for path in log.lake.spool_path.glob("producers/*/*/*.frames"))

    before = total()
    call()
    return total() - before


def measure_tail(folder: Path, num_rollouts: int, gap_s: float) -> None:
    """Milliseconds from a rollout's end to its decoded arrival here; writer and committer are other processes."""
    lake = Lake.create(folder / "tail")
    committer = subprocess.Popen(
        [sys.executable, "-m", "rolltape.ingest.committer", lake.location.path], stdout=subprocess.DEVNULL
    )
    writer = subprocess.Popen([sys.executable, "-c", WRITER, lake.location.path, str(num_rollouts), str(gap_s)])
    reader = EmbeddedLog(lake, "external").reader(Cursor(), topics=["rollout"])
    waits: list[float] = []
    while len(waits) < num_rollouts:
        deliveries = reader.poll(30.0)
        now = time.monotonic()
        for delivery in deliveries:
            if delivery.kind == "rollout_ended":
                waits += [now - float(row["cause"]) for row in delivery.table["rollout_ended"].to_pylist()]
    writer.wait()
    committer.terminate()
    committer.wait()
    waits_ms = np.sort(np.array(waits[5:])) * 1e3
    p50, p90, p99 = (round(float(np.quantile(waits_ms, q)), 1) for q in (0.5, 0.9, 0.99))
    _print(
        "finished rollout to reader in another process",
        rollouts=len(waits_ms),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        limit_ms=80,
    )


def _print(measurement: str, **figures: float) -> None:
    sys.stdout.write(json.dumps({"measurement": measurement, **figures}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--gap-s", type=float, default=0.05)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure_recorder(Path(name), options.rounds)
        measure_tail(Path(name), options.rollouts, options.gap_s)


if __name__ == "__main__":
    main()
