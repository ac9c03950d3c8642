"""The edge-case matrix of algorithms.md §5, as far as it concerns gates, losses, advantages, groups and staleness."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from rolltape.schema import reasons
from rolltape.schema.errors import ConfigError, IntegrityError, UntrainableError
from rolltape.trainers.advantages import group_advantages
from rolltape.trainers.aggregation import Mode, aggregation_weights
from rolltape.trainers.gates import dis_gate, icepop_gate, no_gate, tis_gate
from rolltape.trainers.groups import complete_groups
from rolltape.trainers.losses import PolicyLoss, clipped_policy_loss, icepop_policy_loss
from rolltape.trainers.metrics import Verdicts, effective_sample_size, policy_metrics
from rolltape.trainers.safe_math import fixed_sum, raw_ratio, trusted_log_probs
from rolltape.trainers.staleness import is_fresh, lag_histogram, require_version, trajectory_lags, version_refusal

INF, NAN = math.inf, math.nan


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one_row(length: int) -> Tensor:
    return aggregation_weights(torch.zeros(length, dtype=torch.int64), mode="seq_mean", num_rows=1)


def loss_of(
    current: list[float],
    old: list[float],
    rollout: list[float],
    advantage: list[float] | None = None,
    **options: object,
) -> tuple[PolicyLoss, Tensor]:
    """Loss and gradient of one row of tokens."""
    leaf = f32(*current).requires_grad_()
    advantages = f32(*(advantage or [1.0] * len(current)))
    result = icepop_policy_loss(leaf, f32(*old), f32(*rollout), advantages, one_row(len(current)), **options)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result, gradient


# Gates at their ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_icepop_keeps_its_ends_with_their_weights(dtype: torch.dtype) -> None:
    ratio = torch.tensor([2.0, 0.5], dtype=dtype)
    gate = icepop_gate(ratio, 2.0)
    assert gate.trusted.all()
    assert gate.weights.tolist() == [2.0, 0.5]
    beyond = torch.stack(
        [torch.nextafter(ratio[0], ratio.new_tensor(9.0)), torch.nextafter(ratio[1], ratio.new_tensor(0.0))]
    )
    outside = icepop_gate(beyond, 2.0)
    assert not outside.trusted.any()
    assert (outside.high.tolist(), outside.low.tolist()) == ([True, False], [False, True])
    assert outside.weights.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dis_rejects_its_ends(dtype: torch.dtype) -> None:
    ratio = torch.tensor([1 + 0.28, 1 - 0.2], dtype=dtype)
    gate = dis_gate(ratio, 0.2, 0.28)
    assert not gate.trusted.any()
    assert (gate.high.tolist(), gate.low.tolist()) == ([True, False], [False, True])
    inside = torch.stack(
        [torch.nextafter(ratio[0], ratio.new_tensor(1.0)), torch.nextafter(ratio[1], ratio.new_tensor(1.0))]
    )
    assert torch.equal(dis_gate(inside, 0.2, 0.28).weights, inside)


def test_dis_with_an_empty_interval_accepts_nothing() -> None:
    gate = dis_gate(f32(1.0, 0.999, 1.001), 0.0, 0.0)
    assert not gate.trusted.any()


def test_dis_upper_end_is_one_plus_epsilon() -> None:
    assert dis_gate(f32(5.9), 0.8, 5.0).trusted.all()
    assert not dis_gate(f32(6.0), 0.8, 5.0).trusted.any()


def test_tis_clamps_and_keeps_everything_but_nan() -> None:
    gate = tis_gate(f32(0.3, 0.5, 2.0, 3.5, 0.0, INF, NAN), 0.5, 2.0)
    assert gate.weights.tolist() == [0.5, 0.5, 2.0, 2.0, 0.5, 2.0, 0.0]
    assert gate.trusted.tolist() == [True] * 6 + [False]
    assert gate.low.tolist() == [True, False, False, False, True, False, False]
    assert gate.high.tolist() == [False, False, False, True, False, True, False]
    assert gate.nonfinite.tolist() == [False] * 6 + [True]


@pytest.mark.parametrize("correction", ["icepop", "tis", "none"])
def test_gates_are_constants(correction: str) -> None:
    """No gradient reaches old or rollout log-probs through a weight."""
    current, old, rollout = (f32(-1.0, -2.0).requires_grad_() for _ in range(3))
    result = icepop_policy_loss(current, old, rollout, f32(1.0, 1.0), one_row(2), correction=correction)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(result.loss, [current, old, rollout], allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1] is None
    assert gradients[2] is None


def test_nothing_but_current_log_probs_is_learnt() -> None:
    current, old, rollout, advantage, weights = (f32(-1.0, -1.5).requires_grad_() for _ in range(5))
    result = icepop_policy_loss(current, old, rollout, advantage, weights)
    found = torch.autograd.grad(result.loss, [current, old, rollout, advantage, weights], allow_unused=True)
    assert [gradient is not None for gradient in found] == [True, False, False, False, False]


def test_verdicts_carry_no_graph() -> None:
    ratio = f32(0.9, 1.1).requires_grad_()
    assert not raw_ratio(ratio, f32(0.0, 0.0)).requires_grad
    gates = icepop_gate(ratio, 2.0), dis_gate(ratio, 0.2, 0.28), tis_gate(ratio, 0.0, 2.0), no_gate(ratio)
    assert not any(gate.weights.requires_grad for gate in gates)


def test_nan_is_no_ratio_for_any_gate() -> None:
    for gate in (icepop_gate(f32(NAN), 2.0), dis_gate(f32(NAN), 0.2, 0.28), tis_gate(f32(NAN), 0.0, 2.0)):
        assert gate.nonfinite.tolist() == [True]
        assert gate.trusted.tolist() == [False]
        assert (gate.low | gate.high).tolist() == [False]
        assert gate.weights.tolist() == [0.0]


# PPO's clip


@pytest.mark.parametrize(("ratio", "advantage"), [(1.28, 1.0), (0.8, -1.0)])
def test_ppo_at_its_end_is_not_clipped(ratio: float, advantage: float) -> None:
    end = torch.tensor(ratio, dtype=torch.float32)
    current = end.log().reshape(1).requires_grad_()
    exact = float(torch.exp(current.detach()))
    # Only a ratio that came out exactly at the end tests the end; eps is set so that it is.
    eps_low, eps_high = (1.0 - exact, 0.28) if advantage < 0 else (0.2, exact - 1.0)
    result = clipped_policy_loss(
        current, f32(0.0), no_gate(f32(1.0)), f32(advantage), one_row(1), eps_low=eps_low, eps_high=eps_high
    )
    assert not (result.clip_low | result.clip_high).any()
    assert result.loss.item() == pytest.approx(-exact * advantage)
    assert torch.autograd.grad(result.loss, current)[0].item() == pytest.approx(-exact * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.1, -1.0, 1.1, 1.1),
    ],
)
def test_ppo_clips_only_where_it_would_gain(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    result, found = loss_of([math.log(ratio)], [0.0], [0.0], [advantage])
    assert result.loss.item() == pytest.approx(loss, abs=2e-6)
    assert found.item() == pytest.approx(gradient, abs=2e-6)
    assert bool(result.clip_high[0]) is (loss == -1.28)
    assert bool(result.clip_low[0]) is (loss == 0.8)


def test_zero_advantage_is_never_clipped() -> None:
    result, gradient = loss_of([math.log(3.0), math.log(0.1)], [0.0, 0.0], [0.0, 0.0], [0.0, -0.0])
    assert not (result.clip_low | result.clip_high).any()
    assert gradient.tolist() == [0.0, 0.0]


# Log-probs that are none


@pytest.mark.parametrize("bad", [-INF, INF, NAN, 0.5, 1.01e-4, -9999.0])
@pytest.mark.parametrize("correction", ["icepop", "tis", "none"])
def test_a_bad_rollout_log_prob_costs_that_token_only(bad: float, correction: str) -> None:
    result, gradient = loss_of([-1.0, -1.0], [-1.0, -1.0], [bad, -1.0], correction=correction)
    assert result.trusted.tolist() == [False, True]
    assert result.bad_log_probs.tolist() == [True, False]
    assert result.nonfinite.tolist() == [not math.isfinite(bad), False]
    # The other token keeps its weight of one half: the denominator has not changed.
    assert result.loss.item() == pytest.approx(-0.5)
    assert gradient.tolist() == [0.0, -0.5]


def test_log_probs_of_zero_and_rounding_above_it_are_legal() -> None:
    assert trusted_log_probs(f32(0.0, -0.0, 1e-4, 9.9e-5, -300.0)).all()


def test_current_minus_infinity_is_rejected_low() -> None:
    ratio = raw_ratio(f32(-INF), f32(-1.0))
    assert ratio.tolist() == [0.0]
    gate = dis_gate(ratio, 0.2, 0.28)
    assert gate.low.tolist() == [True]
    assert not gate.nonfinite.any()
    result, gradient = loss_of([-INF, -1.0], [-1.0, -1.0], [-1.0, -1.0])
    assert result.trusted.tolist() == [False, True]
    assert gradient.tolist() == [0.0, -0.5]


def test_both_minus_infinity_is_nonfinite() -> None:
    ratio = raw_ratio(f32(-INF), f32(-INF))
    assert icepop_gate(ratio, 2.0).nonfinite.tolist() == [True]
    assert dis_gate(ratio, 0.2, 0.28).nonfinite.tolist() == [True]
    result, gradient = loss_of([-1.0, -1.0], [-INF, -1.0], [-INF, -1.0])
    assert result.nonfinite.tolist() == [True, False]
    assert gradient.tolist() == [0.0, -0.5]


@pytest.mark.parametrize("log_ratio", [89.0, 199.7])
def test_overflow_of_the_mismatch_is_rejected_high(log_ratio: float) -> None:
    result, gradient = loss_of([-0.5, -0.5], [-0.5, -0.5], [-0.5 - log_ratio, -0.5])
    assert result.gate.high.tolist() == [True, False]
    assert torch.isfinite(gradient).all()
    assert gradient.tolist() == [0.0, -0.5]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_overflow_of_the_policy_ratio_is_untrusted(advantage: float) -> None:
    """With a negative advantage PPO does not clip above: the loss would be infinite."""
    result, gradient = loss_of([-0.5, -0.5], [-200.0, -0.5], [-200.0, -0.5], [advantage, advantage])
    assert result.trusted.tolist() == [False, True]
    assert result.nonfinite.tolist() == [True, False]
    assert torch.isfinite(result.loss)
    assert gradient.tolist() == [0.0, -0.5 * advantage]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_advantage_costs_that_token_only(bad: float) -> None:
    result, gradient = loss_of([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [bad, 1.0])
    assert result.nonfinite.tolist() == [True, False]
    assert gradient.tolist() == [0.0, -0.5]


def test_nan_on_an_observation_token_is_ignored() -> None:
    """Losses see action tokens only: selecting them by mask leaves the observation's NaN behind."""
    action = torch.tensor([True, False, True])
    current = f32(-1.0, NAN, -1.0).requires_grad_()
    old, rollout = f32(-1.0, NAN, -1.0), f32(-1.0, NAN, -1.0)
    result = icepop_policy_loss(current[action], old[action], rollout[action], f32(1.0, 1.0), one_row(2))
    assert not result.nonfinite.any()
    assert torch.autograd.grad(result.loss, current)[0].tolist() == [-0.5, 0.0, -0.5]


