"""The worked example of algorithms.md §4.2 and §4.3: values and gradients of every correction."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor

from rolltape.trainers.aggregation import Mode, aggregation_weights
from rolltape.trainers.gates import Gate, icepop_gate, no_gate, tis_gate
from rolltape.trainers.losses import PolicyLoss, clipped_policy_loss, icepop_policy_loss
from rolltape.trainers.metrics import Verdicts, policy_metrics

P_OLD = (0.60, 0.50, 0.20, 0.35, 0.40, 0.16)
RHO = (1.2, 2.0, 0.5, 3.5, 0.8, 0.3)
POLICY_RATIO = (1.0, 1.4, 0.7, 1.1, 0.7, 1.0)
ADVANTAGE = (0.866024, 0.866024, 0.866024, 0.866024, -0.866024, -0.866024)
ROWS = torch.tensor([0, 0, 0, 0, 1, 1])


def tensor(values: tuple[float, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def log_probs() -> tuple[Tensor, Tensor, Tensor]:
    """Current (with gradient), old and rollout log-probs of the table."""
    old = tensor(P_OLD).log()
    return (old + tensor(POLICY_RATIO).log()).requires_grad_(), old, old - tensor(RHO).log()


def weights(mode: Mode = "seq_mean") -> Tensor:
    return aggregation_weights(ROWS, mode=mode, num_rows=2).double()


def loss_with(gate: Gate, mode: Mode = "seq_mean") -> tuple[PolicyLoss, Tensor]:
    current, old, _ = log_probs()
    result = clipped_policy_loss(current, old, gate, tensor(ADVANTAGE), weights(mode), eps_low=0.2, eps_high=0.28)
    (gradient,) = torch.autograd.grad(result.loss, current)
    return result, gradient


CASES = {
    "pop": (icepop_gate(tensor(RHO), 2.0), -0.306356, -0.500851, (-0.129904, 0, -0.037889, 0, 0, 0)),
    "binary": (
        icepop_gate(tensor(RHO), 2.0, pop_value="binary"),
        -0.149389,
        -0.314655,
        (-0.108253, 0, -0.075777, 0, 0, 0),
    ),
    "tis clamp": (
        tis_gate(tensor(RHO), 0.5, 2.0),
        -0.436260,
        -0.746224,
        (-0.129904, 0, -0.037889, -0.238157, 0, 0.108253),
    ),
    "tis upper": (
        tis_gate(tensor(RHO), 0.0, 2.0),
        -0.479561,
        -0.775091,
        (-0.129904, 0, -0.037889, -0.238157, 0, 0.064952),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name: str) -> None:
    gate, seq_mean, token_mean, expected_gradient = CASES[name]
    result, gradient = loss_with(gate)
    assert result.loss.item() == pytest.approx(seq_mean, abs=1e-6)
    assert gradient.tolist() == pytest.approx(expected_gradient, abs=1e-6)
    assert loss_with(gate, "token_mean")[0].loss.item() == pytest.approx(token_mean, abs=1e-6)


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (icepop_gate(tensor(RHO), 2.0), (1.2, 2.0, 0.5, 0, 0.8, 0)),
        (icepop_gate(tensor(RHO), 2.0, pop_value="binary"), (1, 1, 1, 0, 1, 0)),
        (tis_gate(tensor(RHO), 0.5, 2.0), (1.2, 2.0, 0.5, 2.0, 0.8, 0.5)),
        (tis_gate(tensor(RHO), 0.0, 2.0), (1.2, 2.0, 0.5, 2.0, 0.8, 0.3)),
        (no_gate(tensor(RHO)), (1, 1, 1, 1, 1, 1)),
    ],
)
def test_gate_weights(gate: Gate, expected: tuple[float, ...]) -> None:
    assert gate.weights.tolist() == pytest.approx(expected, abs=1e-12)


def test_token_losses_of_pop() -> None:
    result, _ = loss_with(icepop_gate(tensor(RHO), 2.0))
    assert result.token_losses.tolist() == pytest.approx((-1.039229, -2.217021, -0.303108, 0, 0.554255, 0), abs=1e-6)


def test_verdicts() -> None:
    result, _ = loss_with(icepop_gate(tensor(RHO), 2.0))
    assert result.trusted.tolist() == [True, True, True, False, True, False]
    assert result.gate.low.tolist() == [False, False, False, False, False, True]
    assert result.gate.high.tolist() == [False, False, False, True, False, False]
    assert result.clip_high.tolist() == [False, True, False, False, False, False]
    # Token 3 has r = 0.7 too, but a positive advantage: it is not clipped.
    assert result.clip_low.tolist() == [False, False, False, False, True, False]
    assert result.num_trusted == 4
    assert not result.skip_step


def test_rejected_tokens_stay_in_the_denominator() -> None:
    gate = icepop_gate(tensor(RHO), 2.0)
    wrong = torch.zeros(6, dtype=torch.float64)
    wrong[gate.trusted] = aggregation_weights(ROWS[gate.trusted], mode="seq_mean", num_rows=2).double()
    current, old, _ = log_probs()
    result = clipped_policy_loss(current, old, gate, tensor(ADVANTAGE), wrong, eps_low=0.2, eps_high=0.28)
    assert result.loss.item() == pytest.approx(-0.316099, abs=1e-6)


def test_float32_logs_reject_the_boundary_token() -> None:
    """Row 3's ratio of 0.2 / 0.4, made through float32 logs, is 0.49999997: rejected, as it should be."""
    p_old = tensor(P_OLD, torch.float32)
    old, rollout = p_old.log(), (p_old / tensor(RHO, torch.float32)).log()
    current = old + tensor(POLICY_RATIO, torch.float32).log()
    result = icepop_policy_loss(current, old, rollout, tensor(ADVANTAGE, torch.float32), weights().float())
    assert not result.trusted[2]
    assert result.gate.low[2]
    assert result.loss.item() == pytest.approx(-0.268467, abs=2e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"correction": "tis", "tis_low": 0.5, "tis_high": 2.0}, -0.436260),
        ({"correction": "tis", "tis_low": 0.0, "tis_high": 2.0}, -0.479561),
    ],
)
def test_public_entry_with_tis(options: dict[str, float], expected: float) -> None:
    current, old, rollout = log_probs()
    result = icepop_policy_loss(current, old, rollout, tensor(ADVANTAGE), weights(), **options)  # type: ignore[arg-type]
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pop_value", ["ratio", "binary"])
def test_public_entry_away_from_the_boundary(pop_value: str) -> None:
    """With ratios that no rounding moves across an end, the entry through log-probs equals the injected gate."""
    current, old, _ = log_probs()
    rho = torch.tensor([1.2, 1.9, 0.6, 3.5, 0.8, 0.3], dtype=torch.float64)
    entry = icepop_policy_loss(current, old, old - rho.log(), tensor(ADVANTAGE), weights(), pop_value=pop_value)  # type: ignore[arg-type]
    gate = icepop_gate(rho, 2.0, pop_value=pop_value)  # type: ignore[arg-type]
    injected = clipped_policy_loss(current, old, gate, tensor(ADVANTAGE), weights(), eps_low=0.2, eps_high=0.28)
    assert entry.loss.item() == pytest.approx(injected.loss.item(), abs=1e-12)


