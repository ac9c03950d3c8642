"""Rows of algorithms.md §5 that concern DIS, GAE, CompactionRL, distillation and domains; options out of range."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.trainers.compaction import (
    compaction_advantages,
    compaction_policy_loss,
    compaction_value_targets,
    complete_rollouts,
    tokens_after,
)
from rolltape.trainers.critic import ValueNormaliser, explained_variance, value_loss
from rolltape.trainers.dis import dis_policy_loss, dis_surrogate, score_policy_loss
from rolltape.trainers.distill import mixed_advantage, opd_gap, opd_policy_loss
from rolltape.trainers.domains import domain_reports
from rolltape.trainers.gae import (
    credited_rewards,
    discounted_sums,
    generalised_advantages,
    lambda_by_length,
    terminal_rewards,
    whitened,
)
from rolltape.trainers.gates import closed_gate, no_gate
from rolltape.trainers.losses import clipped_policy_loss
from rolltape.trainers.reverse_kl import full_reverse_kl, teacher_top_k, top_k_reverse_kl

INF, NAN = float("inf"), float("nan")


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def i64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def dis(current: Tensor, rollout: Tensor, advantage: Tensor | None = None):  # type: ignore[no-untyped-def]
    count = current.numel()
    return dis_policy_loss(
        current,
        rollout,
        torch.ones(count) if advantage is None else advantage,
        torch.full((count,), 1 / count),
        eps_low=0.2,
        eps_high=0.28,
    )


# DIS


@pytest.mark.parametrize(
    ("current", "rollout", "low", "high", "nonfinite"),
    [
        (-INF, -1.0, True, False, True),
        (-INF, -INF, False, False, True),
        (-0.1, -200.0, False, True, False),
        (-1.0, -INF, False, True, True),
        (NAN, -1.0, False, False, True),
        (-1.0, NAN, False, False, True),
        (-1.0, 0.5, True, False, False),
    ],
)
def test_bad_token_gives_no_loss_and_no_gradient(
    current: float, rollout: float, low: bool, high: bool, nonfinite: bool
) -> None:
    """Beside a good token, whose part does not change."""
    logp = f32(-1.0, current).requires_grad_()
    result = dis(logp, f32(-1.0, rollout))
    (gradient,) = torch.autograd.grad(result.loss, logp)
    assert gradient.tolist() == [-0.5, 0.0]
    assert result.loss.item() == pytest.approx(0.5)
    assert result.trusted.tolist() == [True, False]
    verdict = (bool(result.gate.low[1]), bool(result.gate.high[1]), bool(result.nonfinite[1]))
    assert verdict == (low, high, nonfinite)
    surrogate = dis_surrogate(logp, f32(-1.0, rollout), f32(1, 1), f32(0.5, 0.5), eps_low=0.2, eps_high=0.28)
    assert torch.autograd.grad(surrogate, logp)[0].tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("recorded", [0.1, -9999.0])
def test_recorded_number_that_is_no_log_prob_is_not_trusted(recorded: float) -> None:
    """Though its ratio lies inside the interval."""
    logp = f32(-1.0, recorded).requires_grad_()
    result = dis(logp, f32(-1.0, recorded))
    assert result.bad_log_probs.tolist() == [False, True]
    assert result.trusted.tolist() == [True, False]
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == [-0.5, 0.0]


def test_advantage_that_is_no_number_is_counted() -> None:
    logp = f32(-1.0, -1.0).requires_grad_()
    result = dis(logp, f32(-1.0, -1.0), f32(1.0, NAN))
    assert result.nonfinite.tolist() == [False, True]
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == [-0.5, 0.0]


def test_all_tokens_rejected() -> None:
    logp = f32(-1.0, -3.0).requires_grad_()
    entropy = (logp * -1.0) + 1.0
    result = dis_policy_loss(
        logp, f32(-3.0, -1.0), f32(1, 1), f32(0.5, 0.5), eps_low=0.2, eps_high=0.28, entropy=entropy, entropy_coef=0.1
    )
    assert result.skip_step
    assert result.loss.item() == 0.0
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == [0.0, 0.0]


def test_part_of_a_batch_keeps_its_entropy_term() -> None:
    logp = f32(-1.0, -3.0).requires_grad_()
    result = dis_policy_loss(
        logp,
        f32(-3.0, -1.0),
        f32(1, 1),
        f32(0.5, 0.5),
        eps_low=0.2,
        eps_high=0.28,
        entropy=f32(1.0, 3.0),
        entropy_coef=0.1,
        is_partial=True,
    )
    assert result.loss.item() == pytest.approx(-0.2)
    assert result.entropy_loss == pytest.approx(-0.2)


def test_nothing_but_current_log_probs_is_learnt() -> None:
    current, rollout, advantage, weights = (f32(-1.0, -1.1).requires_grad_() for _ in range(4))
    result = dis_policy_loss(current, rollout, advantage, weights, eps_low=0.3, eps_high=5.0)
    found = torch.autograd.grad(result.loss, [current, rollout, advantage, weights], allow_unused=True)
    assert [gradient is not None for gradient in found] == [True, False, False, False]


def test_thresholds_have_no_default() -> None:
    for function in (dis_policy_loss, dis_surrogate):
        for name in ("eps_low", "eps_high"):
            assert inspect.signature(function).parameters[name].default is inspect.Parameter.empty


@pytest.mark.parametrize(
    ("eps_low", "eps_high", "field"), [(1.0, 0.28, "eps_low"), (-0.1, 0.28, "eps_low"), (0.2, -0.1, "eps_high")]
)
def test_thresholds_out_of_range(eps_low: float, eps_high: float, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        dis_policy_loss(f32(-1.0), f32(-1.0), f32(1.0), f32(1.0), eps_low=eps_low, eps_high=eps_high)


def test_closed_gate_keeps_its_ends() -> None:
    gate = closed_gate(f32(0.49, 0.5, 2.0, 2.1, NAN), 0.5, 2.0)
    assert gate.weights.tolist() == [0.0, 0.5, 2.0, 0.0, 0.0]
    assert gate.nonfinite.tolist() == [False] * 4 + [True]


def test_dual_clip_out_of_range() -> None:
    with pytest.raises(ConfigError, match="dual_clip"):
        clipped_policy_loss(f32(-1), f32(-1), no_gate(f32(1)), f32(1), f32(1), eps_low=0.2, eps_high=0.2, dual_clip=1.0)


# GAE


def test_reward_after_the_final_observation_goes_to_the_last_action() -> None:
    """Row 1 acts at 2 and 5 and is rewarded at 1 (by row 0's action), 4 and 9."""
    rows, positions = i64(0, 1, 1), i64(0, 2, 5)
    found = credited_rewards(f32(1, 2, 4, 8), i64(0, 1, 1, 1), i64(1, 4, 9, 5), rows, positions)
    assert found.tolist() == [1, 2, 12]


@pytest.mark.parametrize(("row", "position"), [(1, 1), (0, 0), (2, 7)])
def test_reward_without_an_action_before_it_is_refused(row: int, position: int) -> None:
    with pytest.raises(UntrainableError, match="rewards"):
        credited_rewards(f32(1), i64(row), i64(position), i64(0, 1), i64(1, 2))


def test_reward_in_a_batch_without_actions_is_refused() -> None:
    with pytest.raises(UntrainableError, match="rewards"):
        credited_rewards(f32(1), i64(0), i64(0), i64(), i64())


def test_no_rewards() -> None:
    assert credited_rewards(f32(), i64(), i64(), i64(0, 0), i64(0, 1)).tolist() == [0, 0]


def test_one_token_response() -> None:
    lam = lambda_by_length(i64(1))
    assert lam.tolist() == pytest.approx([1 / 3])
    found = generalised_advantages(f32(0.25), f32(1), i64(0), gamma=1.0, lam=lam)
    assert found.tolist() == [0.75]
    assert whitened(found).tolist() == [0.75]


def test_lambda_is_clamped() -> None:
    assert lambda_by_length(i64(0, 1), alpha=0.5).tolist() == [0.0, 0.0]


def test_empty_response_has_no_tokens_and_no_part() -> None:
    """Row 1 of three has no action token."""
    rows = i64(0, 2)
    found = generalised_advantages(f32(0.1, 0.2), terminal_rewards(f32(1, 5, 2), rows), rows, gamma=1.0, lam=0.9)
    assert found.tolist() == pytest.approx([0.9, 1.8])
    assert generalised_advantages(f32(), f32(), i64(), gamma=1.0, lam=0.9).tolist() == []


def test_bootstrap_of_a_row_cut_by_length_is_an_option() -> None:
    rows = i64(0, 1)
    found = generalised_advantages(f32(0.5, 0.5), f32(0, 0), rows, gamma=0.5, lam=1.0, bootstrap=f32(2.0, 0.0))
    assert found.tolist() == [0.5, -0.5]


def test_bad_value_spoils_no_other_row_and_no_later_token() -> None:
    rows = i64(0, 1, 1, 1, 2)
    found = generalised_advantages(f32(0.5, 0.5, NAN, 0.5, 0.5), torch.zeros(5), rows, gamma=1.0, lam=0.9)
    assert torch.isnan(found).tolist() == [False, True, True, False, False]


def test_advantages_are_constants() -> None:
    values = f32(0.1, 0.2).requires_grad_()
    assert not generalised_advantages(values, f32(0, 1), i64(0, 0), gamma=1.0, lam=0.9).requires_grad


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gamma": 1.1}, "gamma"),
        ({"gamma": -0.1}, "gamma"),
        ({"lam": 1.1}, "lambda"),
        ({"lam": f32(0.5, NAN)}, "lambda"),
        ({"rows": i64(0, 1, 0)}, "rows"),
        ({"rows": i64(0, 1)}, "length"),
    ],
)
def test_gae_options_out_of_range(options: dict[str, object], field: str) -> None:
    given: dict[str, object] = {"gamma": 1.0, "lam": 0.9, "rows": i64(0, 0, 1)} | options
    with pytest.raises(ConfigError, match=field):
        generalised_advantages(f32(1, 2, 3), f32(0, 0, 1), given.pop("rows"), **given)  # type: ignore[arg-type]


