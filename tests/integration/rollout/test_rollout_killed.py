"""kill -9 of a worker process on an embedded log: nothing doubled, nothing lost, the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .killable import Run

NUM_STEPS, GROUPS, SIZE = 4, 3, 4
PER_STEP = GROUPS * SIZE

WORKER = f"""
import sys
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.worker import WorkerConfig, run_worker
sys.exit(run_worker(WorkerConfig(
    lake=sys.argv[1], run_id="run", seed=9, groups_per_step={GROUPS}, group_size={SIZE},
    environment_options={{"num_heldout": 20}}, sampling=SamplingConfig(max_tokens=4), poll_s=0.05,
)))
"""


def begin(folder: Path) -> Run:
    folder.mkdir()
    return Run(folder, worker=WORKER, per_step=PER_STEP, num_steps=NUM_STEPS)


def contents(run: Run) -> dict[tuple[str, int, int, int], Any]:
    """Ids, log-prob bits, versions and reward of each complete attempt, by its place."""
    tape = run.trainer.tape
    dispatched = {(row["trajectory_id"], row["attempt"]): row for row in tape.rows("rollout_dispatched")}
    actions = {(row["trajectory_id"], row["attempt"]): row for row in tape.rows("action_sampled")}
    gone = {(row["trajectory_id"], row["attempt"]) for row in tape.rows("attempt_abandoned")}
    found: dict[tuple[str, int, int, int], Any] = {}
    for row in tape.rows("reward_assigned"):
        key = (row["trajectory_id"], row["attempt"])
        if key in gone:
            continue
        dispatch, action = dispatched[key], actions[key]
        place = tuple(dispatch[name] for name in ("purpose", "training_step", "group_ordinal", "member"))
        assert place not in found, f"two complete attempts at {place}"
        bits = np.array(action["rollout_log_probs"], dtype=np.float32).tobytes()
        found[place] = (
            action["token_ids"],
            bits,
            [span["version"] for span in action["version_runs"]],
            row["scalar"],
        )
    assert len(found) == len(set(dispatched) - gone), "every attempt is complete or abandoned"
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = begin(tmp_path / "disturbed")
    yield made
    made.close()


@pytest.fixture
def expected(tmp_path: Path) -> dict[tuple[str, int, int, int], Any]:
    """What an undisturbed run writes."""
    calm = begin(tmp_path / "undisturbed")
    try:
        calm.trainer.start_run()
        key = calm.trainer.publish(0, step=0)
        calm.start_worker()
        for step in range(1, NUM_STEPS + 1):
            key = calm.step(step, key)
        calm.finish(key)
        return contents(calm)
    finally:
        calm.close()


def test_a_worker_that_is_killed_again_and_again_writes_what_an_undisturbed_one_does(
    run: Run, expected: dict[tuple[str, int, int, int], Any]
) -> None:
    assert len(expected) == NUM_STEPS * PER_STEP + 20
    tape = run.trainer.tape
    mark = run.folder / "mark"
    run.trainer.start_run()
    key = run.trainer.publish(0, step=0)
    run.start_worker({"ROLLTAPE_CRASH": f"after_staged:2:{mark}"})

    # version 1 is staged, then the worker is gone: its successor stages it again before it serves
    key = run.step(1, key)
    assert run.process is not None
    assert run.process.wait(60) == -signal.SIGKILL
    assert mark.exists()
    run.start_worker()
    run.trainer.commit(key)

    # killed as soon as the dispatch of step 2 is on the tape
    tape.wait_for("the dispatch of step 2", lambda: len(tape.rows("rollout_dispatched")) > PER_STEP)
    run.kill()
    run.start_worker()
    key = run.step(2, key)

    # killed between two steps, while version 2 is published and nobody has committed it
    tape.wait_for("version 2 to be staged", lambda: any(row["version"] == 2 for row in tape.rows("weights_staged")))
    run.kill()
    run.start_worker()
    for step in range(3, NUM_STEPS + 1):
        key = run.step(step, key)
    run.finish(key)

    assert contents(run) == expected
    assert run.num_starts == 4
    ids = [row["event_id"] for kind in tape.counts() for row in tape.rows(kind)]
    assert len(ids) == len(set(ids)), "no event twice"
    assert tape.rows("dead_letter") == []
    assert tape.rows("alarm_raised") == []


def test_a_worker_leaves_on_sigterm(run: Run) -> None:
    run.trainer.start_run()
    key = run.trainer.publish(0, step=0)
    run.start_worker()
    run.trainer.commit(key)
    run.trainer.wait_for_rewards(1, PER_STEP)
    assert run.process is not None
    run.process.terminate()
    assert run.process.wait(60) == 143
    run.trainer.tape.refresh()
    assert [row["reason"] for row in run.trainer.tape.rows("engine_left")] == ["left"]
