"""What a step of each method writes on the tape, and logs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods import CONFIGS, DOMAINS, TEMPERATURE, batch, learner, scorers

from rolltape.schema.build import build_batch
from rolltape.trainers.assembly import BatchPlan
from rolltape.trainers.dis import dis_surrogate
from rolltape.trainers.members import Member
from rolltape.trainers.records import step_completed_fields, tokens_trained_columns
from rolltape.trainers.step import StepOutcome, train_step
from rolltape.trainers.summary import step_metrics

MEMBERS = tuple(
    Member(
        trajectory_id=f"t{member}",
        attempt=1,
        group_id=f"g{member // 3}",
        group_ordinal=member // 3,
        member=member % 3,
    )
    for member in range(6)
)


def step(name: str, **changes: Any) -> StepOutcome:
    config = dataclasses.replace(CONFIGS[name], **changes)
    return train_step(learner(config), batch(), config, step=1, temperature=TEMPERATURE, scorers=scorers())


def metrics(name: str, outcome: StepOutcome | None = None, **changes: Any) -> dict[str, float]:
    config = dataclasses.replace(CONFIGS[name], **changes)
    plan = BatchPlan(members=MEMBERS, dropped=())
    found = outcome or step(name, **changes)
    return step_metrics(batch(), plan, found, config, newest_version=0, component_means={})


APART = {
    "opd-task": {"task_advantages": "task_advantage", "teacher_gaps": "teacher_gap"},
    "opd-full": {"divergences": "divergence"},
    "grpo": {},
}


@pytest.mark.parametrize("name", APART)
def test_parts_of_an_advantage_are_on_the_tape_apart(name: str) -> None:
    outcome = step(name)
    columns = tokens_trained_columns(batch(), MEMBERS, outcome, batch_id="b", step=1)
    build_batch("tokens_trained", columns)
    extra = columns.keys() & {"task_advantages", "teacher_gaps", "divergences", "values", "value_targets"}
    assert extra == APART[name].keys()
    response = _response()
    for column, part in APART[name].items():
        np.testing.assert_array_equal(columns[column].flatten().to_numpy(), outcome.parts[part][response].numpy())


@pytest.mark.parametrize("name", ["sao", "compaction"])
def test_values_and_their_targets_are_on_the_tape(name: str) -> None:
    outcome = step(name)
    columns = tokens_trained_columns(batch(), MEMBERS, outcome, batch_id="b", step=1)
    build_batch("tokens_trained", columns)
    assert outcome.critic is not None
    flat = columns["values"].flatten().to_numpy()
    assert np.count_nonzero(flat) == int(batch().action_mask.sum())
    targets = columns["value_targets"].flatten().to_numpy()
    np.testing.assert_allclose(np.sort(targets), np.sort(outcome.critic.targets[_response()].numpy()), rtol=1e-6)


def _response() -> torch.Tensor:
    starts = (batch().cu_seqlens[:-1] + batch().context_lengths).tolist()
    return torch.cat([torch.arange(a, b) for a, b in zip(starts, batch().cu_seqlens[1:].tolist(), strict=True)])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_every_method_is_an_event(name: str) -> None:
    outcome = step(name)
    logged = metrics(name, outcome)
    fields = step_completed_fields(
        outcome,
        trainer_id="trainer",
        policy_id="actor",
        step=1,
        batch_id="b",
        batch_digest="d",
        version_in=0,
        version_out=1,
        checkpoint_digest=None,
        metrics=logged,
        duration_s=0.0,
    )
    build_batch("train_step_completed", {key: [value] for key, value in fields.items()})
    names = [entry["name"] for entry in fields["weight_digests"]]
    assert any(entry.startswith("critic/") for entry in names) == (outcome.critic is not None)
    assert {"trusted_frac", "entropy_mean", "mismatch_abs_mean", "loss", "grad_norm", "skip_step"} <= logged.keys()
    assert logged["action_tokens"] == int(batch().action_mask.sum())
    # Members whose tokens have rewards: theirs are in the mean.
    assert logged["reward_mean"] == pytest.approx((1.1 - 0.2 + 0.5 + 1.0 + 0.25 + 0.3) / 6)


def test_dis_logs_what_its_own_gate_rejects_and_the_surrogate() -> None:
    outcome, config = step("dis"), CONFIGS["dis"]
    logged = metrics("dis", outcome)
    action = batch().action_mask
    current, rollout = outcome.current_log_probs[action], batch().rollout_log_probs[action]
    ratio = (current - rollout).exp()
    assert logged["dis_reject_frac_low"] == pytest.approx(float((ratio <= 0.75).double().mean()))
    assert logged["dis_reject_frac_high"] == pytest.approx(float((ratio >= 1.4).double().mean()))
    assert 0 < logged["dis_reject_frac_low"] < 1
    weights = torch.full_like(current, 1.0 / len(current))
    surrogate = dis_surrogate(
        current, rollout, outcome.advantages[action], weights, eps_low=config.epsilon_low, eps_high=config.epsilon_high
    )
    assert logged["dis_surrogate"] == pytest.approx(float(surrogate), abs=1e-6)


def test_distillation_reports_each_domain() -> None:
    outcome = step("mopd", max_gap=0.1)
    logged = metrics("mopd", outcome, max_gap=0.1)
    teacher = batch().teacher
    assert teacher is not None
    tokens = 0
    for domain in ("a", "b"):
        own = torch.tensor([name == domain for name in DOMAINS])[batch().row_member][batch().row_of_token()]
        gap = (teacher.log_probs - outcome.current_log_probs)[own & batch().action_mask]
        known = gap[gap.isfinite()]
        assert logged[f"domain/{domain}/kl"] == pytest.approx(-float(known.mean()), abs=1e-6)
        assert logged[f"domain/{domain}/gap_abs"] == pytest.approx(float(known.clamp(-0.1, 0.1).abs().mean()), abs=1e-6)
        assert logged[f"domain/{domain}/clip_share"] == pytest.approx(float((known.abs() > 0.1).double().mean()))
        assert logged[f"domain/{domain}/tokens"] == len(gap)
        tokens += len(gap)
    assert tokens == logged["action_tokens"]
    assert logged["teacher_kl_current"] == logged["teacher_kl_old"]
    assert metrics("opd-task")["task_advantage_abs_mean"] > 0
    assert metrics("opd-full")["domain/a/divergence"] > 0


def test_a_critic_logs_its_loss_and_what_it_explains() -> None:
    outcome = step("sao")
    logged = metrics("sao", outcome)
    critic, action = outcome.critic, batch().action_mask
    assert critic is not None
    errors = (critic.values.double() - critic.targets)[action]
    assert logged["value_loss"] == pytest.approx(float(errors.square().mean()), abs=1e-6)
    explained = 1.0 - float(errors.var(correction=0) / critic.targets[action].var(correction=0))
    assert logged["explained_variance"] == pytest.approx(explained, abs=1e-6)
    assert (logged["critic_steps"], logged["actor_steps"]) == (2.0, 1.0)
    in_warmup = metrics("sao", critic_warmup_steps=1)
    assert (in_warmup["critic_steps"], in_warmup["actor_steps"], in_warmup["skip_step"]) == (2.0, 0.0, 0.0)
    constant = dataclasses.replace(outcome, critic=dataclasses.replace(critic, explained_variance=None))
    assert math.isnan(metrics("sao", constant)["explained_variance"])


def test_compaction_logs_its_segments() -> None:
    logged = metrics("compaction")
    assert logged["compactions_mean"] == pytest.approx(2 / 6)
    assert logged["summary_tokens_mean"] == pytest.approx(2.5)
    assert logged["trainable_tokens/execution"] == 26
    assert logged["trainable_tokens/summary"] == 5
    assert logged["overlong_frac"] == pytest.approx(2 / 6)
    assert logged["reward_mean/compacted"] == pytest.approx((-0.2 + 0.25) / 2)
    assert logged["reward_mean/single_window"] == pytest.approx((1.1 + 0.5 + 1.0 + 0.3) / 4)
    without = metrics("compaction", train_summary=False)
    assert without["trainable_tokens/summary"] == 0
    assert without["action_tokens"] == 26
