"""Numbers of algorithms.md §4.12, and of D16: CompactionRL's corrected advantages and its loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.trainers.aggregation import aggregation_weights
from rolltape.trainers.compaction import (
    compaction_advantages,
    compaction_policy_loss,
    compaction_value_targets,
    tokens_after,
)
from rolltape.trainers.gae import generalised_advantages, lambda_by_length, terminal_rewards
from rolltape.trainers.safe_math import weighted_sum


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


VALUES = f64(0.2, 0.3, 0.4, 0.5, 0.7)
ROWS = torch.tensor([0, 0, 1, 2, 2])
ROLLOUTS = torch.zeros(3, dtype=torch.int64)
SEGMENTS = torch.arange(3)
REWARDS = torch.ones(3, dtype=torch.float64)
CORRECTED = (0.532170, 0.510300, 0.486000, 0.470000, 0.300000)


def corrected(values: Tensor, lam: float | Tensor) -> list[float]:
    found = compaction_advantages(
        values, REWARDS, ROWS, rollout_of_row=ROLLOUTS, segment_index=SEGMENTS, gamma=1.0, lam=lam
    )
    result: list[float] = found.tolist()
    return result


def test_tokens_after_each_segment() -> None:
    assert tokens_after(ROWS, ROLLOUTS, SEGMENTS).tolist() == [3, 2, 0]


def test_local_advantages() -> None:
    local = generalised_advantages(VALUES, terminal_rewards(REWARDS, ROWS), ROWS, gamma=1.0, lam=0.9)
    assert local.tolist() == pytest.approx((0.73, 0.70, 0.60, 0.47, 0.30), abs=1e-6)


def test_corrected_and_stitched() -> None:
    assert corrected(VALUES, 0.9) == pytest.approx(CORRECTED, abs=1e-6)
    one_row = torch.zeros(5, dtype=torch.int64)
    stitched = generalised_advantages(VALUES, terminal_rewards(REWARDS[:1], one_row), one_row, gamma=1.0, lam=0.9)
    assert stitched.tolist() == pytest.approx((0.613630, 0.570700, 0.523000, 0.47, 0.30), abs=1e-6)


def test_without_values_corrected_is_stitched() -> None:
    assert corrected(torch.zeros_like(VALUES), 0.9) == pytest.approx((0.6561, 0.729, 0.81, 0.9, 1.0), abs=1e-12)


def test_lambda_of_the_rollout() -> None:
    lam = lambda_by_length(torch.tensor([5, 5, 5]))
    assert lam.tolist() == pytest.approx([0.866667] * 3, abs=1e-6)
    assert corrected(VALUES, lam) == pytest.approx((0.460014, 0.455674, 0.450667, 0.46, 0.30), abs=1e-6)


def test_lambda_of_the_segment_would_lose_the_reward() -> None:
    """What is refused (D16): local and multiplier with a λ of each segment."""
    lam = lambda_by_length(torch.bincount(ROWS))
    local = generalised_advantages(VALUES, terminal_rewards(REWARDS, ROWS), ROWS, gamma=1.0, lam=lam)
    found = lam.pow(tokens_after(ROWS, ROLLOUTS, SEGMENTS))[ROWS] * local
    assert found.tolist() == pytest.approx((0.167901, 0.207407, 0.066667, 0.40, 0.30), abs=1e-6)


def test_multiplier_of_a_long_rollout() -> None:
    """D16: 20,000 tokens after a segment of 2,000."""
    whole, segment = lambda_by_length(torch.tensor([22_000, 2_000])).pow(20_000).tolist()
    assert whole == pytest.approx(0.5455, abs=5e-5)
    assert segment == pytest.approx(0.0013, abs=5e-5)


def test_second_published_case() -> None:
    rows, values = torch.tensor([0, 0, 1]), f64(0.2, 0.4, 0.6)
    found = compaction_advantages(
        values,
        REWARDS[:2],
        rows,
        rollout_of_row=ROLLOUTS[:2],
        segment_index=SEGMENTS[:2],
        gamma=1.0,
        lam=0.8,
    )
    assert found.tolist() == pytest.approx((0.544, 0.480, 0.400), abs=1e-6)
    one_row = torch.zeros(3, dtype=torch.int64)
    stitched = generalised_advantages(values, f64(0, 0, 1), one_row, gamma=1.0, lam=0.8)
    assert stitched.tolist() == pytest.approx((0.616, 0.520, 0.400), abs=1e-6)


def test_ppo_loss_with_corrected_advantages() -> None:
    old = f64(-0.5, -1.0, -1.5, -0.7, -0.2)
    ratio = f64(1.0, 1.3, 0.7, 1.1, 1.0)
    current = (old + ratio.log()).requires_grad_()
    weights = aggregation_weights(ROWS, mode="token_mean", num_rows=3)
    result = compaction_policy_loss(current, old, old, f64(*CORRECTED), weights)
    assert result.token_losses.tolist() == pytest.approx((-0.53217, -0.61236, -0.34020, -0.51700, -0.30000), abs=1e-6)
    assert result.loss.item() == pytest.approx(-0.460346, abs=1e-6)
    (gradient,) = torch.autograd.grad(result.loss, current)
    assert gradient.tolist() == pytest.approx((-0.106434, 0, -0.06804, -0.1034, -0.06), abs=1e-6)
    by_segment = aggregation_weights(ROWS, mode="seq_mean", num_rows=3)
    assert weighted_sum(result.token_losses, by_segment).item() == pytest.approx(-0.440322, abs=1e-6)


def test_dis_loss_with_corrected_advantages() -> None:
    """The option ``ratio="dis"``: coefficient r A / N inside the open interval."""
    rollout = f64(-0.5, -1.0, -1.5, -0.7, -0.2)
    current = (rollout + f64(1.0, 1.3, 0.7, 1.1, 1.0).log()).requires_grad_()
    weights = torch.full((5,), 0.2)
    result = compaction_policy_loss(current, current.detach(), rollout, f64(*CORRECTED), weights, ratio="dis")
    (gradient,) = torch.autograd.grad(result.loss, current)
    assert gradient.tolist() == pytest.approx((-0.106434, 0, 0, -0.1034, -0.06), abs=1e-6)


def test_critic_targets() -> None:
    after = tokens_after(ROWS, ROLLOUTS, SEGMENTS)
    assert compaction_value_targets(REWARDS, ROWS, after, gamma=1.0).tolist() == [1.0] * 5
    found = compaction_value_targets(REWARDS, ROWS, after, gamma=0.9)
    assert found.tolist() == pytest.approx((0.6561, 0.729, 0.81, 0.9, 1.0), abs=1e-12)
