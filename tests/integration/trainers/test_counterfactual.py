"""One recorded batch given to every method: one command, one table, and the tape is as it was (issue: Shows 4)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Tape
from tests.recorded_batch import Recorded
from tests.training_runs import TrainingRun, small_config

from rolltape.recipes import sort_digits
from rolltape.recipes.cli import main
from rolltape.recipes.config import RunConfig, trainer_options
from rolltape.recipes.runs import trainer_job
from rolltape.schema.errors import ConfigError, ReplayError
from rolltape.store.lake import Lake
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.counterfactual import Counterfactual, Variant, try_variants, variants_of
from rolltape.trainers.history import RunHistory

DIS = {"epsilon_low": 0.3, "epsilon_high": 5.0}
CHANGES: dict[str, dict[str, Any]] = {"dis": DIS, "sao": DIS}
FIVE = ("grpo", "dis", "opd", "sao", "compaction")


@pytest.fixture
def config() -> RunConfig:
    base = sort_digits.config(run_id="run", seed=0, max_steps=3)
    return dataclasses.replace(base, trainer=TrainerConfig())


@pytest.fixture
def recorded(tape: Tape, tmp_path: Path, config: RunConfig) -> Recorded:
    found = Recorded(tape, tmp_path, config_json=config.to_json(), model_name=config.model.name, vocab_size=16)
    found.pin(BatchRules.of(config.trainer))
    return found


def tried(lake: Lake, config: RunConfig, *variants: Variant) -> Counterfactual:
    return try_variants(lake, trainer_job(config), "batch", variants)


def test_one_batch_five_algorithms_one_command_one_table(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = recorded.lake()
    version = lake.snapshot().version
    settings = [f"--set={name}.{field}={value}" for name in ("dis", "sao") for field, value in DIS.items()]
    code = main(["replay", "--lake", lake.location.url, "--batch", "batch", "--algorithm", ",".join(FIVE), *settings])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in printed if "variant" in row]
    assert code == 0
    assert [row["variant"] for row in rows] == ["grpo, as recorded", *FIVE[1:]]
    norms = [row["grad_norm"] for row in rows]
    assert all(norm > 0 for norm in norms)
    assert len(set(norms)) == len(FIVE), norms
    assert all(row["tokens"] == 10 and row["refused"] is None for row in rows)
    assert all(0 < row["trusted_frac"] <= 1 for row in rows)
    assert all(row["pull_diff_max"] > 0 for row in rows[1:])
    tokens = [row for row in printed if "token_id" in row]
    assert len(tokens) == 10
    spread = [max(values) - min(values) for values in ([row[r["variant"]] for r in rows] for row in tokens)]
    assert spread == sorted(spread, reverse=True)
    assert lake.snapshot().version == version, "the tape is only read"


def test_a_variant_does_not_see_what_the_one_before_it_did(recorded: Recorded, config: RunConfig) -> None:
    variants = variants_of(config.trainer, FIVE, CHANGES)
    forward, backward = (tried(recorded.lake(), config, *order) for order in (variants, variants[::-1]))
    for one, other in zip(forward.tried, backward.tried[::-1], strict=True):
        assert one.outcome is not None
        assert other.outcome is not None
        assert one.variant == other.variant
        assert one.outcome.loss_bits == other.outcome.loss_bits
        assert one.outcome.gradient_digests == other.outcome.gradient_digests


def test_options_are_told_apart_token_by_token(recorded: Recorded, config: RunConfig) -> None:
    changed = [*variants_of(config.trainer, (), {"": {"adv_norm": "mean"}})]
    found = tried(recorded.lake(), config, *changed)
    assert [one.variant.name for one in found.tried] == ["grpo, as recorded", "grpo"]
    first, second = (one.pull for one in found.tried)
    assert torch.allclose(second[first != 0] / first[first != 0], torch.tensor(0.5 / 0.70710578), atol=1e-5)
    assert found.rows()[1]["signs_flipped"] == 0
    place = found.token_rows(1)[0]
    assert {"trajectory_id", "segment", "position", "token_id"} <= place.keys()


def test_what_an_algorithm_refuses_is_said_and_the_others_go_on(
    recorded: Recorded, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = recorded.lake(without=["teacher_scored"])
    url = lake.location.url
    code = main(["replay", "--lake", url, "--batch", "batch", "--algorithm", "opd,compaction", "--tokens", "0"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert [row["variant"] for row in rows] == ["grpo, as recorded", "opd", "compaction"]
    assert "teacher_score_missing" in rows[1]["refused"]
    assert rows[1]["grad_norm"] is None
    assert rows[2]["grad_norm"] > 0
    with pytest.raises(ReplayError, match="no batch 'other'; expected one of its 1; the view batches lists"):
        try_variants(lake, trainer_job(config), "other", [])


def test_icepop_refuses_versions_that_it_does_not_start_from(tape: Tape, tmp_path: Path, config: RunConfig) -> None:
    started = {"config_json": config.to_json(), "model_name": config.model.name, "vocab_size": 16}
    recorded = Recorded(tape, tmp_path, version=3, **started)
    recorded.pin(BatchRules())
    variants = [Variant(name="grpo", config=config.trainer), *variants_of(config.trainer, ["dis"], {"dis": DIS})[1:]]
    grpo, dis = tried(recorded.lake(), config, *variants).tried
    assert grpo.refusal is not None
    assert "mixed_versions" in grpo.refusal
    assert dis.refusal is None


def test_settings_are_read_by_name_and_type() -> None:
    found = trainer_options(
        ["gamma=0.5", "dis.epsilon_low=0.3", 'freeze_critic=["attn"]', "dis.aggregation=token_mean"]
    )
    assert found == {
        "": {"gamma": 0.5, "freeze_critic": ("attn",)},
        "dis": {"epsilon_low": 0.3, "aggregation": "token_mean"},
    }
    for wrong, near in (("gamma", "gamma"), ("gama=1", "gamma"), ("dis.x=1", "adam_eps, adv_norm")):
        with pytest.raises(ConfigError, match=rf"--set {wrong}: expected .* with a field of \[trainer\], as {near}"):
            trainer_options([wrong])
    with pytest.raises(ConfigError, match=r"--set gamma=1.0: expected one value for gamma, got a second"):
        trainer_options(["gamma=0.5", "dis.gamma=0.1", "gamma=1.0"])
    with pytest.raises(ConfigError, match=r"trainer\.freeze_critic: expected a list, got 'attn'"):
        trainer_options(["freeze_critic=attn"])
    with pytest.raises(ConfigError, match=r"trainer\.gamma: expected float"):
        trainer_options(["gamma=much"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set=dis.epsilon_low=0.3"],
            "dis.epsilon_low: expected an option of an algorithm that is tried (grpo), got",
        ),
        (["--algorithm=grpo,compaction", "--set=trainer.gamma=1.0"], "that is tried (grpo, compaction), got one of"),
        (
            ["--set=algorithm=compaction"],
            "trainer.algorithm: expected it among the algorithms to try, got 'compaction'",
        ),
        (["--algorithm=compaction, compaction"], "algorithms: expected each once, got 'compaction' twice"),
        (["--algorithm=compaction,"], "expected one of grpo, dis, opd, mopd, sao, compaction, got ''"),
        (["--set=entropy_coef=much"], "trainer.entropy_coef: expected float, got 'much'"),
    ],
)
def test_what_the_command_cannot_take_is_refused_by_name(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code = main(["replay", "--lake", recorded.lake().location.url, "--batch", "batch", *arguments])
    printed = capsys.readouterr()
    assert code == 1
    assert message in printed.err
    assert not printed.out, "nothing was tried"


@pytest.mark.timeout(600)
def test_a_trained_batch_starts_from_the_weights_that_it_was_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 5 lies two steps behind the checkpoint of step 3; what the run did comes out to the bit."""
    made = small_config(num_steps=5)
    with TrainingRun(tmp_path / "run", config=made) as run:
        run.start()
        run.wait()
    step = RunHistory.read(run.lake, made.run_id).step(5)
    variants = variants_of(made.trainer, ["grpo", "dis", "compaction"], {"dis": DIS, "grpo": {"pop_value": "binary"}})
    found = try_variants(run.lake, trainer_job(made), step["batch_id"], variants)
    assert (found.step, found.from_step, found.differences) == (5, 3, ())
    recorded = found.tried[0].outcome
    assert recorded is not None
    assert recorded.loss_bits == step["loss_bits"]
    assert recorded.weights_digest == step["weights_digest"]
    assert not found.refused
    rows = found.rows()
    assert rows[0]["grad_norm"] == step["grad_norm"]
    norms = [row["grad_norm"] for row in rows]
    assert all(norm > 0 for norm in norms)
    assert len({norms[0], norms[2], norms[3]}) == 3
    # A batch may be named by its step.
    code = main(
        ["replay", "--lake", run.lake.location.url, "--step", "5", "--set", "pop_value=binary", "--tokens", "0"]
    )
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [row["loss"] for row in printed if "variant" in row] == [rows[0]["loss"], rows[1]["loss"]]
