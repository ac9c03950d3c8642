"""Properties 1 and 2 of algorithms.md §6 through a step of every method, and through every public loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods import CONFIGS, TEMPERATURE, batch, gradients, learner, reordered, scorers
from torch import Tensor

from rolltape.trainers.compaction import compaction_policy_loss
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.dis import dis_policy_loss
from rolltape.trainers.distill import divergence_policy_loss, opd_policy_loss
from rolltape.trainers.losses import PolicyLoss, icepop_policy_loss
from rolltape.trainers.reverse_kl import TokenDivergence
from rolltape.trainers.step import StepOutcome, train_step

BAD: Final = (math.nan, math.inf, -math.inf, 1.0, -9999.0)


def step(config: TrainerConfig, rows: list[int], members: list[int]) -> tuple[StepOutcome, dict[str, Tensor]]:
    made = learner(config)
    on = reordered(batch(), rows, members)
    outcome = train_step(made, on, config, step=1, temperature=TEMPERATURE, scorers=scorers())
    return outcome, gradients(made)


def config_of(name: str, token_budget: int = 1000) -> TrainerConfig:
    """With a critic's usual two updates, at its usual rate."""
    return dataclasses.replace(CONFIGS[name], token_budget=token_budget, critic_lr=TrainerConfig().critic_lr)


@cache
def whole(name: str) -> tuple[StepOutcome, dict[str, Tensor]]:
    return step(config_of(name), list(range(10)), list(range(6)))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=4, deadline=None)
@given(
    token_budget=st.integers(1, 60),
    rows=st.permutations(range(10)),
    members=st.permutations(range(6)),
)
def test_a_step_does_not_see_how_its_batch_is_cut_and_ordered(
    name: str, token_budget: int, rows: list[int], members: list[int]
) -> None:
    outcome, found = step(config_of(name, token_budget), rows, members)
    expected, expected_gradients = whole(name)
    assert outcome.loss == pytest.approx(expected.loss, abs=1e-6)
    assert outcome.grad_norm == pytest.approx(expected.grad_norm, abs=1e-6)
    assert found.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(found[key], gradient, atol=1e-6, rtol=1e-5)
    assert (outcome.critic is None) == (expected.critic is None)
    if outcome.critic is not None and expected.critic is not None:
        assert outcome.critic.num_updates == 2
        assert outcome.critic.losses == pytest.approx(expected.critic.losses, abs=1e-6)


def _divergence(current: Tensor, old: Tensor, rollout: Tensor, advantage: Tensor, weights: Tensor) -> PolicyLoss:
    del old
    is_number = torch.isfinite(advantage)
    values = torch.where(is_number, current.square() * torch.where(is_number, advantage, 0.0), advantage)
    found = TokenDivergence(divergence=values, trusted=torch.ones_like(is_number))
    return divergence_policy_loss(current, found, weights, rollout_logp=rollout)


LOSSES: Final[dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], PolicyLoss]]] = {
    "icepop": icepop_policy_loss,
    "binary": lambda *tensors: icepop_policy_loss(*tensors, pop_value="binary"),
    "tis": lambda *tensors: icepop_policy_loss(*tensors, correction="tis"),
    "dis": lambda current, _, *tensors: dis_policy_loss(current, *tensors, eps_low=0.3, eps_high=1.0),
    "opd": opd_policy_loss,
    "opd score": lambda *tensors: opd_policy_loss(*tensors, form="score", score_low=0.5, score_high=2.0),
    "opd divergence": _divergence,
    "compaction": compaction_policy_loss,
    "compaction dis": lambda *tensors: compaction_policy_loss(*tensors, ratio="dis", eps_low=0.3, eps_high=1.0),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 10),
    seed=st.integers(0, 2**31),
    recorded=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(BAD)), max_size=4),
    advantages=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(BAD[:3])), max_size=3),
)
def test_untrusted_tokens_have_neither_loss_nor_gradient(
    name: str, count: int, seed: int, recorded: list[tuple[int, float]], advantages: list[tuple[int, float]]
) -> None:
    """Whatever is wrong with them; the others have the gradient that they have without them."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, count, dtype=torch.float64, generator=generator)
    rollout = -parts[0].abs() - 0.01
    old, advantage = rollout + 0.4 * parts[1], parts[2]
    current = (old + 0.1 * parts[3]).requires_grad_()
    weights = torch.full((count,), 1.0 / count)
    clean = torch.autograd.grad(LOSSES[name](current, old, rollout, advantage, weights).loss, current)[0]
    damaged_rollout, damaged_advantage = rollout.clone(), advantage.clone()
    is_bad = torch.zeros(count, dtype=torch.bool)
    for values, damage in ((damaged_rollout, recorded), (damaged_advantage, advantages)):
        for place, value in damage:
            values[place % count], is_bad[place % count] = value, True
    result = LOSSES[name](current, old, damaged_rollout, damaged_advantage, weights)
    gradient = torch.autograd.grad(result.loss, current)[0]
    assert not result.trusted[is_bad].any()
    assert math.isfinite(result.loss.item())
    assert torch.equal(gradient, torch.where(is_bad, 0.0, clean))
    assert gradient[~result.trusted].abs().sum() == 0
    assert result.token_losses[~result.trusted].abs().sum() == 0
