"""Agents through the worker, with a real model: whole and trainable rollouts, the same bits after every crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import agent_tasks

from rolltape.rollout.agent_config import AgentConfig, CompactionConfig
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.process import DONE
from rolltape.rollout.worker import WorkerConfig

from .agent_contents import Place, contents, folded, wait_for_ends
from .stage import Killed, Stage

GROUPS, SIZE = 2, 4
PER_STEP = GROUPS * SIZE
AGENT = AgentConfig(
    max_turns=6,
    context_budget=40,
    mask_erroneous=True,
    compaction=CompactionConfig(max_compactions=2, threshold=16, max_summary_tokens=6, keep_recent=2),
)
CONFIG = WorkerConfig(
    lake="memory://",
    run_id="run",
    environment=agent_tasks.NAME,
    environment_options={"num_turns": 6},
    seed=5,
    groups_per_step=GROUPS,
    group_size=SIZE,
    sampling=SamplingConfig(max_tokens=3),
    agent=AGENT,
    poll_s=0.02,
    evaluate_heldout=False,
)
RECORDED = (
    "rollout_dispatched",
    "rollout_started",
    "action_sampled",
    "observation_received",
    "context_rewritten",
    "mask_assigned",
    "reward_assigned",
    "rollout_ended",
)


@pytest.fixture(autouse=True)
def _registered() -> None:
    agent_tasks.register()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, CONFIG)
    yield made
    made.close()


def whole_step(stage: Stage, **changes: Any) -> None:
    """Everything of step 1 is on the tape."""
    stage.begin()
    stage.worker(**changes)
    stage.trainer.commit(stage.version_0)
    wait_for_ends(stage.tape, PER_STEP)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[Place, list[Any]]:
    """What step 1 is where nothing happens."""
    agent_tasks.register()
    calm = Stage(tmp_path_factory.mktemp("calm"), CONFIG)
    try:
        whole_step(calm)
        return contents(calm.tape)
    finally:
        calm.close()


def test_what_a_small_model_does_is_whole_and_trainable(stage: Stage) -> None:
    whole_step(stage)
    found = folded(stage.tape)
    trajectories, segments = found.trajectories.to_pylist(), found.segments.to_pylist()
    assert len(trajectories) == PER_STEP
    failed = [row for row in trajectories if row["status"] == "env_failed"]
    assert failed, "the seed has an episode that fails"
    for row in trajectories:
        assert row["untrainable_reasons"] == (["env_failed", "reward_invalid"] if row in failed else [])
        assert row["tito_ok"]
    assert sum(row["segment_kind"] == "summary" for row in segments) >= 2
    assert any(row["is_accepted"] is False for row in segments) is False
    assert {row["num_segments"] % 2 for row in trajectories} == {1}, "m summaries, m + 1 executions"
    assert any(row["token_rewards"] for row in trajectories)
    assert any(row["mask_event_ids"] for row in trajectories)
    actions = stage.tape.rows("action_sampled")
    num_masked = sum(span["length"] for row in stage.tape.rows("mask_assigned") for span in row["ranges"])
    num_sampled = sum(len(row["token_ids"]) for row in actions)
    assert sum(sum(row["response_mask"]) for row in segments) == num_sampled - num_masked
    assert len({row["sampling"]["seed"] for row in actions}) == len(actions), "every call has a seed of its own"
    assert stage.tape.rows("dead_letter") == []


def test_the_same_seed_gives_the_same_bits(stage: Stage, expected: dict[Place, list[Any]]) -> None:
    whole_step(stage)
    assert contents(stage.tape) == expected


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_spared"),
    [
        ("rollout_started", 3, 0),
        ("action_sampled", 0, 0),
        ("action_sampled", 3, 2),
        ("observation_received", 2, 3),
        ("context_rewritten", 1, 0),
        ("context_rewritten", 0, 1),
        ("mask_assigned", 0, 0),
        ("reward_assigned", 1, 0),
        ("reward_assigned", 0, 1),
        ("rollout_ended", 0, 0),
        ("rollout_ended", 1, 0),
        ("rollout_ended", 1, 1),
    ],
)
def test_a_worker_that_died_comes_back_to_the_same_bits(
    stage: Stage, expected: dict[Place, list[Any]], kind: str, num_rows: int, num_spared: int
) -> None:
    stage.begin()
    dying = stage.worker(dies_at=(kind, num_rows), num_spared=num_spared)
    stage.trainer.commit(stage.version_0)
    assert isinstance(dying.join().error, Killed)
    kept = {(row["trajectory_id"], row["attempt"]) for row in stage.tape.rows("rollout_ended")}
    num_dispatched = len(stage.tape.rows("rollout_dispatched"))

    stage.worker()
    wait_for_ends(stage.tape, PER_STEP)
    assert contents(stage.tape) == expected
    abandoned = {(row["trajectory_id"], row["attempt"]) for row in stage.tape.rows("attempt_abandoned")}
    assert len(abandoned) == num_dispatched - len(kept)
    assert not abandoned & kept
    # what was complete is not recorded again
    attempts = {(row["trajectory_id"], row["attempt"]) for row in stage.tape.rows("rollout_dispatched")}
    assert len(attempts) == PER_STEP + len(abandoned)
    ends = [(row["trajectory_id"], row["attempt"]) for row in stage.tape.rows("rollout_ended")]
    assert len(ends) == len(set(ends)) == PER_STEP
    assert {row["reason"] for row in stage.tape.rows("attempt_abandoned")} <= {"worker_lost"}


def test_a_worker_that_comes_back_after_its_step_adds_nothing(stage: Stage) -> None:
    stage.begin()
    first = stage.worker()
    stage.trainer.commit(stage.version_0)
    wait_for_ends(stage.tape, PER_STEP)
    first.worker.stop()
    first.join()
    before = {kind: len(stage.tape.rows(kind)) for kind in RECORDED}
    stage.worker()
    stage.tape.wait_for("the engine to serve again", lambda: len(stage.tape.rows("weights_activated")) == 2)
    stage.trainer.complete(1, version_out=0)
    wait_for_ends(stage.tape, 2 * PER_STEP)
    assert stage.tape.rows("attempt_abandoned") == []
    assert all(len(stage.tape.rows(kind)) > before[kind] for kind in ("rollout_ended", "action_sampled"))
    steps = [row["training_step"] for row in stage.tape.rows("rollout_dispatched")]
    assert (steps.count(1), steps.count(2)) == (PER_STEP, PER_STEP)


def test_batches_of_one_group_each(stage: Stage) -> None:
    whole_step(stage, rows_per_batch=SIZE)
    assert folded(stage.tape).trajectories.num_rows == PER_STEP
    assert stage.tape.rows("dead_letter") == []


class TestEvaluation:
    def finish(self, stage: Stage) -> dict[str, float]:
        stage.trainer.commit(stage.version_0)
        wait_for_ends(stage.tape, PER_STEP)
        stage.trainer.complete(1, version_out=1, final=True)
        stage.trainer.commit(stage.trainer.publish(1, step=1))
        assert stage.running[-1].join().status == DONE
        [row] = stage.tape.rows("evaluation_completed")
        return {metric["name"]: metric["value"] for metric in row["metrics"]}

    def correct(self, stage: Stage) -> float:
        ids = {r["trajectory_id"] for r in stage.tape.rows("rollout_dispatched") if r["purpose"] == "evaluate"}
        rewards = [
            row["components"][0]["value"]
            for row in stage.tape.rows("reward_assigned")
            if row["trajectory_id"] in ids and row["target_event_id"] is None
        ]
        assert len(rewards) == 6
        return len([value for value in rewards if value is not None and value >= 0.5]) / 6

    def test_on_the_held_out_problems(self, stage: Stage) -> None:
        stage.begin()
        stage.worker(evaluate_heldout=True, environment_options={"num_turns": 3, "fail_every": 5})
        metrics = self.finish(stage)
        assert metrics == {"exact_match": self.correct(stage), "num_problems": 6.0}
        evaluated = [r for r in stage.tape.rows("rollout_dispatched") if r["purpose"] == "evaluate"]
        assert len(evaluated) == 6

    def test_of_the_first_version(self, stage: Stage) -> None:
        stage.begin()
        options = {"num_turns": 3, "fail_every": 0}
        stage.worker(evaluate_initial=True, environment_options=options)
        stage.trainer.commit(stage.version_0)
        stage.tape.wait_for("an evaluation", lambda: len(stage.tape.rows("evaluation_completed")) == 1)
        wait_for_ends(stage.tape, PER_STEP + 6)
        [row] = stage.tape.rows("evaluation_completed")
        assert (row["version"], {metric["name"] for metric in row["metrics"]}) == (0, {"exact_match", "num_problems"})
        dispatched = stage.tape.rows("rollout_dispatched")
        assert [(row["purpose"], row["training_step"]) for row in dispatched[:6]] == [("evaluate", 0)] * 6
        stage.trainer.complete(1, version_out=0)
        wait_for_ends(stage.tape, 2 * PER_STEP + 6)
        assert len(stage.tape.rows("evaluation_completed")) == 1

    def test_after_a_crash_in_the_middle(self, stage: Stage) -> None:
        stage.begin()
        options = {"num_turns": 3, "fail_every": 0}
        dying = stage.worker(evaluate_heldout=True, environment_options=options, dies_at=("evaluation_completed", 0))
        stage.trainer.commit(stage.version_0)
        wait_for_ends(stage.tape, PER_STEP)
        stage.trainer.complete(1, version_out=1, final=True)
        stage.trainer.commit(stage.trainer.publish(1, step=1))
        assert isinstance(dying.join().error, Killed)
        stage.worker(evaluate_heldout=True, environment_options=options)
        assert stage.running[-1].join().status == DONE
        [row] = stage.tape.rows("evaluation_completed")
        metrics = {metric["name"]: metric["value"] for metric in row["metrics"]}
        assert metrics["exact_match"] == self.correct(stage), "judged by what the tape has"
        assert stage.tape.rows("attempt_abandoned") == []


def test_a_worker_that_runs_ahead_takes_new_weights_between_two_turns(stage: Stage) -> None:
    """Whenever they come, a token names the version that sampled it, and versions only go forward in a rollout."""
    stage.begin()
    options = {"num_turns": 6, "fail_every": 0, "delay_s": 0.02}
    stage.worker(max_lead_steps=1, environment_options=options, agent=AgentConfig(max_turns=6))
    stage.trainer.commit(stage.version_0)
    stage.tape.wait_for("the first turn", lambda: len(stage.tape.rows("action_sampled")) >= PER_STEP)
    stage.trainer.commit(stage.trainer.publish(1, step=1))
    wait_for_ends(stage.tape, 2 * PER_STEP)
    trajectories = folded(stage.tape).trajectories.to_pylist()
    mixed = [row for row in trajectories if (row["min_version"], row["max_version"]) == (0, 1)]
    assert mixed, "the weights came in the middle of a rollout"
    assert all(row["untrainable_reasons"] == [] for row in mixed)
    for row in folded(stage.tape).segments.to_pylist():
        sampled = [v for v, is_action in zip(row["policy_versions"], row["response_mask"], strict=True) if is_action]
        assert sampled == sorted(sampled)


def test_the_versions_of_a_new_run_epoch_wait_for_the_end_of_the_share(stage: Stage) -> None:
    stage.begin()
    options = {"num_turns": 6, "fail_every": 0, "delay_s": 0.02}
    stage.worker(max_lead_steps=1, environment_options=options, agent=AgentConfig(max_turns=6))
    stage.trainer.commit(stage.version_0)
    stage.tape.wait_for("the first turn", lambda: stage.tape.count("action_sampled") >= PER_STEP)
    stage.trainer.resume_run(2, continues_from_step=0)
    stage.trainer.commit(stage.trainer.publish(0, step=0))
    wait_for_ends(stage.tape, 2 * PER_STEP)
    staged = [(row["policy_run_epoch"], row["run_epoch"]) for row in stage.tape.rows("weights_staged")]
    assert staged == [(1, 1), (2, 2)]
    for row in stage.tape.rows("action_sampled"):
        assert all(run["run_epoch"] <= row["run_epoch"] for run in row["version_runs"])
