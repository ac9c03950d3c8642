"""What a trainer begins with, and when its optimizer forgets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.conftest import Tape as EventTape
from tests.methods import CONFIGS, MODEL, TEMPERATURE, batch
from tests.teacher_lakes import ended_run

from rolltape.numerics.models import build_model
from rolltape.numerics.weights import named_weights, tensor_digests, weights_digest
from rolltape.schema.errors import ConfigError, NotPublishedError
from rolltape.schema.policy import PolicyVersion
from rolltape.schema.runline import RunLine
from rolltape.store.lake import Lake
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import InitialWeights, TrainerJob
from rolltape.trainers.learner import Learner, build_learner
from rolltape.trainers.resets import OptimizerResets
from rolltape.trainers.step import train_step


def job(name: str, **changes: Any) -> TrainerJob:
    known: dict[str, Any] = {
        "run_id": "run",
        "seed": 5,
        "model_name": MODEL,
        "groups_per_step": 2,
        "group_size": 3,
        "num_workers": 1,
        "trainer": CONFIGS[name],
    }
    return TrainerJob(**{**known, **changes})


def digests(made: Learner) -> dict[str, str]:
    found = tensor_digests(named_weights(made.model))
    if made.critic is not None:
        found |= {f"critic/{n}": d for n, d in tensor_digests(named_weights(made.critic.model)).items()}
    return found


def test_a_learner_is_a_function_of_its_job() -> None:
    assert digests(build_learner(job("sao"))) == digests(build_learner(job("sao")))
    assert digests(build_learner(job("sao"))) != digests(build_learner(job("sao", seed=6)))
    assert build_learner(job("grpo")).critic is None
    assert build_learner(job("grpo")).model.training
    critic = build_learner(job("compaction")).critic
    assert critic is not None
    assert critic.optimizer.param_groups[0]["lr"] == CONFIGS["compaction"].critic_lr


def test_a_run_begins_with_weights_that_another_one_published(tmp_path: Path) -> None:
    """The policy, and the critic's body; a run that goes on from a checkpoint does not ask for them."""
    url = ended_run(tmp_path / "lake", "before", 41)
    start = job("sao", initial=InitialWeights(lake_url=url, run_id="before"))
    made, other = build_learner(start), build_model(MODEL, 41)
    assert weights_digest(named_weights(made.model)) == weights_digest(named_weights(other))
    assert made.critic is not None
    theirs = named_weights(other)
    for name, weight in named_weights(made.critic.model).items():
        if name.startswith("backbone."):
            assert torch.equal(weight, theirs[name.replace("backbone.", "transformer.")])
    first = build_learner(
        dataclasses.replace(start, initial=InitialWeights(lake_url=url, run_id="before", version="0"))
    )
    assert digests(first) != digests(made)
    gone = dataclasses.replace(start, initial=InitialWeights(lake_url=url, run_id="before", version="7"))
    with pytest.raises(NotPublishedError, match="expected version '7'"):
        build_learner(gone)
    assert digests(build_learner(gone, from_checkpoint=True)) == digests(build_learner(job("sao")))


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grpo", "sao"])
def test_recomputed_blocks_of_a_built_learner_give_the_same_gradients(
    name: str, compute_dtype: Literal["float32", "bfloat16"]
) -> None:
    """In bfloat16 as well, where a block is computed again after the parameters are float32 again."""

    def step(config: TrainerConfig) -> dict[str, str]:
        made = build_learner(job(name, trainer=config))
        return dict(train_step(made, batch(), config, step=1, temperature=TEMPERATURE).gradient_digests)

    config = dataclasses.replace(CONFIGS[name], compute_dtype=compute_dtype)
    plain = step(config)
    assert step(dataclasses.replace(config, gradient_checkpointing=True)) == plain
    assert plain != step(dataclasses.replace(config, compute_dtype="float32")) or compute_dtype == "float32"


def test_modules_that_the_critic_lacks_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="freeze_critic"):
        build_learner(job("sao", trainer=dataclasses.replace(CONFIGS["sao"], freeze_critic=("router",))))


