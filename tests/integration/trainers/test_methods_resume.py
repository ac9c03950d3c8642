"""Runs with a critic whose trainer is killed: the same bits as undisturbed, a critic on the tape, steps that replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
from tests.training_runs import TrainingRun

from rolltape.recipes.config import RunConfig
from rolltape.recipes.running_max_compaction import config as running_max
from rolltape.recipes.runs import trainer_job
from rolltape.recipes.sort_digits_sao import config as sort_digits_sao
from rolltape.store.lake import Lake
from rolltape.trainers.replay import replay_step

NUM_STEPS: Final = 6
WARMUP: Final = 2
RECIPES: Final = {"sao": sort_digits_sao, "compaction": running_max}


def config(method: str) -> RunConfig:
    """A few steps of the method's recipe: a checkpoint each three of them, the first two without the policy."""
    base = RECIPES[method](run_id=f"resumed-{method}", seed=3, max_steps=NUM_STEPS)
    return replace(
        base,
        rollout=replace(base.rollout, num_workers=1, groups_per_step=8, evaluate_heldout=False, evaluate_initial=False),
        trainer=replace(
            base.trainer,
            checkpoint_every=3,
            probe_every=0,
            critic_warmup_steps=WARMUP,
            value_norm=True,
            optimizer_reset="on",
            engine_timeout_s=120.0,
        ),
    )


@pytest.fixture(scope="module", params=["sao", "compaction"])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TrainingRun, TrainingRun]]:
    """A run that nobody disturbs, and one whose trainer dies at steps 0, 2 and 5: once in each of its windows."""
    made = config(request.param)
    tmp_path = tmp_path_factory.mktemp(request.param)
    windows = ("after_checkpoint:1", "after_step_event:2", "after_committed:3")
    plan = ",".join(f"{window}:{tmp_path / window.partition(':')[0]}" for window in windows)
    crash = {"trainer": {"ROLLTAPE_CRASH": plan}}
    with (
        TrainingRun(tmp_path / "calm", config=made) as calm,
        TrainingRun(tmp_path / "killed", config=made, environment=crash) as killed,
    ):
        for run in (calm, killed):
            run.start()
            run.wait()
        yield calm, killed


def rows(lake: Lake, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lake.sql(query).arrow().to_pylist()
    return found


@pytest.mark.timeout(600)
def test_a_killed_trainer_goes_on_with_the_same_bits_critic_included(runs: tuple[TrainingRun, TrainingRun]) -> None:
    calm, killed = runs
    assert calm.problems() == []
    assert killed.problems() == []
    assert killed.supervisor.restarts["trainer"] == 3
    assert calm.bits() == killed.bits()
    names = {name for bits in calm.bits().values() for name in bits}
    assert {"metric value_loss", "metric explained_variance", "metric critic_grad_norm"} <= names
    for run in runs:
        steps = rows(
            run.lake,
            "select step, version_in, version_out, skipped from steps where is_live order by step",
        )
        assert [(row["version_in"], row["version_out"]) for row in steps] == [
            (0, 0),
            (0, 0),
            (0, 1),
            (1, 2),
            (2, 3),
            (3, 4),
        ]
        assert not any(row["skipped"] for row in steps)
        critics = rows(
            run.lake,
            "select version, step, state, is_committed from policy_versions where role = 'critic' order by step, 1",
        )
        assert {(row["version"], row["step"]) for row in critics} == {(0, 0), (1, 3), (2, 6)}
        assert not any(row["is_committed"] for row in critics)
        resets = rows(run.lake, "select distinct step from optimizer_reset order by step")
        assert [row["step"] for row in resets] == [3, 4, 5]


@pytest.mark.timeout(600)
def test_steps_with_a_critic_replay_to_the_bit(runs: tuple[TrainingRun, TrainingRun]) -> None:
    """Steps of the warm-up, after it, and after a reset of the optimizer."""
    calm, killed = runs
    for run, step in ((calm, 2), (calm, 5), (killed, 6)):
        report = replay_step(run.lake, trainer_job(run.config), step)
        assert report.comparison.differences == ()
        assert report.comparison.outcome.critic is not None
        names = report.comparison.outcome.gradient_digests
        assert any(name.startswith("critic/") for name in names)
        assert any(not name.startswith("critic/") for name in names) == (step > WARMUP)
