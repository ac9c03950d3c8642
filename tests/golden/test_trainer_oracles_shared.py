"""Numbers of algorithms.md §2: safe numerics, aggregation and the KL estimators."""

from __future__ import annotations

from math import log

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rolltape.schema.render import arrow_schema
from rolltape.trainers.aggregation import Mode, aggregation_weights
from rolltape.trainers.gates import dis_gate, icepop_gate
from rolltape.trainers.metrics import kl_estimate, kl_terms
from rolltape.trainers.safe_math import bound, raw_ratio, safe_ratio, weighted_sum


def float32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# §2.1


def test_bfloat16_storage_would_move_log_probs() -> None:
    """Why log-probs are float32 on the tape."""
    assert arrow_schema("action_sampled").field("rollout_log_probs").type.value_type == pa.float32()
    exact = torch.tensor([-3.2, -9.7], dtype=torch.float64)
    assert (exact.bfloat16().double() - exact).tolist() == pytest.approx([-0.003125, 0.0125], abs=1e-6)
    assert (exact.float().double() - exact).abs().max() < 1e-6


# §2.3


def test_two_step_masking_keeps_the_gradient_finite() -> None:
    keep = torch.tensor([True, False])
    current = float32(-0.3, -0.3).requires_grad_()
    reference = float32(-0.5, -200.0)
    masked_after = torch.where(keep, torch.exp(current - reference), torch.zeros(2))
    assert torch.isfinite(masked_after).all()
    assert torch.autograd.grad(masked_after.sum(), current)[0].isnan().tolist() == [False, True]
    ratio = safe_ratio(current, reference, keep)
    assert ratio.tolist() == pytest.approx([float(torch.exp(torch.tensor(0.2))), 1.0])
    (gradient,) = torch.autograd.grad(ratio.sum(), current)
    assert gradient[1] == 0.0
    assert float(gradient[0]) == pytest.approx(1.221403, abs=2e-6)


def test_boundary_ratios_through_float32_logs() -> None:
    half = raw_ratio(float32(0.2).log(), float32(0.4).log())
    assert half.item() == pytest.approx(0.49999997, abs=1e-8)
    assert half.item() < 0.5
    assert not icepop_gate(half, 2.0).trusted[0]
    above = raw_ratio(float32(-7.3 + log(1.28)), float32(-7.3))
    assert above.item() == pytest.approx(1.2800006, abs=1e-7)


def test_injected_boundary_ratios() -> None:
    assert not bool(float32(1.28) < bound(1.28, float32(1.0)))
    assert not dis_gate(float32(1.28), 0.2, 0.28).trusted[0]
    assert icepop_gate(float32(2.0), 2.0).trusted[0]


def test_bounds_are_cast_once_to_the_ratios_dtype() -> None:
    assert bound(1 - 0.3, float32(1.0)).dtype == torch.float32
    assert not dis_gate(float32(0.7), 0.3, 5.0).trusted[0]
    assert not dis_gate(torch.tensor([0.7], dtype=torch.float64), 0.3, 5.0).trusted[0]


# §2.4

LOSSES = torch.tensor([1.0, 2.0, 3.0, 8.0])
ROWS = torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("token_mean", {}, 3.5),
        ("seq_mean", {}, 5.0),
        ("seq_sum", {}, 7.0),
        ("const", {"max_length": 4}, 1.75),
        ("rollout_mean", {"rollout_of_row": torch.tensor([0, 0])}, 3.5),
        ("rollout_mean", {"rollout_of_row": torch.tensor([0, 1])}, 5.0),
    ],
)
def test_aggregation(mode: Mode, options: dict[str, object], expected: float) -> None:
    weights = aggregation_weights(ROWS, mode=mode, num_rows=2, **options)  # type: ignore[arg-type]
    assert float(weighted_sum(LOSSES, weights)) == pytest.approx(expected, abs=1e-6)


def test_two_ranks_add_up() -> None:
    weights = aggregation_weights(ROWS, mode="token_mean", num_rows=2)
    ranks = [float(weighted_sum(LOSSES[part], weights[part])) for part in (slice(0, 3), slice(3, 4))]
    assert ranks == pytest.approx([6 / 4, 8 / 4])
    assert sum(ranks) == pytest.approx(3.5)
    # What a rank that took its own mean would give.
    assert (LOSSES[:3].mean() + LOSSES[3:].mean()) / 2 == 5.0


@pytest.mark.parametrize(
    ("cut", "token_mean", "seq_mean"), [((10,), 1.8, 1.8), ((9, 1), 1.8, 5.0), ((3, 3, 3, 1), 1.8, 3.0)]
)
def test_token_mean_does_not_see_the_cut(cut: tuple[int, ...], token_mean: float, seq_mean: float) -> None:
    losses = torch.tensor([1.0] * 9 + [9.0])
    rows = torch.repeat_interleave(torch.arange(len(cut)), torch.tensor(cut))
    for mode, expected in (("token_mean", token_mean), ("seq_mean", seq_mean)):
        weights = aggregation_weights(rows, mode=mode, num_rows=len(cut))  # type: ignore[arg-type]
        assert float(weighted_sum(losses, weights)) == pytest.approx(expected, abs=1e-6)


# §2.6


def test_kl_estimators() -> None:
    estimate = kl_estimate(torch.tensor([0.1, -0.2, 0.05], dtype=torch.float64))
    assert estimate == pytest.approx((-0.016667, 0.008750, 0.009157), abs=1e-6)


def test_kl_estimator_gradients() -> None:
    log_ratio = torch.tensor([0.1, -0.2, 0.05], dtype=torch.float64, requires_grad=True)
    _, k2, k3 = kl_terms(log_ratio)
    assert torch.autograd.grad(k2.sum(), log_ratio)[0].tolist() == pytest.approx([0.1, -0.2, 0.05], abs=1e-6)
    expected = [0.095163, -0.221403, 0.048771]
    assert torch.autograd.grad(k3.sum(), log_ratio)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_kl_of_the_mismatch_goes_from_rollout_to_train() -> None:
    """Samples come from the engine, so d is minus the log of the ratio train / rollout."""
    train_over_rollout = torch.tensor([log(1.2), log(2.0), log(0.5)], dtype=torch.float64)
    assert kl_estimate(-train_over_rollout) == pytest.approx((-0.060774, 0.165691, 0.172559), abs=1e-6)