# Batches with nothing to learn


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_all_tokens_rejected(entropy_coef: float) -> None:
    current = f32(-1.0, -1.0).requires_grad_()
    entropy = (current * -1.0).clone()
    result = icepop_policy_loss(
        current, f32(-1.0, -1.0), f32(-5.0, -5.0), f32(1.0, 1.0), one_row(2), entropy=entropy, entropy_coef=entropy_coef
    )
    assert result.skip_step
    assert result.loss.item() == 0.0
    assert result.loss.requires_grad
    assert torch.autograd.grad(result.loss, current)[0].tolist() == [0.0, 0.0]


def test_a_part_without_trusted_tokens_keeps_its_entropy() -> None:
    current = f32(-1.0, -1.0).requires_grad_()
    entropy = (current * -1.0).clone()
    result = icepop_policy_loss(
        current,
        f32(-1.0, -1.0),
        f32(-5.0, -5.0),
        f32(1.0, 1.0),
        one_row(2),
        entropy=entropy,
        entropy_coef=0.1,
        is_partial=True,
    )
    assert result.loss.item() == pytest.approx(-0.1)
    assert result.entropy_loss == pytest.approx(-0.1)


def test_entropy_bonus_covers_rejected_tokens_with_the_same_weights() -> None:
    current = f32(-1.0, -1.0, -1.0).requires_grad_()
    entropy = f32(0.2, 0.4, NAN).requires_grad_()
    weights = torch.tensor([0.25, 0.5, 0.25])
    result = icepop_policy_loss(
        current, f32(-1, -1, -1), f32(-1, -5, -1), f32(0, 0, 0), weights, entropy=entropy, entropy_coef=0.01
    )
    assert result.entropy_loss == pytest.approx(-0.01 * (0.25 * 0.2 + 0.5 * 0.4))
    assert torch.autograd.grad(result.loss, entropy)[0].tolist() == pytest.approx([-0.0025, -0.005, 0.0])


