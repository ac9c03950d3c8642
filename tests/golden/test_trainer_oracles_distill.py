"""Numbers of algorithms.md §4.7, §4.9 and §4.10: distillation at sampled tokens, routed and mixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.trainers.aggregation import aggregation_weights
from rolltape.trainers.dis import score_policy_loss
from rolltape.trainers.distill import mixed_advantage, opd_gap, opd_policy_loss
from rolltape.trainers.domains import domain_reports
from rolltape.trainers.gates import icepop_gate, no_gate
from rolltape.trainers.losses import clipped_policy_loss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


STUDENT = f64(-0.2, -1.2, -3.0, -0.05)
TEACHER = f64(-0.1, -2.0, -0.5, -9.0)
RHO = f64(1.25, 1.0, 2.5)
THIRDS = f64(1 / 3, 1 / 3, 1 / 3)


def gradient(loss: Tensor, current: Tensor) -> list[float]:
    found: list[float] = torch.autograd.grad(loss, current)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("max_gap", "gap", "loss", "last"), [(None, -8.95, 1.528125, 2.2375), (5.0, -5.0, 1.577500, 1.25)]
)
def test_gap_and_score_form(max_gap: float | None, gap: float, loss: float, last: float) -> None:
    found = opd_gap(TEACHER, STUDENT, max_gap=max_gap)
    assert found.advantage.tolist() == pytest.approx((0.1, -0.8, 2.5, gap), abs=1e-6)
    assert found.clipped.tolist() == [False, False, False, max_gap is not None]
    current = STUDENT.clone().requires_grad_()
    weights = torch.full((4,), 0.25)
    result = opd_policy_loss(current, STUDENT, STUDENT, found.advantage, weights, form="score")
    # On-policy: the loss is -mean(a log π).
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx((-0.025, 0.2, -0.625, last), abs=1e-6)


def test_reverse_kl_of_the_samples() -> None:
    assert opd_gap(TEACHER, STUDENT).reverse_kl == pytest.approx(1.7875, abs=1e-6)


def test_eq1_form() -> None:
    """Through the public entry: ρ = old / rollout, r = 1."""
    student = STUDENT[:3]
    current = student.clone().requires_grad_()
    gap = opd_gap(TEACHER[:3], current)
    assert not gap.advantage.requires_grad
    result = opd_policy_loss(current, student, student - RHO.log(), gap.advantage, THIRDS)
    assert result.loss.item() == pytest.approx(0.225, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx((-0.041667, 0.266667, 0), abs=1e-6)
    assert result.trusted.tolist() == [True, True, False]


def test_seed_form_lets_the_untrusted_token_dominate() -> None:
    current = STUDENT[:3].clone().requires_grad_()
    result = score_policy_loss(current, no_gate(RHO), opd_gap(TEACHER[:3], current).advantage, THIRDS)
    assert result.loss.item() == pytest.approx(2.186667, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx((-0.033333, 0.266667, -0.833333), abs=1e-6)


def test_score_form_with_pop_weights_has_the_gradient_of_eq1() -> None:
    current = STUDENT[:3].clone().requires_grad_()
    gap = opd_gap(TEACHER[:3], current).advantage
    result = score_policy_loss(current, icepop_gate(RHO, 2.0), gap, THIRDS)
    assert result.loss.item() == pytest.approx(-0.311667, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx((-0.041667, 0.266667, 0), abs=1e-6)
    old = STUDENT[:3]
    eq1 = clipped_policy_loss(current, old, icepop_gate(RHO, 2.0), gap, THIRDS, eps_low=0.2, eps_high=0.28)
    assert gradient(eq1.loss, current) == pytest.approx((-0.041667, 0.266667, 0), abs=1e-6)
    entry = opd_policy_loss(current, old, old - RHO.log(), gap, THIRDS, form="score", score_low=0.5, score_high=2.0)
    assert entry.loss.item() == pytest.approx(-0.311667, abs=1e-6)


def test_gap_of_old_and_of_current_student() -> None:
    old, current, teacher = f64(-0.2, -1.2), f64(-0.3, -1.0), f64(-0.1, -2.0)
    assert opd_gap(teacher, old).advantage.tolist() == pytest.approx((0.1, -0.8), abs=1e-6)
    assert opd_gap(teacher, current).advantage.tolist() == pytest.approx((0.2, -1.0), abs=1e-6)


def test_mixed_with_a_task() -> None:
    gap = opd_gap(f64(-0.5, -0.4, -2.0), f64(-0.3, -1.0, -2.2)).advantage
    task = torch.full((3,), 0.8, dtype=torch.float64, requires_grad=True)
    assert not mixed_advantage(task, gap, task_coef=1.0, opd_coef=0.5).requires_grad, "an advantage is a constant"
    assert mixed_advantage(task, gap, task_coef=1.0, opd_coef=0.5).tolist() == pytest.approx((0.7, 1.1, 0.9), abs=1e-6)
    assert mixed_advantage(task, gap, task_coef=2.0, opd_coef=1.0).tolist() == pytest.approx((1.4, 2.2, 1.8), abs=1e-6)


# §4.9

ROWS = torch.tensor([0, 0, 0, 1])
STUDENT_TOKENS = f64(-0.2, -0.9, -1.5, -0.7)
SCORES = {"math": f64(-0.1, -1.4, -1.0, -3.0), "code": f64(-5, -5, -5, -0.4)}


def scored(*domains: str) -> Tensor:
    """Each token's log-prob by the teacher of its row's domain."""
    return torch.stack([SCORES[domains[row]][token] for token, row in enumerate(ROWS.tolist())])


@pytest.mark.parametrize(("mode", "loss"), [("seq_mean", 0.158333), ("token_mean", 0.132500)])
def test_hard_routing(mode: str, loss: float) -> None:
    gap = opd_gap(scored("math", "code"), STUDENT_TOKENS)
    assert gap.advantage.tolist() == pytest.approx((0.1, -0.5, 0.5, 0.3), abs=1e-6)
    weights = aggregation_weights(ROWS, mode=mode, num_rows=2)  # type: ignore[arg-type]
    current = STUDENT_TOKENS.clone().requires_grad_()
    result = opd_policy_loss(current, STUDENT_TOKENS, STUDENT_TOKENS, gap.advantage, weights, form="score")
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert gradient(result.loss, current) == pytest.approx((-weights * gap.advantage).tolist(), abs=1e-6)


def test_misrouted_row() -> None:
    gap = opd_gap(scored("math", "math"), STUDENT_TOKENS)
    assert gap.advantage[3].item() == pytest.approx(-2.3, abs=1e-6)


def test_report_per_domain() -> None:
    teacher = scored("math", "code")
    reports = domain_reports(
        ["math", "code"], ROWS, opd_gap(teacher, STUDENT_TOKENS), opd_gap(teacher, STUDENT_TOKENS, max_gap=0.4)
    )
    math, code = reports["math"], reports["code"]
    assert (math.tokens, code.tokens) == (3, 1)
    assert math.kl == pytest.approx(-0.1 / 3)
    assert code.kl == pytest.approx(-0.3)
    assert math.gap_abs == pytest.approx(0.9 / 3)
    assert math.clip_share == pytest.approx(2 / 3)