class Tape:
    """What was recorded."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def record(self, kind: str, **fields: Any) -> None:
        self.rows.append((kind, fields))

    @property
    def steps(self) -> list[int]:
        return [fields["step"] for _, fields in self.rows]


def history(*steps: tuple[int, int], resets_of: tuple[int, ...] = ()) -> RunHistory:
    """Of a run whose last steps, to step 7, started from and made these versions, some of which had their resets."""
    first = 8 - len(steps)
    rows = {first + n: {"version_in": before, "version_out": after} for n, (before, after) in enumerate(steps)}
    return RunHistory(
        run_id="run",
        line=RunLine(((1, 0),)),
        started={},
        steps=rows,
        batches={},
        checkpoints={},
        published={},
        reset_versions=frozenset((1, number) for number in resets_of),
    )


def version(number: int) -> PolicyVersion:
    return PolicyVersion("actor", 1, number, f"w{number}")


def stepped() -> Learner:
    made = build_learner(job("grpo"))
    train_step(made, batch(), CONFIGS["grpo"], step=1, temperature=TEMPERATURE)
    return made


def test_moments_are_forgotten_when_other_weights_come_to_serve() -> None:
    tape, made = Tape(), stepped()
    resets = OptimizerResets(tape, enabled=True)  # type: ignore[arg-type]
    resets.begin(history(), version(0))
    resets.settle(made, version(0), step=1)
    assert made.optimizer.state
    assert tape.rows == []
    resets.settle(made, version(2), step=3)
    assert not made.optimizer.state
    assert tape.rows == [
        (
            "optimizer_reset",
            {
                "step": 3,
                "extent": "actor: exp_avg, exp_avg_sq, step",
                "reason": "version 2 of run epoch 1 serves",
                "policy_id": "actor",
                "policy_run_epoch": 1,
                "version": 2,
                "weights_digest": "w2",
            },
        )
    ]
    resets.settle(made, version(2), step=4)
    assert tape.steps == [3]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (history(), []),
        (history((3, 4)), [7]),  # killed between the step and its reset
        (history((3, 4), resets_of=(4,)), []),
        (history((4, 4)), []),  # a skipped step, or one of the critic's warm-up
        (history((3, 4), (4, 4)), [7]),  # skipped, while version 4 was on its way to the engines
        (history((3, 4), (4, 4), resets_of=(4,)), []),
        (history((2, 3), (3, 4), (4, 4), resets_of=(3,)), [7]),  # the reset was for the one before
    ],
)
def test_a_trainer_that_comes_back_makes_up_for_a_reset_that_is_missing(
    before: RunHistory, expected: list[int]
) -> None:
    tape = Tape()
    resets = OptimizerResets(tape, enabled=True)  # type: ignore[arg-type]
    resets.begin(before, version(4))
    resets.settle(stepped(), version(4), step=7)
    assert tape.steps == expected


def test_a_history_knows_which_version_a_reset_was_for(tape: EventTape, tmp_path: Path) -> None:
    """By its columns, and by the reason of a release that had none."""
    tape.add("run_started", purpose="train")
    lake = Lake.create(tmp_path / "lake")
    reset: dict[str, Any] = {"step": 1, "extent": "actor: step"}
    tape.add("optimizer_reset", **reset, reason="new weights", **version(3).fields)
    tape.add("optimizer_reset", **reset, reason="version 12 of run epoch 2 serves")
    tape.add("optimizer_reset", **reset, reason="by hand")
    lake.append(tape.tables(), {})
    assert RunHistory.read(lake, "run").reset_versions == {(1, 3), (2, 12)}


def test_resets_are_on_in_asynchronous_runs_or_as_configured() -> None:
    def resets(lead: int, wanted: Literal["auto", "on", "off"]) -> bool:
        config = dataclasses.replace(CONFIGS["grpo"], optimizer_reset=wanted)
        return job("grpo", trainer=config, max_lead_steps=lead).resets_optimizer

    assert [resets(0, "auto"), resets(2, "auto")] == [False, True]
    assert [resets(0, "on"), resets(2, "off")] == [True, False]
    tape = Tape()
    off = OptimizerResets(tape, enabled=False)  # type: ignore[arg-type]
    off.begin(history(), version(0))
    off.settle(stepped(), version(1), step=1)
    assert tape.rows == []