def test_no_tokens_at_all() -> None:
    empty = torch.zeros(0)
    result = icepop_policy_loss(empty.clone().requires_grad_(), empty, empty, empty, empty)
    assert result.skip_step
    assert result.loss.item() == 0.0
    assert result.loss.requires_grad


def test_an_empty_response_has_no_weight_and_is_not_counted() -> None:
    rows = torch.tensor([0, 0, 2])
    weights = aggregation_weights(rows, mode="seq_mean", num_rows=3)
    assert weights.tolist() == [0.25, 0.25, 0.5]
    # ... but its reward is in the statistics of its group.
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64), norm="mean")
    assert advantages.tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_batch_of_empty_responses(mode: Mode) -> None:
    weights = aggregation_weights(
        torch.zeros(0, dtype=torch.int64),
        mode=mode,
        num_rows=2,
        rollout_of_row=torch.tensor([0, 1]),
        max_length=4,
    )
    assert weights.tolist() == []


# Groups


def test_a_group_of_one_is_an_error_for_a_group_estimator() -> None:
    with pytest.raises(UntrainableError, match=r"^group_of_one: groups \[1\]"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))


def test_a_group_with_one_counted_member_is_an_error_too() -> None:
    with pytest.raises(UntrainableError, match="group_of_one"):
        group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), counted=torch.tensor([True, False]))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_an_invalid_reward_is_refused_by_name(bad: float) -> None:
    with pytest.raises(UntrainableError, match=r"^reward_invalid: members \[1\]"):
        group_advantages(torch.tensor([1.0, bad]), torch.tensor([0, 0]))