def test_long_row_sums_as_a_loop_does() -> None:
    """Many doublings, and a length that is no power of two."""
    terms = torch.randn(5003, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(5004, dtype=torch.float64)
    for index in reversed(range(5003)):
        expected[index] = terms[index] + 0.999 * expected[index + 1]
    found = discounted_sums(terms, torch.zeros(5003, dtype=torch.int64), 0.999)
    torch.testing.assert_close(found, expected[:-1], atol=1e-9, rtol=0)


# Critic


def test_value_without_a_number_is_counted_and_gives_no_gradient() -> None:
    values = f32(1.0, NAN, 1.0).requires_grad_()
    result = value_loss(values, f32(0, 0, INF), torch.full((3,), 1 / 3))
    assert result.num_nonfinite == 2
    assert result.loss.item() == pytest.approx(1 / 3)
    assert torch.autograd.grad(result.loss, values)[0].tolist() == pytest.approx([2 / 3, 0, 0])


def test_value_clip_takes_the_larger_loss() -> None:
    values = f32(1.0, 0.1).requires_grad_()
    result = value_loss(values, f32(1.0, 1.0), f32(1.0, 1.0), clip=0.2, old_values=f32(0.0, 0.0))
    assert result.loss.item() == pytest.approx(0.64 + 0.81)
    with pytest.raises(ConfigError, match="value_clip"):
        value_loss(values, f32(1.0, 1.0), f32(1.0, 1.0), clip=0.2)


def test_targets_are_constants() -> None:
    values, targets = f32(1.0).requires_grad_(), f32(0.0).requires_grad_()
    found = torch.autograd.grad(value_loss(values, targets, f32(1.0)).loss, [values, targets], allow_unused=True)
    assert found[1] is None


def test_explained_variance_is_undefined_without_variance() -> None:
    assert explained_variance(f32(0.1, 0.2), f32(1, 1)) is None
    assert explained_variance(f32(NAN), f32(1)) is None
    assert explained_variance(f32(0, 1, 5), f32(0, 1, NAN)) == 1.0


def test_normaliser_is_the_identity_until_it_is_moved() -> None:
    plain = ValueNormaliser()
    assert plain.value(f32(0.3)).tolist() == plain.target(f32(0.3)).tolist() == f32(0.3).tolist()
    moved = plain.moved(f32(0, 1, NAN), rate=1.0)
    assert (moved.mean, moved.std) == pytest.approx((0.5, 0.5))
    half = plain.moved(f32(0, 1), rate=0.5)
    assert (half.mean, half.std**2) == pytest.approx((0.25, 0.75 - 0.0625))
    assert plain.moved(f32(2, 2), rate=1.0).std > 0
    assert plain.moved(f32(NAN), rate=1.0) == plain


@pytest.mark.parametrize("make", [lambda: ValueNormaliser(std=0.0), lambda: ValueNormaliser().moved(f32(1), rate=0.0)])
def test_normaliser_options_out_of_range(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="value"):
        make()


# CompactionRL


def test_rollout_that_lacks_a_segment_is_dropped_whole() -> None:
    rollouts = i64(0, 0, 1, 1, 2, 3, 3)
    segments = i64(0, 1, 0, 2, 0, 0, 0)
    assert complete_rollouts(rollouts, segments, i64(2, 3, 2, 2)).tolist() == [True, False, False, False]


@pytest.mark.parametrize("segments", [i64(0, 2), i64(1, 2), i64(0, 0)])
def test_segments_with_a_gap_are_refused(segments: Tensor) -> None:
    with pytest.raises(UntrainableError, match="segment"):
        tokens_after(i64(0, 1), i64(0, 0), segments)


def test_segments_in_any_order_and_one_without_tokens() -> None:
    """Rollout 1's segments are rows 3, 0, 2; the middle one (row 0) has no trainable token."""
    rows, rollouts, segments = i64(1, 2, 3, 3), i64(1, 0, 1, 1), i64(1, 0, 2, 0)
    assert tokens_after(rows, rollouts, segments).tolist() == [1, 0, 0, 1]
    assert tokens_after(i64(), i64(), i64()).tolist() == []


def test_lambda_must_be_one_per_rollout() -> None:
    options = {"rollout_of_row": i64(0, 0), "segment_index": i64(0, 1), "gamma": 1.0}
    with pytest.raises(ConfigError, match="lambda"):
        compaction_advantages(f32(0, 0), f32(1, 1), i64(0, 1), lam=f32(0.5, 0.6), **options)  # type: ignore[arg-type]


def test_no_discount_left() -> None:
    """γ = 0: only the last token of the rollout has an advantage; 0 to the power 0 is 1."""
    found = compaction_advantages(
        f32(0, 0, 0), f32(1, 1), i64(0, 0, 1), rollout_of_row=i64(0, 0), segment_index=i64(0, 1), gamma=0.0, lam=0.9
    )
    assert found.tolist() == [0, 0, 1]


def test_compaction_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="ratio"):
        compaction_policy_loss(f32(-1), f32(-1), f32(-1), f32(1), f32(1), ratio="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gamma"):
        compaction_value_targets(f32(1), i64(0), i64(0), gamma=2.0)


