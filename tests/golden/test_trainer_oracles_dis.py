"""The worked example of algorithms.md §4.4: values and gradients of DIS, and of the forms that it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.trainers.aggregation import aggregation_weights
from rolltape.trainers.dis import dis_policy_loss, dis_surrogate, score_policy_loss
from rolltape.trainers.gates import dis_gate, no_gate
from rolltape.trainers.losses import clipped_policy_loss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ROLLOUT = f64(-0.5, -1.5, -2.0, -0.7, -1.0)
RATIO = f64(1.1, 0.9, 1.8, 0.3, 1.0)
ADVANTAGE = f64(0.5, 0.5, 0.5, -0.5, -0.5)
WEIGHTS = aggregation_weights(torch.zeros(5, dtype=torch.int64), mode="token_mean", num_rows=1)
GRADIENT = (-0.11, -0.09, 0, 0, 0.10)


def current_logp() -> Tensor:
    return (ROLLOUT + RATIO.log()).requires_grad_()


def gradient(loss: Tensor, current: Tensor) -> list[float]:
    found: list[float] = torch.autograd.grad(loss, current)[0].tolist()
    return found


def test_current_log_probs_of_the_table() -> None:
    assert current_logp().tolist() == pytest.approx((-0.404690, -1.605361, -1.412213, -1.903973, -1.0), abs=1e-6)


def test_detached_form() -> None:
    current = current_logp()
    result = dis_policy_loss(current, ROLLOUT, ADVANTAGE, WEIGHTS, eps_low=0.2, eps_high=0.28)
    assert result.loss.item() == pytest.approx(0.088998, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx(GRADIENT, abs=1e-6)
    assert result.trusted.tolist() == [True, True, False, False, True]
    assert result.gate.low.double().mean().item() == pytest.approx(1 / 5)
    assert result.gate.high.double().mean().item() == pytest.approx(1 / 5)
    assert result.policy_ratio.tolist() == pytest.approx([1.1, 0.9, 1.0, 1.0, 1.0])
    assert not (result.clip_low | result.clip_high).any()


def test_surrogate_has_another_value_and_the_same_gradient() -> None:
    current = current_logp()
    surrogate = dis_surrogate(current, ROLLOUT, ADVANTAGE, WEIGHTS, eps_low=0.2, eps_high=0.28)
    assert surrogate.item() == pytest.approx(-0.1, abs=1e-6)
    assert gradient(surrogate, current) == pytest.approx(GRADIENT, abs=1e-6)


def test_without_the_detach_only_the_gradient_would_differ() -> None:
    """The form that the loss must not have: same value, wrong sign at token 2, nothing at token 5."""
    current = current_logp()
    kept = dis_gate(RATIO, 0.2, 0.28).trusted
    loss = -(WEIGHTS.double() * torch.where(kept, (current - ROLLOUT).exp(), 0.0) * ADVANTAGE * current).sum()
    assert loss.item() == pytest.approx(0.088998, abs=1e-6)
    assert gradient(loss, current) == pytest.approx((-0.065484, 0.054482, 0, 0, 0.0), abs=1e-6)


def test_mask_only() -> None:
    current = current_logp()
    gate = dis_gate(RATIO, 0.2, 0.28)
    ones = type(gate)(
        weights=gate.trusted.double(),
        trusted=gate.trusted,
        low=gate.low,
        high=gate.high,
        nonfinite=gate.nonfinite,
    )
    result = score_policy_loss(current, ones, ADVANTAGE, WEIGHTS)
    assert result.loss.item() == pytest.approx(0.101005, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx((-0.10, -0.10, 0, 0, 0.10), abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "ppo_gain", "ppo_loss"),
    [(0.5, 0.5, 0.0), (0.8, 0.8, -0.8), (1.28, 1.28, -1.28), (1.5, 0.0, -1.5)],
)
def test_ppo_clips_on_one_side_where_dis_rejects(ratio: float, ppo_gain: float, ppo_loss: float) -> None:
    """Gradient coefficients at the same ε, A = +1 and A = -1. PPO's end itself is injected as an exact ratio."""
    for advantage, expected in ((1.0, ppo_gain), (-1.0, ppo_loss)):
        rollout = f64(-1.0)
        current = (rollout + f64(ratio).log()).requires_grad_()
        # A ratio that is an end lies on either side of it after a round trip through logs.
        inward = {0.8: 1e-12, 1.28: -1e-12}.get(ratio, 0.0)
        moved = (current.detach() + inward).requires_grad_()
        ppo = clipped_policy_loss(
            moved, rollout, no_gate(f64(1.0)), f64(advantage), f64(1.0), eps_low=0.2, eps_high=0.28
        )
        assert gradient(-ppo.loss, moved) == pytest.approx([expected], abs=1e-6)
        dis = score_policy_loss(current, dis_gate(f64(ratio), 0.2, 0.28), f64(advantage), f64(1.0))
        assert gradient(dis.loss, current) == [0.0]