def test_one_update_per_batch_has_ratio_one() -> None:
    current, _, rollout = log_probs()
    result = icepop_policy_loss(current, current.detach(), rollout, tensor(ADVANTAGE), weights(), beta=4.0)
    assert result.policy_ratio.tolist() == [1.0] * 6
    assert not (result.clip_low | result.clip_high).any()
    (gradient,) = torch.autograd.grad(result.loss, current)
    mismatch = torch.exp(current.detach() - rollout)
    assert result.gate.weights.tolist() == pytest.approx(mismatch.tolist(), abs=1e-12)
    assert gradient.tolist() == pytest.approx((-weights() * mismatch * tensor(ADVANTAGE)).tolist(), abs=1e-12)


def test_metrics_of_the_example() -> None:
    current, old, _ = log_probs()
    rho = torch.tensor([1.2, 2.0 - 1e-9, 0.5 + 1e-9, 3.5, 0.8, 0.3], dtype=torch.float64)
    rollout = old - rho.log()
    result = icepop_policy_loss(current, old, rollout, tensor(ADVANTAGE), weights())
    clamped = icepop_policy_loss(
        current, old, rollout, tensor(ADVANTAGE), weights(), correction="tis", tis_low=0.4, tis_high=3.0
    )

    def metrics_of(policy: PolicyLoss, *, is_clamp: bool) -> dict[str, float]:
        return policy_metrics(
            current_logp=current,
            old_logp=old,
            rollout_logp=rollout,
            advantage=tensor(ADVANTAGE),
            entropy=None,
            gate_weight=policy.gate_weights,
            trusted=policy.trusted,
            verdicts=Verdicts.of(policy),
            is_clamp=is_clamp,
        )

    metrics, of_clamp = metrics_of(result, is_clamp=False), metrics_of(clamped, is_clamp=True)
    assert of_clamp["tis_clip_frac_low"] == pytest.approx(1 / 6)
    assert of_clamp["tis_clip_frac_high"] == pytest.approx(1 / 6)
    assert of_clamp["trusted_frac"] == 1.0
    assert "gate_reject_frac_low" not in of_clamp
    assert "tis_clip_frac_low" not in metrics
    assert metrics["action_tokens"] == 6
    assert metrics["trusted_tokens"] == 4
    assert metrics["trusted_frac"] == pytest.approx(4 / 6)
    for name in ("gate_reject_frac_low", "gate_reject_frac_high", "clip_frac_low", "clip_frac_high"):
        assert metrics[name] == pytest.approx(1 / 6), name
    assert metrics["mismatch_ratio_max"] == pytest.approx(3.5)
    assert metrics["mismatch_ratio_min"] == pytest.approx(0.3)
    assert metrics["mismatch_abs_max"] == pytest.approx(log(3.5))
    assert metrics["nonfinite_tokens"] == 0
    kept = torch.tensor([1.2, 2.0, 0.5, 0.8], dtype=torch.float64)
    assert metrics["ess"] == pytest.approx(float(kept.sum() ** 2 / kept.square().sum()))