def test_no_members_have_no_advantages() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_stale_members_count_towards_incompleteness() -> None:
    lags = trajectory_lags(torch.tensor([5, 5, 3, 3]), torch.arange(4), 4, reference=5)
    plan = complete_groups(torch.zeros(4, dtype=torch.int64), torch.full((4,), 4), is_fresh(lags, 1))
    assert plan.dropped_groups.tolist() == [0]


def test_members_that_never_came_count_towards_incompleteness() -> None:
    plan = complete_groups(torch.tensor([7, 7]), torch.tensor([4, 4]), torch.tensor([True, True]))
    assert plan.dropped_groups.tolist() == [7]
    plan = complete_groups(torch.tensor([7, 7]), torch.tensor([4, 4]), torch.tensor([True, True]), pad_rule="ge_half")
    assert plan.member_index.tolist() == [0, 1, 0, 1]


# Versions


def test_a_lag_of_exactly_tau_is_kept() -> None:
    assert version_refusal(3, 5, reference=5, tau=2) is None
    assert version_refusal(3, 5, reference=6, tau=2) == reasons.STALE
    assert is_fresh(torch.tensor([2, 3]), 2).tolist() == [True, False]


def test_a_version_newer_than_the_reference_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="future_version"):
        trajectory_lags(torch.tensor([4, 6]), torch.tensor([0, 0]), 1, reference=5)
    assert version_refusal(4, 6, reference=5, tau=9) == reasons.FUTURE_VERSION


