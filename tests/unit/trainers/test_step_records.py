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
from rolltape.trainers.members import Dropped, Member
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
    return step_metrics(batch(), plan, found, config, newest_version=0, component_metrics={})


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


_ICEPOP, _OPEN = (1 / 1.3, 1.3), (0.75, 1.4)
KEPT = {
    **dict.fromkeys(("grpo", "opd", "opd-task", "mopd"), _ICEPOP),
    **dict.fromkeys(("dis", "sao", "compaction-dis"), _OPEN),
    "opd-score": (0.7, 1.3),
}
"""Ratios that each method's gate keeps; in the first update the current log-probs are the old ones."""


@pytest.mark.parametrize("name", CONFIGS)
def test_rejected_shares_are_those_of_the_methods_own_gate(name: str) -> None:
    """A method without a gate rejects nothing, however far the two engines are apart (§2.6)."""
    outcome = step(name)
    logged = metrics(name, outcome)
    action = batch().action_mask
    ratio = (outcome.current_log_probs - batch().rollout_log_probs)[action].exp()
    low, high = KEPT.get(name, (0.0, math.inf))
    assert logged["gate_reject_frac_low"] == pytest.approx(float((ratio < low).double().mean()))
    assert logged["gate_reject_frac_high"] == pytest.approx(float((ratio > high).double().mean()))
    assert (logged["gate_reject_frac_low"] > 0) == (name in KEPT)
    assert (logged["clip_frac_low"], logged["clip_frac_high"]) == (0.0, 0.0), "the first update clips nothing"


def test_a_gate_that_clamps_is_no_gate_that_rejects() -> None:
    logged = metrics("grpo", correction="tis", tis_low=0.9, tis_high=1.1)
    assert 0 < logged["tis_clip_frac_low"] < 1
    assert 0 < logged["tis_clip_frac_high"] < 1
    assert "gate_reject_frac_low" not in logged


@pytest.mark.parametrize("name", ["dis", "opd-score", "grpo"])
def test_only_a_clip_is_logged_as_one(name: str) -> None:
    """In a later update the policy has moved; DIS and the score function never clip it."""
    logged = metrics(name, updates_per_batch=2, lr=0.05, epsilon_low=0.05, epsilon_high=0.05)
    assert (logged["clip_frac_low"] + logged["clip_frac_high"] > 0) == (name == "grpo")


def test_advantages_of_members_are_logged_where_there_are_groups() -> None:
    assert metrics("grpo")["advantage_std"] > 0
    assert not {"advantage_mean", "advantage_std", "advantage_max", "zero_std_groups"} & metrics("sao").keys()
    assert metrics("sao")["token_advantage_std"] > 0


def test_groups_without_spread_are_counted() -> None:
    """Case D13: those that are kept show in the log; rounding alone is no spread."""
    equal = dataclasses.replace(
        batch(), rewards=torch.tensor([0.1 + 0.2, 0.3, 0.3, 1.0, 0.25, 0.0], dtype=torch.float64)
    )
    outcome = train_step(learner(CONFIGS["grpo"]), equal, CONFIGS["grpo"], step=1, temperature=TEMPERATURE)
    plan = BatchPlan(members=MEMBERS, dropped=())
    logged = step_metrics(equal, plan, outcome, CONFIGS["grpo"], newest_version=0, component_metrics={})
    assert (logged["zero_std_groups"], logged["num_groups"]) == (1.0, 2.0)
    assert metrics("grpo")["zero_std_groups"] == 0.0


def test_padding_and_lost_groups_are_logged() -> None:
    """§2.6, §4.6: copies change the baseline and the tokens' weights, so their share is told."""
    outcome = step("grpo")
    is_padding = torch.tensor([False, False, True, False, False, False])
    members = tuple(m._replace(is_padding=bool(p)) for m, p in zip(MEMBERS, is_padding, strict=True))
    lost = [Dropped(trajectory_id=f"l{n}", attempt=1, group_id=f"g{n}", reason="stale") for n in (1, 8, 8, 9)]
    logged = step_metrics(
        dataclasses.replace(batch(), is_padding=is_padding),
        BatchPlan(members=members, dropped=tuple(lost)),
        outcome,
        CONFIGS["grpo"],
        newest_version=0,
        component_metrics={},
    )
    own = batch().row_member[batch().row_of_token()][batch().action_mask] == 2
    assert logged["padded_token_frac"] == pytest.approx(float(own.double().mean()))
    assert (logged["padded_groups"], logged["padded_members"], logged["dropped_groups"]) == (1.0, 1.0, 2.0)
    assert logged["overlong_frac"] == pytest.approx(2 / 6), "of every method, not of compaction alone"


def test_dis_logs_what_its_own_gate_rejects_and_the_surrogate() -> None:
    outcome, config = step("dis"), CONFIGS["dis"]
    logged = metrics("dis", outcome)
    action = batch().action_mask
    current, rollout = outcome.current_log_probs[action], batch().rollout_log_probs[action]
    ratio = (current - rollout).exp()
    assert logged["gate_reject_frac_low"] == pytest.approx(float((ratio <= 0.75).double().mean()))
    assert logged["gate_reject_frac_high"] == pytest.approx(float((ratio >= 1.4).double().mean()))
    assert 0 < logged["gate_reject_frac_low"] < 1
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
