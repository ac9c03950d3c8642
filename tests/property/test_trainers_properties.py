"""Properties of algorithms.md §6 that concern gates, aggregation and the GRPO loss."""

from __future__ import annotations

import math
from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolltape.trainers.advantages import group_advantages
from rolltape.trainers.aggregation import Mode, aggregation_weights
from rolltape.trainers.gates import dis_gate, icepop_gate, no_gate, tis_gate
from rolltape.trainers.groups import PadRule, complete_groups
from rolltape.trainers.losses import icepop_policy_loss
from rolltape.trainers.safe_math import weighted_sum

MODES = st.sampled_from(get_args(Mode))
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) > 0)
RATIOS = st.one_of(st.floats(0.0, 16.0, width=32), st.sampled_from([math.nan, math.inf, 0.0, 0.5, 1.0, 2.0, 1e38]))


def rows_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def weights_of(lengths: list[int], mode: Mode) -> Tensor:
    rollouts = torch.arange(len(lengths)) // 2
    return aggregation_weights(
        rows_of(lengths), mode=mode, num_rows=len(lengths), rollout_of_row=rollouts, max_length=7
    )


class Batch:
    """Random tokens of some rows, in float64; about a third of them far enough off to be rejected."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = sum(lengths)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(count, dtype=torch.float64, generator=generator)

        self.rows = rows_of(lengths)
        self.rollout = -noise(1.0).abs() - 0.01
        self.old = self.rollout + noise(0.7)
        self.current = self.old + noise(0.3)
        self.advantage = noise(1.0)
        self.entropy = noise(1.0).abs()

    def loss(self, index: Tensor, weights: Tensor, **options: object) -> tuple[float, Tensor]:
        """Loss of some tokens, and its gradient over all."""
        current = self.current.clone().requires_grad_()
        entropy = self.entropy + 0.1 * current
        result = icepop_policy_loss(
            current[index],
            self.old[index],
            self.rollout[index],
            self.advantage[index],
            weights[index],
            entropy=entropy[index],
            entropy_coef=0.02,
            is_partial=True,
            **options,  # type: ignore[arg-type]
        )
        return result.loss.item(), torch.autograd.grad(result.loss, current)[0]


# 1. Splits, order


@given(LENGTHS, MODES, st.integers(0, 2**31), st.data())
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same_loss_and_gradient(
    lengths: list[int], mode: Mode, seed: int, data: st.DataObject
) -> None:
    batch = Batch(lengths, seed)
    weights = weights_of(lengths, mode)
    count = len(batch.rows)
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    whole, gradient = batch.loss(torch.arange(count), weights)
    parts = [batch.loss(torch.nonzero(part_of == part).flatten(), weights) for part in range(3)]
    assert math.isclose(sum(loss for loss, _ in parts), whole, abs_tol=1e-9)
    torch.testing.assert_close(sum(grad for _, grad in parts), gradient, atol=1e-9, rtol=0)


@given(LENGTHS, MODES, st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_token_order_does_not_matter(lengths: list[int], mode: Mode, seed: int) -> None:
    batch = Batch(lengths, seed)
    weights = weights_of(lengths, mode)
    order = torch.randperm(len(batch.rows), generator=torch.Generator().manual_seed(seed))
    whole, gradient = batch.loss(torch.arange(len(order)), weights)
    shuffled, shuffled_gradient = batch.loss(order, weights)
    assert math.isclose(whole, shuffled, abs_tol=1e-9)
    torch.testing.assert_close(gradient, shuffled_gradient, atol=1e-12, rtol=0)


@given(LENGTHS, MODES, st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_weights_follow_a_permutation_of_the_rows(lengths: list[int], mode: Mode, seed: int) -> None:
    """Renaming rows (rollout of each kept) gives every token the weight that it had."""
    place = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    rollouts = torch.arange(len(lengths)) // 2
    moved = torch.empty_like(rollouts)
    moved[place] = rollouts
    weights = aggregation_weights(
        place[rows_of(lengths)], mode=mode, num_rows=len(lengths), rollout_of_row=moved, max_length=7
    )
    assert torch.equal(weights, weights_of(lengths, mode))


# Aggregation


@given(LENGTHS)
def test_means_have_weights_that_sum_to_one(lengths: list[int]) -> None:
    for mode in ("seq_mean", "token_mean", "rollout_mean"):
        assert math.isclose(weights_of(lengths, mode).double().sum().item(), 1.0, abs_tol=1e-6)


@given(LENGTHS)
def test_every_row_weighs_the_same_under_seq_mean(lengths: list[int]) -> None:
    weights = weights_of(lengths, "seq_mean").double()
    sums = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, rows_of(lengths), weights)
    used = torch.tensor(lengths) > 0
    torch.testing.assert_close(sums[used], torch.full((int(used.sum()),), 1.0 / int(used.sum())).double())


@given(LENGTHS, st.integers(0, 2**31), st.data())
def test_token_mean_does_not_see_where_rows_are_cut(lengths: list[int], seed: int, data: st.DataObject) -> None:
    losses = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    count = sum(lengths)
    cut = data.draw(st.lists(st.integers(0, count), max_size=4).map(sorted))
    bounds = torch.tensor([0, *cut, count])
    other = bounds.diff().tolist()
    first = weighted_sum(losses, weights_of(lengths, "token_mean")).item()
    assert weighted_sum(losses, weights_of(other, "token_mean")).item() == first


@given(LENGTHS, MODES, st.lists(st.integers(0, 6), max_size=3))
def test_empty_rows_change_nothing(lengths: list[int], mode: Mode, after: list[int]) -> None:
    padded = [*lengths, *([0] * (len(after) + len(lengths) % 2))]
    assert torch.equal(weights_of(padded, mode), weights_of(lengths, mode))


# 2. Untrusted tokens


@given(LENGTHS, st.integers(0, 2**31), st.sampled_from(["icepop", "tis", "none"]), st.data())
@settings(max_examples=60, deadline=None)
def test_untrusted_tokens_have_no_gradient(lengths: list[int], seed: int, correction: str, data: st.DataObject) -> None:
    batch = Batch(lengths, seed)
    count = len(batch.rows)
    bad = data.draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1.0, -9999.0]), max_size=count))
    batch.rollout[: len(bad)] = torch.tensor(bad, dtype=torch.float64)
    current = batch.current.clone().requires_grad_()
    result = icepop_policy_loss(
        current,
        batch.old,
        batch.rollout,
        batch.advantage,
        weights_of(lengths, "seq_mean"),
        correction=correction,  # type: ignore[arg-type]
    )
    gradient = torch.autograd.grad(result.loss, current)[0]
    assert not result.trusted[: len(bad)].any()
    assert torch.isfinite(gradient).all()
    assert torch.equal(gradient[~result.trusted], torch.zeros(int((~result.trusted).sum()), dtype=torch.float64))
    assert torch.equal(result.gate_weights[~result.trusted], torch.zeros_like(result.gate_weights[~result.trusted]))


# Gates


@given(st.lists(RATIOS, min_size=1, max_size=8), st.floats(1.0, 8.0))
def test_icepop_keeps_exactly_the_closed_interval(values: list[float], beta: float) -> None:
    ratio = torch.tensor(values, dtype=torch.float32)
    low, high = (torch.tensor(end, dtype=torch.float32) for end in (1.0 / beta, beta))
    gate = icepop_gate(ratio, beta)
    assert torch.equal(gate.trusted, (ratio >= low) & (ratio <= high))
    assert torch.equal(gate.weights, torch.where(gate.trusted, ratio, torch.zeros_like(ratio)))
    assert torch.equal(icepop_gate(ratio, beta, pop_value="binary").weights, gate.trusted.float())
    # Every token has exactly one verdict.
    verdicts = torch.stack([gate.trusted, gate.low, gate.high, gate.nonfinite]).sum(0)
    assert verdicts.tolist() == [1] * len(values)


@given(st.lists(RATIOS, min_size=1, max_size=8), st.floats(0.0, 0.99), st.floats(0.0, 8.0))
def test_dis_keeps_exactly_the_open_interval(values: list[float], eps_low: float, eps_high: float) -> None:
    ratio = torch.tensor(values, dtype=torch.float32)
    low, high = (torch.tensor(end, dtype=torch.float32) for end in (1.0 - eps_low, 1.0 + eps_high))
    gate = dis_gate(ratio, eps_low, eps_high)
    assert torch.equal(gate.trusted, (ratio > low) & (ratio < high))
    assert torch.equal(gate.weights, torch.where(gate.trusted, ratio, torch.zeros_like(ratio)))


@given(st.lists(RATIOS, min_size=1, max_size=8), st.floats(1.0, 8.0))
def test_tis_agrees_with_icepop_inside_and_stays_inside(values: list[float], beta: float) -> None:
    ratio = torch.tensor(values, dtype=torch.float32)
    pop, clamp = icepop_gate(ratio, beta), tis_gate(ratio, 1.0 / beta, beta)
    assert torch.equal(clamp.weights[pop.trusted], pop.weights[pop.trusted])
    low, high = (torch.tensor(end, dtype=torch.float32) for end in (1.0 / beta, beta))
    inside = (clamp.weights >= low) & (clamp.weights <= high)
    assert torch.equal(inside | clamp.nonfinite, torch.ones_like(inside))
    assert torch.equal(clamp.trusted, ~torch.isnan(ratio))


# 4. Limits


@given(LENGTHS, st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_wide_binary_icepop_is_plain_grpo(lengths: list[int], seed: int) -> None:
    batch = Batch(lengths, seed)
    everything, weights = torch.arange(sum(lengths)), weights_of(lengths, "seq_mean")
    wide = batch.loss(everything, weights, beta=1e30, pop_value="binary")
    plain = batch.loss(everything, weights, correction="none")
    assert wide[0] == plain[0]
    assert torch.equal(wide[1], plain[1])


@given(LENGTHS, st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_without_mismatch_all_corrections_agree(lengths: list[int], seed: int) -> None:
    batch = Batch(lengths, seed)
    batch.old = batch.rollout.clone()
    everything, weights = torch.arange(sum(lengths)), weights_of(lengths, "seq_mean")
    results = [
        batch.loss(everything, weights, **options)
        for options in (
            {"pop_value": "ratio"},
            {"pop_value": "binary"},
            {"correction": "tis", "tis_low": 0.5},
            {"correction": "none"},
        )
    ]
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])
    assert torch.equal(no_gate(batch.old).weights, torch.ones_like(batch.old))


# Advantages and groups


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from(["mean_std", "mean"]),
)
def test_advantages_are_centred_and_do_not_see_the_order(rewards: list[list[float]], seed: int, norm: str) -> None:
    values = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    groups = rows_of([len(group) for group in rewards])
    result = group_advantages(values, groups, norm=norm)  # type: ignore[arg-type]
    sums = torch.zeros(len(rewards), dtype=torch.float64).index_add(0, groups, result)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-6, rtol=0)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    shuffled = group_advantages(values[order], groups[order], norm=norm)  # type: ignore[arg-type]
    torch.testing.assert_close(shuffled, result[order], atol=1e-8, rtol=1e-8)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(-100, 100))
def test_mean_advantages_ignore_a_common_shift(rewards: list[float], shift: float) -> None:
    values, groups = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    shifted = group_advantages(values + shift, groups, norm="mean")
    torch.testing.assert_close(shifted, group_advantages(values, groups, norm="mean"), atol=2e-3, rtol=1e-6)


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4),
    st.sampled_from(["gt_half", "ge_half"]),
)
def test_completed_groups_are_full_or_gone(valid: list[list[bool]], rule: PadRule) -> None:
    sizes = [len(group) for group in valid]
    group = rows_of(sizes)
    flat = torch.tensor([v for members in valid for v in members])
    plan = complete_groups(group, torch.tensor(sizes)[group], flat, pad_rule=rule)
    for number, members in enumerate(valid):
        chosen = plan.member_index[group[plan.member_index] == number]
        assert len(chosen) in {0, len(members)}
        assert (number in plan.dropped_groups.tolist()) == (len(chosen) == 0)
        if len(chosen):
            # Copies are spread evenly: no member is used twice more often than another.
            counts = torch.bincount(chosen, minlength=len(flat))[group == number]
            used = counts[torch.tensor(members)]
            assert int(used.max() - used.min()) <= 1
            assert int(counts.sum()) == int(used.sum())
    originals = plan.member_index[~plan.is_padding]
    assert len(torch.unique(originals)) == len(originals)
    assert flat[plan.member_index].all()