def test_mixed_versions_are_refused_under_icepop() -> None:
    assert version_refusal(4, 5, reference=5, tau=9, required=5) == reasons.MIXED_VERSIONS
    assert version_refusal(4, 5, reference=5, tau=9) is None
    assert version_refusal(4, 4, reference=5, tau=9, required=5) == reasons.STALE
    require_version(torch.tensor([5, 5]), 5)
    require_version(torch.tensor([], dtype=torch.int64), 5)
    with pytest.raises(UntrainableError, match=r"^mixed_versions: .* \[4, 5\]"):
        require_version(torch.tensor([5, 4, 5]), 5)


def test_the_oldest_token_of_any_segment_decides() -> None:
    versions, rollouts = torch.tensor([9, 8, 9, 9]), torch.tensor([0, 0, 1, 0])
    assert trajectory_lags(versions, rollouts, 3, reference=10).tolist() == [2, 1, 0]
    assert lag_histogram(torch.tensor([2, 1, 2])) == {2: 2, 1: 1}


# Options outside their range


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: icepop_gate(f32(1.0), 0.5), "icepop_beta"),
        (lambda: icepop_gate(f32(1.0), NAN), "icepop_beta"),
        (lambda: icepop_gate(f32(1.0), 2.0, pop_value="other"), "pop_value"),  # type: ignore[arg-type]
        (lambda: dis_gate(f32(1.0), 1.0, 0.2), "eps_low"),
        (lambda: dis_gate(f32(1.0), -0.1, 0.2), "eps_low"),
        (lambda: dis_gate(f32(1.0), 0.1, -0.2), "eps_high"),
        (lambda: tis_gate(f32(1.0), 2.0, 1.0), "tis_low"),
        (lambda: tis_gate(f32(1.0), 0.0, 0.0), "tis_high"),
        (lambda: loss_of([-1.0], [-1.0], [-1.0], eps_low=1.0), "eps_low"),
        (lambda: loss_of([-1.0], [-1.0], [-1.0], eps_high=-1.0), "eps_high"),
        (lambda: loss_of([-1.0], [-1.0], [-1.0], entropy_coef=-1.0), "entropy_coef"),
        (lambda: loss_of([-1.0], [-1.0], [-1.0], entropy_coef=1.0), "entropy"),
        (lambda: loss_of([-1.0], [-1.0], [-1.0], correction="other"), "correction"),
        (lambda: loss_of([-1.0], [-1.0, -1.0], [-1.0]), "one length"),
        (lambda: aggregation_weights(torch.tensor([0]), mode="other", num_rows=1), "aggregation"),  # type: ignore[arg-type]
        (lambda: aggregation_weights(torch.tensor([0]), mode="const", num_rows=1), "max_length"),
        (lambda: aggregation_weights(torch.tensor([0]), mode="rollout_mean", num_rows=1), "rollout_of_row"),
        (lambda: group_advantages(f32(1.0), torch.tensor([0]), norm="other"), "adv_norm"),  # type: ignore[arg-type]
        (lambda: group_advantages(f32(1.0), torch.tensor([0]), eps=-1.0), "adv_eps"),
        (lambda: is_fresh(torch.tensor([0]), -1), "staleness_tau"),
        (lambda: version_refusal(0, 0, reference=0, tau=-1), "staleness_tau"),
        (lambda: complete_groups(torch.tensor([0]), torch.tensor([1]), torch.tensor([True]), pad_rule="x"), "pad_rule"),  # type: ignore[arg-type]
        (lambda: complete_groups(torch.tensor([0]), torch.tensor([0]), torch.tensor([True])), "group size"),
        (lambda: complete_groups(torch.tensor([0, 0]), torch.tensor([2, 3]), torch.tensor([True, True])), "group size"),
        (lambda: complete_groups(torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([True, True])), "at most 1"),
    ],
)
def test_options_are_refused_by_name(call: object, field: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=field):
        call()


# Metrics


