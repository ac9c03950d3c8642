"""Numbers of algorithms.md §4.11: skip-observation GAE, λ by length, critic targets, whitening, normaliser."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.trainers.critic import ValueNormaliser, explained_variance, value_loss
from rolltape.trainers.gae import (
    credited_rewards,
    generalised_advantages,
    lambda_by_length,
    value_targets,
    whitened,
)
from rolltape.trainers.gates import no_gate
from rolltape.trainers.losses import clipped_policy_loss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


IS_ACTION = torch.tensor([True, True, False, False, True, True])
ALL_VALUES = f64(0.2, 0.3, 9, -9, 0.5, 0.6)
POSITIONS = torch.nonzero(IS_ACTION).flatten()
ROWS = torch.zeros(4, dtype=torch.int64)
VALUES = ALL_VALUES[IS_ACTION]
REWARDS = credited_rewards(f64(0.1, 1.0), torch.tensor([0, 0]), torch.tensor([1, 5]), ROWS, POSITIONS)


def test_rewards_are_credited_to_their_action_tokens() -> None:
    assert REWARDS.tolist() == [0, 0.1, 0, 1.0]


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 1 - 1 / 6, (0.650926, 0.661111, 0.433333, 0.400000)),
        (1.0, 0.9, (0.7426, 0.7140, 0.46, 0.40)),
        (0.99, 0.95, (0.790358, 0.737223, 0.4702, 0.4)),
    ],
)
def test_advantages_skip_observations(gamma: float, lam: float, expected: tuple[float, ...]) -> None:
    found = generalised_advantages(VALUES, REWARDS, ROWS, gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_observations_as_tokens_would_give_other_advantages() -> None:
    """What is avoided: the same function over all six tokens, observations among them."""
    rows = torch.zeros(6, dtype=torch.int64)
    found = generalised_advantages(ALL_VALUES, f64(0, 0.1, 0, 0, 0, 1.0), rows, gamma=1.0, lam=1 - 1 / 6)
    assert found.tolist() == pytest.approx((0.639995, 0.647994, -9.782407, 9.861111, 0.433333, 0.4), abs=1e-6)


def test_lambda_by_length() -> None:
    found = lambda_by_length(torch.tensor([1, 4, 100, 1000]))
    assert found.tolist() == pytest.approx((0.333333, 0.833333, 0.993333, 0.999333), abs=1e-6)


def test_targets_and_value_loss() -> None:
    targets = value_targets(VALUES, REWARDS, ROWS, gamma=1.0)
    assert targets.tolist() == pytest.approx((1.1, 1.1, 1.0, 1.0), abs=1e-6)
    values = VALUES.clone().requires_grad_()
    result = value_loss(values, targets, torch.full((4,), 0.25))
    assert result.loss.item() == pytest.approx(0.465, abs=1e-6)
    (gradient,) = torch.autograd.grad(result.loss, values)
    assert gradient.tolist() == pytest.approx((-0.45, -0.4, -0.25, -0.2), abs=1e-6)


def test_whitened() -> None:
    advantages = generalised_advantages(VALUES, REWARDS, ROWS, gamma=1.0, lam=1 - 1 / 6)
    assert whitened(advantages).tolist() == pytest.approx((0.824812, 0.898129, -0.741498, -0.981443), abs=1e-6)


def test_explained_variance() -> None:
    assert explained_variance(VALUES, f64(0, 0, 1, 1)) == pytest.approx(0.5, abs=1e-6)


def test_normaliser_preserves_values() -> None:
    old, new = ValueNormaliser(mean=0.5, std=0.5), ValueNormaliser(mean=0.6, std=0.4)
    weight, bias, hidden = f64(2.0), f64(0.1), f64(0.3)
    assert (weight * hidden + bias).item() == pytest.approx(0.7)
    assert old.value(weight * hidden + bias).item() == pytest.approx(0.85)
    new_weight, new_bias = old.rescaled_head(weight, bias, new)
    assert (new_weight.item(), new_bias.item()) == pytest.approx((2.5, -0.125))
    assert (new_weight * hidden + new_bias).item() == pytest.approx(0.625)
    assert new.value(new_weight * hidden + new_bias).item() == pytest.approx(0.85)
    assert new.target(f64(0.85)).item() == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("ratio", "dual_clip", "loss", "slope"), [(2.0, 3.0, 2.0, 2.0), (5.0, 3.0, 3.0, 0.0), (5.0, None, 5.0, 5.0)]
)
def test_dual_clip_is_an_option_of_ppo(ratio: float, dual_clip: float | None, loss: float, slope: float) -> None:
    old = f64(-2.0)
    current = (old + f64(ratio).log()).requires_grad_()
    result = clipped_policy_loss(
        current, old, no_gate(f64(1.0)), f64(-1.0), f64(1.0), eps_low=0.2, eps_high=0.28, dual_clip=dual_clip
    )
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert torch.autograd.grad(result.loss, current)[0].tolist() == pytest.approx([slope], abs=1e-6)