def test_compaction_leaves_a_bad_recorded_log_prob_untrusted() -> None:
    logp = f32(-1, -1).requires_grad_()
    result = compaction_policy_loss(logp, f32(-1, -1), f32(-1, -INF), f32(1, 1), f32(0.5, 0.5))
    assert result.trusted.tolist() == [True, False]
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == [-0.5, 0.0]


# Distillation


@pytest.mark.parametrize("form", ["eq1", "score"])
@pytest.mark.parametrize("teacher", [-INF, NAN, INF])
def test_teacher_without_a_number_is_never_clipped_into_one(form: str, teacher: float) -> None:
    logp = f32(-1.0, -1.0).requires_grad_()
    gap = opd_gap(f32(-0.5, teacher), logp, max_gap=5.0)
    assert gap.nonfinite.tolist() == [False, True]
    assert gap.clipped.tolist() == [False, False]
    assert not torch.isfinite(gap.advantage[1])
    assert gap.reverse_kl == pytest.approx(-0.5)
    result = opd_policy_loss(logp, f32(-1, -1), f32(-1, -1), gap.advantage, f32(0.5, 0.5), form=form)  # type: ignore[arg-type]
    assert result.nonfinite.tolist() == [False, True]
    assert torch.autograd.grad(result.loss, logp)[0].tolist() == pytest.approx([-0.25, 0.0])


