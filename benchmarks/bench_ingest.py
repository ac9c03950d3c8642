"""What recording costs and how fast it is seen: ``python benchmarks/bench_ingest.py``.

Prints one JSON line a measurement: CPU time and spooled bytes of an event, alone and in batches; and the time from the
end of a rollout to its arrival, decoded, in another process, through spool, committer and lake (fsyncs included).
CPU times are the smallest of several rounds: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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
num_rollouts, gap_s, warm_up = int(sys.argv[2]), float(sys.argv[3]), 10
with EmbeddedLog(Lake.open(sys.argv[1]), "external") as log, Recorder(log, producer_id="w", run_id="r") as recorder:
    for number in range(num_rollouts + warm_up):
        if number == warm_up:
            recorder.flush()
            time.sleep(1.0)
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


def start_columns(num_rows: int) -> dict[str, Any]:
    """Columns of ``num_rows`` starts with a prompt of 12 tokens."""
    return {
        "trajectory_id": uuid7_many(num_rows),
        "attempt": 0,
        "group_id": uuid7_many(1)[0],
        "problem_id": "problem-17",
        "environment": "sort-digits",
        "prompt_token_ids": np.full((num_rows, 12), 7, np.int32),
    }


def dispatch_columns(num_rows: int) -> dict[str, Any]:
    """Columns of ``num_rows`` dispatches of one group."""
    return {
        "trajectory_id": uuid7_many(num_rows),
        "attempt": 0,
        "group_id": uuid7_many(1)[0],
        "problem_id": "problem-17",
        "purpose": "train",
        "training_step": 3,
        "group_ordinal": 0,
        "member": np.arange(num_rows),
        "group_size": num_rows,
        "worker_id": "worker-0",
        "sampling_seed": np.arange(num_rows),
    }


ROLLOUT_EVENTS: Final[Mapping[str, Callable[[int], dict[str, Any]]]] = {
    "rollout_dispatched": dispatch_columns,
    "rollout_started": start_columns,
    "action_sampled": lambda num_rows: action_columns(num_rows, 24),
    "rollout_ended": end_columns,
    "reward_assigned": reward_columns,
}


def measure_recorder(folder: Path, rounds: int) -> None:
    """CPU milliseconds and spooled bytes of an event: a long action alone, short rollouts' events in batches."""
    log = EmbeddedLog(Lake.create(folder / "recorder"), "external")
    with Recorder(log, producer_id="bench", run_id="run") as recorder:
        one = {name: value[0] if isinstance(value, list) else value for name, value in action_columns(1, 1000).items()}
        cpu_ms, size = _measure(log, lambda: recorder.record("action_sampled", **one), rounds)
        _print("action of 1,000 tokens alone", cpu_ms=round(cpu_ms, 4), bytes=size, limit_ms=1.0)
        for num_rows in (16, 64, 256):
            found = []
            for kind, make in ROLLOUT_EVENTS.items():
                columns = make(num_rows)
                record = functools.partial(recorder.record_batch, kind, columns, num_rows)
                cpu_ms, size = _measure(log, record, rounds)
                found.append((cpu_ms / num_rows, size / num_rows))
                _print(f"{kind} of {num_rows} short rollouts", cpu_ms=round(found[-1][0], 4), bytes=round(found[-1][1]))
            cpu_ms, size_mean = np.mean(found, axis=0)
            _print(
                f"mean event of {num_rows} short rollouts",
                cpu_ms=round(float(cpu_ms), 4),
                bytes=round(float(size_mean)),
                limit_ms=0.05,
                limit_bytes=1024,
            )


def _measure(log: EmbeddedLog, call: Callable[[], object], rounds: int) -> tuple[float, int]:
    for _ in range(10):
        call()
    return min(_cpu_ms(call, 5) for _ in range(rounds)), _spooled_bytes(log, call)


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
        [sys.executable, "-m", "rolltape.ingest.committer", lake.location.path], stdout=subprocess.PIPE
    )
    assert committer.stdout is not None
    committer.stdout.readline()  # it runs
    writer = subprocess.Popen([sys.executable, "-c", WRITER, lake.location.path, str(num_rollouts), str(gap_s)])
    reader = EmbeddedLog(lake, "external").reader(Cursor(), topics=["rollout"])
    waits: list[float] = []
    # The first ten rollouts pay for imports and first uses in all three processes.
    while len(waits) < num_rollouts + 10:
        deliveries = reader.poll(30.0)
        now = time.monotonic()
        for delivery in deliveries:
            if delivery.kind == "rollout_ended":
                waits += [now - float(row["cause"]) for row in delivery.table["rollout_ended"].to_pylist()]
    writer.wait()
    committer.terminate()
    committer.wait()
    waits_ms = np.sort(np.array(waits[10:])) * 1e3
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
    parser = argparse.ArgumentParser(description="What recording costs and how fast it is seen.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--gap-s", type=float, default=0.05)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure_recorder(Path(name), options.rounds)
        measure_tail(Path(name), options.rollouts, options.gap_s)


if __name__ == "__main__":
    main()
