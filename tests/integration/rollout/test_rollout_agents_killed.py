"""kill -9 of a worker in the middle of agents' turns: nothing doubled, nothing lost, the same bits, a clean verify."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import agent_tasks

from rolltape.store.verify import verify

from .agent_contents import Place, contents, wait_for_ends
from .killable import Run

NUM_STEPS, GROUPS, SIZE, TURNS, HELD_OUT = 3, 2, 4, 5, 4
PER_STEP = GROUPS * SIZE

WORKER = f"""
import sys
from tests import agent_tasks
from rolltape.rollout.agent_config import AgentConfig, CompactionConfig
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.worker import WorkerConfig, run_worker
agent_tasks.register()
sys.exit(run_worker(WorkerConfig(
    lake=sys.argv[1], run_id="run", seed=9, groups_per_step={GROUPS}, group_size={SIZE},
    environment="{agent_tasks.NAME}",
    environment_options={{"num_turns": {TURNS}, "num_heldout": {HELD_OUT}, "delay_s": 0.01}},
    sampling=SamplingConfig(max_tokens=3), poll_s=0.05,
    agent=AgentConfig(
        max_turns={TURNS}, context_budget=40, mask_erroneous=True,
        compaction=CompactionConfig(max_compactions=2, threshold=16, max_summary_tokens=6),
    ),
)))
"""


def begin(folder: Path) -> Run:
    folder.mkdir()
    return Run(folder, worker=WORKER, per_step=PER_STEP, num_steps=NUM_STEPS)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = begin(tmp_path / "disturbed")
    yield made
    made.close()


@pytest.fixture
def expected(tmp_path: Path) -> dict[Place, list[Any]]:
    """What an undisturbed run writes."""
    calm = begin(tmp_path / "undisturbed")
    try:
        calm.trainer.start_run()
        key = calm.trainer.publish(0, step=0)
        calm.start_worker()
        for step in range(1, NUM_STEPS + 1):
            calm.trainer.commit(key)
            key = complete(calm, step)
        calm.finish(key)
        return contents(calm.trainer.tape)
    finally:
        calm.close()


def complete(run: Run, step: int) -> dict[str, Any]:
    """Wait until all rollouts up to this step have ended, and complete it; gives the next version."""
    wait_for_ends(run.trainer.tape, step * PER_STEP)
    run.trainer.complete(step, version_out=step, final=step == NUM_STEPS)
    return run.trainer.publish(step, step=step)


def test_a_worker_that_is_killed_between_turns_writes_what_an_undisturbed_one_does(
    run: Run, expected: dict[Place, list[Any]]
) -> None:
    assert len(expected) == NUM_STEPS * PER_STEP + HELD_OUT
    tape = run.trainer.tape
    run.trainer.start_run()
    key = run.trainer.publish(0, step=0)
    run.start_worker()
    for step in range(1, NUM_STEPS + 1):
        run.trainer.commit(key)
        if step > 1:
            wait_for_actions(run, tape.count("action_sampled") + PER_STEP + 1)  # some turns of the step
            run.kill()
            run.start_worker()
        key = complete(run, step)
    run.finish(key)

    assert contents(tape) == expected
    assert run.num_starts == NUM_STEPS
    assert tape.rows("attempt_abandoned"), "a worker was killed in the middle of a step"
    ids = [row["event_id"] for kind in tape.counts() for row in tape.rows(kind)]
    assert len(ids) == len(set(ids)), "no event twice"
    assert tape.rows("dead_letter") == []
    assert tape.rows("alarm_raised") == []
    report = verify(run.lake)
    assert report.ok, [(check.check, check.findings) for check in report.checks if check.findings]


def wait_for_actions(run: Run, number: int) -> None:
    tape = run.trainer.tape
    tape.wait_for(f"{number} actions", lambda: tape.count("action_sampled") >= number)
