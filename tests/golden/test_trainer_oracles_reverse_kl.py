"""The worked example of algorithms.md §4.8: values, and gradients on the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.trainers.reverse_kl import full_reverse_kl, teacher_top_k, top_k_reverse_kl

PI = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
Q = torch.tensor([[0.4, 0.35, 0.05, 0.20]], dtype=torch.float64)
EYE = torch.eye(4, dtype=torch.float64)
IDS = torch.tensor([[0, 1]])
TOLERANCE = 1e-6


def logits() -> Tensor:
    """Hidden states whose output layer is the identity: they are the logits."""
    return PI.log().requires_grad_()


def gradient(loss: Tensor, hidden: Tensor) -> list[float]:
    found: list[float] = torch.autograd.grad(loss.sum(), hidden)[0].flatten().tolist()
    return found


def test_full() -> None:
    hidden = logits()
    found = full_reverse_kl(hidden, EYE, lambda begin, end: Q[begin:end].log()).divergence
    assert found.item() == pytest.approx(0.160804, abs=TOLERANCE)
    assert gradient(found, hidden) == pytest.approx((0.031170, -0.094486, 0.140671, -0.077355), abs=TOLERANCE)


def test_top_two_with_correction() -> None:
    hidden = logits()
    ids, teacher = teacher_top_k(Q.log(), 2)
    assert ids.tolist() == IDS.tolist()
    found = top_k_reverse_kl(hidden, EYE, ids, teacher).divergence
    assert found.item() == pytest.approx(0.015327, abs=TOLERANCE)
    assert gradient(found, hidden) == pytest.approx((0.078908, -0.065843, -0.009799, -0.003266), abs=TOLERANCE)


def test_terms_of_the_correction() -> None:
    first = top_k_reverse_kl(logits(), EYE, IDS[:, :1], Q[:, :1].log()).divergence
    second = top_k_reverse_kl(logits(), EYE, IDS[:, 1:], Q[:, 1:2].log()).divergence
    assert (first.item(), second.item()) == pytest.approx((0.011572, 0.003755), abs=TOLERANCE)


def test_correction_is_stationary_at_the_teacher() -> None:
    hidden = logits()
    found = top_k_reverse_kl(hidden, EYE, IDS, PI[:, :2].log()).divergence
    assert found.item() == pytest.approx(0.0, abs=1e-12)
    assert gradient(found, hidden) == pytest.approx((0, 0, 0, 0), abs=1e-12)


@pytest.mark.parametrize(
    ("teacher", "value", "expected"),
    [(Q, 0.065327, (0.178908, -0.005843, -0.129799, -0.043266)), (PI, 0.0, (0.10, 0.06, -0.12, -0.04))],
)
def test_without_the_correction(teacher: Tensor, value: float, expected: tuple[float, ...]) -> None:
    """What is avoided: it moves a student that equals its teacher."""
    hidden = logits()
    log_pi = torch.log_softmax(hidden, -1)[:, :2]
    loss = (log_pi.exp() * (log_pi - teacher[:, :2].log())).sum()
    assert loss.item() == pytest.approx(value, abs=TOLERANCE)
    assert gradient(loss, hidden) == pytest.approx(expected, abs=TOLERANCE)


def test_renormalised_is_another_objective() -> None:
    hidden = logits()
    log_pi = torch.log_softmax(hidden[:, :2], -1)
    loss = (log_pi.exp() * (log_pi - torch.log_softmax(Q[:, :2].log(), -1))).sum()
    assert loss.item() == pytest.approx(0.017120, abs=TOLERANCE)
    assert gradient(loss, hidden) == pytest.approx((0.088428, -0.088428, 0, 0), abs=TOLERANCE)


def test_entropy_of_the_student() -> None:
    """Against a uniform teacher the divergence is log V - H(π)."""
    uniform = torch.full((1, 4), 0.25, dtype=torch.float64).log()
    found = full_reverse_kl(logits(), EYE, lambda begin, end: uniform[begin:end]).divergence
    assert torch.tensor(4.0).double().log().item() - found.item() == pytest.approx(1.142120, abs=TOLERANCE)
