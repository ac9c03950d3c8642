"""One optimizer step: nothing depends on how the batch is cut, and nothing moves where nothing is learnt."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltape.numerics.models import build_model
from rolltape.numerics.packed import packed_log_probs
from rolltape.numerics.weights import load_weights, named_weights
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.step import StepOutcome, train_step

CONTEXTS = (3, 2, 4, 1, 3, 2)
RESPONSES = (4, 1, 6, 3, 2, 5)
CONFIG = TrainerConfig(max_grad_norm=1e9, entropy_coef=0.01, token_budget=1000, icepop_beta=1.3)


@cache
def batch() -> PackedBatch:
    """Six rows in two groups; recorded log-probs near the model's own, so that a gate takes some and rejects some."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(CONTEXTS) + torch.tensor(RESPONSES)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(3, 16, (int(bounds[-1]),), generator=generator, dtype=torch.int32)
    action = torch.cat([torch.arange(a + b) >= a for a, b in zip(CONTEXTS, RESPONSES, strict=True)])
    action[4] = False  # an observation inside a response
    with torch.no_grad():
        own = packed_log_probs(build_model("char-64x2", 1), ids, bounds, token_budget=1000).log_probs
    noise = 0.3 * torch.randn(len(ids), generator=generator)
    return PackedBatch(
        token_ids=ids,
        cu_seqlens=bounds,
        context_lengths=torch.tensor(CONTEXTS),
        action_mask=action,
        rollout_log_probs=torch.where(action, own + noise, 0.0).clamp(max=0.0),
        policy_versions=torch.where(action, 0, -1).int(),
        row_member=torch.arange(6),
        rewards=torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0], dtype=torch.float64),
        groups=torch.tensor([0, 0, 0, 1, 1, 1]),
        is_padding=torch.zeros(6, dtype=torch.bool),
    )