def test_a_stand_in_for_a_teachers_log_prob_is_no_gap() -> None:
    """Case D9 for teachers: -9999 is what an engine writes for -inf; clipped it would pass for the worst of gaps."""
    gap = opd_gap(f32(-0.1, -9999.0), f32(-0.2, -0.05), max_gap=5.0)
    assert gap.nonfinite.tolist() == [False, True]
    assert gap.clipped.tolist() == [False, False]
    assert gap.reverse_kl == pytest.approx(-0.1)
    hidden = torch.zeros(2, 3, dtype=torch.float64)
    teacher = torch.tensor([[-0.5, -1.0], [-0.5, -9999.0]], dtype=torch.float64)
    found = top_k_reverse_kl(hidden, torch.eye(3, dtype=torch.float64), torch.tensor([[0, 1], [0, 1]]), teacher)
    assert found.trusted.tolist() == [True, False]
    assert found.divergence[1] == 0.0
    floored = top_k_reverse_kl(
        hidden, torch.eye(3, dtype=torch.float64), torch.tensor([[0, 1], [0, 1]]), teacher, floor=-20.0
    )
    assert floored.trusted.all(), "a floor is said to stand for it"


def test_reverse_kl_without_a_number() -> None:
    assert opd_gap(f32(NAN), f32(-1.0)).reverse_kl is None


