"""kill -9 of a worker process on an embedded log: nothing doubled, nothing lost, the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.store.lake import Lake
from rolltape.store.location import Location

from .conftest import ScriptedTrainer

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


class Run:
    """A lake, its committer, a scripted trainer, and one worker process that is started again whenever it dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lake = Lake.create(Location.parse(str(folder / "lake")))
        self.log = EmbeddedLog(self.lake, committer="thread")
        self.trainer = ScriptedTrainer(self.log, self.lake.location)
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start_worker(self, environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / "worker.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, self.lake.location.url],
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=output,
            )
        self.num_starts += 1

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(30) == -signal.SIGKILL

    def step(self, step: int, key: dict[str, Any]) -> dict[str, Any]:
        """Commit the step's version, wait for its rollouts, complete it; gives the next version."""
        self.trainer.commit(key)
        self.trainer.wait_for_rewards(step, PER_STEP)
        self.trainer.complete(step, version_out=step, final=step == NUM_STEPS)
        return self.trainer.publish(step, step=step)

    def finish(self, key: dict[str, Any]) -> None:
        assert self.process is not None
        self.trainer.commit(key)
        assert self.process.wait(60) == 0, (self.folder / "worker.log").read_text()
        self.trainer.tape.refresh()

    def contents(self) -> dict[tuple[str, int, int, int], Any]:
        """Ids, log-prob bits, versions and reward of each complete attempt, by its place."""
        tape = self.trainer.tape
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
                [run["version"] for run in action["version_runs"]],
                row["scalar"],
            )
        assert len(found) == len(set(dispatched) - gone), "every attempt is complete or abandoned"
        return found

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.trainer.close()
        self.log.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "disturbed").mkdir()
    made = Run(tmp_path / "disturbed")
    yield made
    made.close()


@pytest.fixture
def expected(tmp_path: Path) -> dict[tuple[str, int, int, int], Any]:
    """What an undisturbed run writes."""
    (tmp_path / "undisturbed").mkdir()
    calm = Run(tmp_path / "undisturbed")
    try:
        calm.trainer.start_run()
        key = calm.trainer.publish(0, step=0)
        calm.start_worker()
        for step in range(1, NUM_STEPS + 1):
            key = calm.step(step, key)
        calm.finish(key)
        return calm.contents()
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

    assert run.contents() == expected
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