def step(config: TrainerConfig = CONFIG, on: PackedBatch | None = None) -> tuple[StepOutcome, dict[str, Tensor]]:
    """Outcome of a first step, and the gradients that it used."""
    model = build_model("char-64x2", 1)
    outcome = train_step(Learner(model, make_optimizer(model, config)), on or batch(), config, temperature=1.0, step=1)
    return outcome, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reordered(order: list[int]) -> PackedBatch:
    """The same batch with its rows (and members) in another order."""
    whole = batch()
    bounds = whole.cu_seqlens.tolist()
    index = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in order])
    lengths = whole.cu_seqlens.diff()[order]
    changes: dict[str, Any] = {
        name: getattr(whole, name)[index]
        for name in ("token_ids", "action_mask", "rollout_log_probs", "policy_versions")
    }
    changes["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for name in ("context_lengths", "rewards", "groups"):
        changes[name] = getattr(whole, name)[order]
    return dataclasses.replace(whole, **changes)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def test_the_batch_is_mixed() -> None:
    outcome, _ = step()
    action = batch().action_mask
    assert 0 < int(outcome.trusted.sum()) < int(action.sum())
    assert not outcome.trusted[~action].any()
    assert outcome.advantages[~action].abs().sum() == 0
    assert outcome.grad_norm > 0


@pytest.mark.parametrize("token_budget", [1, 10, 16])
def test_micro_batches_and_padding_do_not_matter(token_budget: int) -> None:
    whole, expected = step()
    outcome, gradients = step(dataclasses.replace(CONFIG, token_budget=token_budget))
    assert len(outcome.micro_batches) > 1
    assert outcome.loss == pytest.approx(whole.loss, abs=1e-6)
    assert outcome.grad_norm == pytest.approx(whole.grad_norm, abs=1e-6)
    assert torch.equal(outcome.trusted, whole.trusted)
    assert_same(gradients, expected)


def test_row_order_does_not_matter() -> None:
    whole, expected = step()
    outcome, gradients = step(on=reordered([5, 2, 0, 4, 1, 3]))
    assert outcome.loss == pytest.approx(whole.loss, abs=1e-6)
    assert_same(gradients, expected)


def test_the_same_step_has_the_same_bits() -> None:
    first, _ = step()
    second, _ = step()
    assert first.loss_bits == second.loss_bits
    assert first.gradient_digests == second.gradient_digests
    assert first.weight_digests == second.weight_digests


def test_observations_and_contexts_are_not_trained() -> None:
    """Recorded values at tokens other than actions change nothing."""
    poisoned = torch.where(batch().action_mask, batch().rollout_log_probs, float("nan"))
    outcome, _ = step(on=dataclasses.replace(batch(), rollout_log_probs=poisoned))
    assert outcome.weight_digests == step()[0].weight_digests


def test_loss_is_the_formula() -> None:
    """Against the formula written out over padded rows, in float64."""
    outcome, _ = step(dataclasses.replace(CONFIG, entropy_coef=0.0))
    whole = batch()
    total = 0.0
    rows = [row for row in range(6) if bool(whole.action_mask[whole.cu_seqlens[row] : whole.cu_seqlens[row + 1]].any())]
    for row in rows:
        index = torch.arange(int(whole.cu_seqlens[row]), int(whole.cu_seqlens[row + 1]))
        index = index[whole.action_mask[index]]
        rewards = whole.rewards[whole.groups == whole.groups[row]]
        advantage = (whole.rewards[row] - rewards.mean()) / (rewards.std(correction=1) + 1e-6)
        rho = torch.exp(outcome.old_log_probs[index].double() - whole.rollout_log_probs[index].double())
        weight = torch.where((rho >= 1 / 1.3) & (rho <= 1.3), rho, 0.0)
        total += float((-weight * advantage).mean()) / len(rows)
    assert outcome.loss == pytest.approx(total, abs=1e-6)


def test_several_updates_keep_the_gate_of_the_first() -> None:
    once, _ = step()
    twice, _ = step(dataclasses.replace(CONFIG, updates_per_batch=2, lr=1e-2))
    torch.testing.assert_close(twice.old_log_probs, once.old_log_probs, atol=1e-6, rtol=0)
    assert torch.equal(twice.trusted, once.trusted)
    torch.testing.assert_close(twice.gate_weights, once.gate_weights, atol=1e-5, rtol=0)
    assert not torch.equal(twice.current_log_probs, twice.old_log_probs)
    assert twice.weights_digest != once.weights_digest


def test_a_batch_without_a_trusted_token_moves_nothing() -> None:
    far = torch.where(batch().action_mask, -50.0, 0.0)
    model = build_model("char-64x2", 1)
    config = dataclasses.replace(CONFIG, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    outcome = train_step(
        Learner(model, optimizer),
        dataclasses.replace(batch(), rollout_log_probs=far),
        config,
        temperature=1.0,
        step=1,
    )
    assert outcome.skipped
    assert outcome.loss == 0.0
    assert not optimizer.state
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_second_step_starts_from_no_gradient() -> None:
    model = build_model("char-64x2", 1)
    optimizer = make_optimizer(model, CONFIG)
    train_step(Learner(model, optimizer), batch(), CONFIG, temperature=1.0, step=1)
    fresh = build_model("char-64x2", 2)
    load_weights(fresh, named_weights(model))
    second = train_step(Learner(model, optimizer), batch(), CONFIG, temperature=1.0, step=2)
    alone = train_step(Learner(fresh, make_optimizer(fresh, CONFIG)), batch(), CONFIG, temperature=1.0, step=2)
    assert second.gradient_digests == alone.gradient_digests
    assert second.loss_bits == alone.loss_bits


def test_gradients_are_clipped_by_their_global_norm() -> None:
    free, expected = step()
    bound = free.grad_norm / 3
    clipped, gradients = step(dataclasses.replace(CONFIG, max_grad_norm=bound))
    assert clipped.grad_norm == free.grad_norm
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert float(norm) == pytest.approx(bound, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name] / 3, atol=1e-7, rtol=1e-4)
    # The digests are of what was computed, before clipping.
    assert clipped.gradient_digests == free.gradient_digests


def test_dis_gates_the_ratio_to_the_version_that_sampled() -> None:
    """The gate is open between its bounds, and a token outside gives neither loss nor gradient."""
    config = CONFIG.with_algorithm("dis", epsilon_low=0.2, epsilon_high=0.25, adv_norm="mean_std")
    outcome, gradients = step(config)
    action = batch().action_mask
    ratio = (outcome.current_log_probs - batch().rollout_log_probs)[action].exp()
    inside = (ratio > 0.8) & (ratio < 1.25)
    assert 0 < int(inside.sum()) < len(ratio)
    assert torch.equal(outcome.trusted[action], inside)
    torch.testing.assert_close(outcome.gate_weights[action], torch.where(inside, ratio, 0.0))
    cut, cut_gradients = step(dataclasses.replace(config, token_budget=12))
    assert len(cut.micro_batches) > 1
    assert cut.loss == pytest.approx(outcome.loss, abs=1e-6)
    assert_same(cut_gradients, gradients)