def test_metrics_of_a_damaged_batch() -> None:
    result, _ = loss_of([-1.0, -1.0, -1.0], [-1.0, -1.0, NAN], [-1.0, NAN, -1.0])
    metrics = policy_metrics(
        current_logp=f32(-1.0, -1.0, -1.0),
        old_logp=f32(-1.0, -1.0, NAN),
        rollout_logp=f32(-1.0, NAN, -1.0),
        advantage=f32(1.0, 1.0, 1.0),
        entropy=f32(0.5, NAN, 1.5),
        gate_weight=result.gate_weights,
        trusted=result.trusted,
        verdicts=Verdicts.of(result),
    )
    assert metrics["trusted_tokens"] == 1
    assert metrics["nonfinite_tokens"] == 2
    assert metrics["entropy_mean"] == pytest.approx(1.0)
    assert metrics["mismatch_abs_max"] == 0.0
    assert metrics["ess"] == pytest.approx(1.0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_numbers_that_are_no_log_probs_are_counted_and_not_averaged() -> None:
    """Case D9: an engine's stand-in is finite, so nothing but its value gives it away; nor is 0.5 a log-prob."""
    result, _ = loss_of([-1.0] * 4, [-1.0] * 4, [-1.5, -9999.0, 0.5, -1.0])
    metrics = policy_metrics(
        current_logp=f32(-1.0, -1.0, -1.0, -1.0),
        old_logp=f32(-1.0, -1.0, -1.0, -1.0),
        rollout_logp=f32(-1.5, -9999.0, 0.5, -1.0),
        advantage=f32(1.0, 1.0, 1.0, 1.0),
        entropy=None,
        gate_weight=result.gate_weights,
        trusted=result.trusted,
        verdicts=Verdicts.of(result),
    )
    assert metrics["bad_log_prob_tokens"] == 2
    assert metrics["mismatch_abs_max"] == 0.5
    assert metrics["mismatch_abs_mean"] == 0.25
    assert metrics["mismatch_ratio_max"] == pytest.approx(math.exp(0.5))


def test_clip_shares_count_tokens_that_lost_their_gradient() -> None:
    ratio = torch.tensor([0.5, 0.5, 0.5, 1.5, 1.5], dtype=torch.float64)
    advantage = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    zeros, everything = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.bool)

    def shares(trusted: Tensor) -> tuple[float, float]:
        rollout = torch.where(trusted, zeros, NAN)
        result = icepop_policy_loss(ratio.log(), zeros, rollout, advantage, torch.full_like(zeros, 0.2))
        assert torch.equal(result.trusted, trusted)
        metrics = policy_metrics(
            current_logp=ratio.log(),
            old_logp=zeros,
            rollout_logp=rollout,
            advantage=advantage,
            entropy=None,
            gate_weight=result.gate_weights,
            trusted=result.trusted,
            verdicts=Verdicts.of(result),
        )
        return metrics["clip_frac_low"], metrics["clip_frac_high"]

    assert shares(everything) == (0.4, 0.2)
    everything[0] = False
    assert shares(everything) == (0.2, 0.2)


def test_metrics_of_nothing() -> None:
    empty = torch.zeros(0)
    metrics = policy_metrics(
        current_logp=empty,
        old_logp=empty,
        rollout_logp=empty,
        advantage=empty,
        entropy=None,
        gate_weight=empty,
        trusted=empty.bool(),
        verdicts=Verdicts(*(empty.bool() for _ in range(4))),
    )
    assert metrics == {"action_tokens": 0.0, "trusted_tokens": 0.0}


def test_effective_sample_size() -> None:
    assert effective_sample_size(f32(1, 1, 1, 1)) == 4.0
    assert effective_sample_size(f32(1, 0, 0, 0)) == 1.0
    assert effective_sample_size(f32(0, 0)) == 0.0
    assert effective_sample_size(f32(2, 1)) == pytest.approx(9 / 5)


def test_fixed_sum_does_not_depend_on_the_number_of_threads() -> None:
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).double() * 1e3 + 1 / 3
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            sums.append(fixed_sum(values).item())
    finally:
        torch.set_num_threads(before)
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] == pytest.approx(float(values.numpy().sum()), abs=1e-6)