def test_gap_is_a_constant() -> None:
    assert not opd_gap(f32(-1.0).requires_grad_(), f32(-1.0).requires_grad_()).advantage.requires_grad


def test_part_with_coefficient_zero_is_not_computed_with() -> None:
    task, gap = f32(1.0, 1.0).requires_grad_(), f32(-INF, 2.0)
    assert mixed_advantage(task, gap, task_coef=2.0, opd_coef=0.0).tolist() == [2.0, 2.0]
    mixed = mixed_advantage(task, gap, task_coef=1.0, opd_coef=1.0)
    assert mixed.tolist() == [-INF, 3.0]
    assert not mixed.requires_grad


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: opd_gap(f32(-1), f32(-1), max_gap=0.0), "max_gap"),
        (lambda: mixed_advantage(f32(1), f32(1), task_coef=-1.0, opd_coef=1.0), "task_coef"),
        (lambda: mixed_advantage(f32(1), f32(1), task_coef=0.0, opd_coef=0.0), "task_coef"),
        (lambda: opd(form="both"), "opd_form"),
        (lambda: opd(form="score", score_low=0.5), "score_low"),
        (lambda: opd(form="score", score_low=2.0, score_high=0.5), "score_low"),
        (lambda: opd(beta=0.5), "beta"),
        (
            lambda: score_policy_loss(f32(-1), no_gate(f32(1)), f32(1), f32(1), entropy_coef=0.1),
            "entropy_coef",
        ),
    ],
)
def test_distillation_options_out_of_range(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


def opd(**options: object) -> object:
    return opd_policy_loss(f32(-1), f32(-1), f32(-1), f32(1), f32(1), **options)  # type: ignore[arg-type]


# Reverse KL over the vocabulary

Q = torch.log_softmax(f32(1.0, 0.0, -1.0, 0.5), -1).repeat(2, 1)


def full(teacher: Tensor, hidden: Tensor, **options: object):  # type: ignore[no-untyped-def]
    return full_reverse_kl(hidden, torch.eye(4), lambda begin, end: teacher[begin:end], **options)  # type: ignore[arg-type]


def top(teacher: Tensor, hidden: Tensor, **options: object):  # type: ignore[no-untyped-def]
    return top_k_reverse_kl(hidden, torch.eye(4), i64(0, 3).repeat(2, 1), teacher[:, [0, 3]], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("divergence", [full, top])
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_bad_state_gives_no_divergence_and_no_gradient(divergence: Callable[..., object], chunk_size: int) -> None:
    for spoil_teacher in (False, True):
        hidden, teacher = torch.zeros(2, 4), Q.clone()
        (teacher if spoil_teacher else hidden)[1, 0] = NAN
        hidden.requires_grad_()
        found = divergence(teacher, hidden, chunk_size=chunk_size)
        assert found.trusted.tolist() == [True, False]  # type: ignore[attr-defined]
        values: Tensor = found.divergence  # type: ignore[attr-defined]
        assert values[1].item() == 0.0
        (gradient,) = torch.autograd.grad(values.sum(), hidden)
        assert torch.isfinite(gradient).all()
        assert gradient[1].tolist() == [0.0] * 4
        assert gradient[0].abs().sum() > 0


@pytest.mark.parametrize("divergence", [full, top])
def test_teacher_without_support_is_an_error_or_has_a_floor(divergence: Callable[..., object]) -> None:
    teacher = Q.clone()
    teacher[1, 3] = -INF
    with pytest.raises(UntrainableError, match="floor"):
        divergence(teacher, torch.zeros(2, 4))
    found = divergence(teacher, torch.zeros(2, 4), floor=-30.0)
    assert found.trusted.all()  # type: ignore[attr-defined]
    assert found.divergence[1] > 5  # type: ignore[attr-defined]


def test_teacher_is_a_constant_and_the_output_layer_is_not() -> None:
    hidden, weight, teacher = torch.zeros(2, 4, requires_grad=True), torch.eye(4, requires_grad=True), Q.clone()
    hidden.data[0, 1] = 1.0
    teacher.requires_grad_()
    for found in (
        full_reverse_kl(hidden, weight, lambda begin, end: teacher[begin:end]),
        top_k_reverse_kl(hidden, weight, i64(0, 3).repeat(2, 1), teacher[:, [0, 3]]),
    ):
        gradients = torch.autograd.grad(found.divergence.sum(), [hidden, weight, teacher], allow_unused=True)
        assert [gradient is not None for gradient in gradients] == [True, True, False]


def test_missing_places_of_a_short_top_k_give_nothing() -> None:
    hidden = torch.zeros(1, 4)
    short = top_k_reverse_kl(hidden, torch.eye(4), i64(0)[None], Q[:1, :1]).divergence
    padded = top_k_reverse_kl(hidden, torch.eye(4), i64(0, -1)[None], f32(Q[0, 0].item(), NAN)[None]).divergence
    assert padded.tolist() == short.tolist()


def test_ties_of_the_teacher_go_to_the_lower_id() -> None:
    ids, values = teacher_top_k(f32(-1.0, -0.5, -0.5, -1.0, -0.5)[None], 4)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert values.tolist() == [[-0.5, -0.5, -0.5, -1.0]]


def test_temperature_divides_the_logits() -> None:
    hidden = f32(2.0, 0.0, -2.0, 1.0).repeat(2, 1)
    assert full(Q, hidden, temperature=2.0).divergence.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert full(Q, hidden).divergence.min() > 0.05


def test_no_tokens() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    found = full(Q[:0], hidden).divergence
    assert found.shape == (0,)
    assert torch.autograd.grad(found.sum(), hidden)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: full(Q, torch.zeros(2, 4), temperature=0.0), "temperature"),
        (lambda: full(Q, torch.zeros(2, 4), chunk_size=0), "chunk_size"),
        (lambda: full(Q[:, :3], torch.zeros(2, 4)), "teacher"),
        (lambda: top_k_reverse_kl(torch.zeros(1, 4), torch.eye(4), i64(4)[None], Q[:1, :1]), "ids"),
        (lambda: top_k_reverse_kl(torch.zeros(1, 4), torch.eye(4), i64(-2)[None], Q[:1, :1]), "ids"),
        (lambda: top_k_reverse_kl(torch.zeros(1, 4), torch.eye(4), i64(1)[None], Q[:1, :2]), "ids"),
        (lambda: teacher_top_k(Q, 5), "k"),
    ],
)
def test_reverse_kl_options_out_of_range(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


# Domains


def test_a_domain_that_no_one_scored_has_no_numbers() -> None:
    student, teacher = f32(-1, -1, -1), f32(-1.04, -1.19, NAN)
    gap = opd_gap(teacher, student)
    reports = domain_reports(["near", "far", "silent"], i64(0, 1, 2), gap, gap)
    assert reports["silent"].kl is reports["silent"].gap_abs is reports["silent"].clip_share is None
    assert reports["silent"].nonfinite_tokens == 1
    assert [reports[name].kl for name in ("near", "far")] == pytest.approx([0.04, 0.19], abs=1e-6)
