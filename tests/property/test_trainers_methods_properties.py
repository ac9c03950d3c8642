"""Properties 1, 3, 5, 6 and 7 of algorithms.md §6 for DIS, GAE, distillation and CompactionRL."""

from __future__ import annotations

import math
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltape.trainers.aggregation import aggregation_weights
from rolltape.trainers.compaction import compaction_advantages, compaction_policy_loss
from rolltape.trainers.dis import dis_policy_loss, dis_surrogate
from rolltape.trainers.distill import opd_gap, opd_policy_loss
from rolltape.trainers.gae import credited_rewards, discounted_sums, generalised_advantages, terminal_rewards
from rolltape.trainers.gates import dis_gate
from rolltape.trainers.reverse_kl import full_reverse_kl, teacher_top_k, top_k_reverse_kl
from rolltape.trainers.safe_math import raw_ratio

SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)
UNIT = st.floats(0.0, 1.0)
EPS_LOW, EPS_HIGH = 0.3, 1.0
loss_of = partial(dis_policy_loss, eps_low=EPS_LOW, eps_high=EPS_HIGH)
surrogate_of = partial(dis_surrogate, eps_low=EPS_LOW, eps_high=EPS_HIGH)
FEW = settings(max_examples=40, deadline=None)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


def loop_advantages(values: Tensor, rewards: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE of one row as the textbook writes it."""
    found = torch.zeros_like(values)
    following = carried = 0.0
    for index in reversed(range(len(values))):
        carried = float(rewards[index]) + gamma * following - float(values[index]) + gamma * lam * carried
        following = float(values[index])
        found[index] = carried
    return found


class Tokens:
    """Log-probs of a random batch; some ratios lie outside the interval."""

    def __init__(self, count: int, seed: int) -> None:
        parts = noise(seed, 3, count)
        self.rollout = -parts[0].abs() - 0.01
        self.current = (self.rollout + 0.4 * parts[1]).requires_grad_()
        self.advantage = parts[2]
        self.weights = aggregation_weights(torch.zeros(count, dtype=torch.int64), mode="token_mean", num_rows=1)


# 1, 3. DIS


@given(st.integers(1, 12), SEEDS)
@FEW
def test_detached_gradient_is_the_surrogates(count: int, seed: int) -> None:
    tokens = Tokens(count, seed)
    given_ = (tokens.current, tokens.rollout, tokens.advantage, tokens.weights)
    result = loss_of(*given_)
    detached = gradient(result.loss, tokens.current)
    torch.testing.assert_close(detached, gradient(surrogate_of(*given_), tokens.current), atol=1e-12, rtol=0)
    assert torch.equal(detached != 0, result.trusted)


@given(st.integers(1, 12), SEEDS)
@FEW
def test_without_the_detach_the_gradient_differs(count: int, seed: int) -> None:
    """The guard: coefficient f A (1 + log π) in place of f A, wherever a token is kept."""
    tokens = Tokens(count, seed)
    kept = dis_gate(raw_ratio(tokens.current, tokens.rollout), EPS_LOW, EPS_HIGH).trusted
    ratio = torch.where(kept, (tokens.current - tokens.rollout).exp(), 0.0)
    wrong = gradient(-(tokens.weights.double() * ratio * tokens.advantage * tokens.current).sum(), tokens.current)
    result = loss_of(tokens.current, tokens.rollout, tokens.advantage, tokens.weights)
    right = gradient(result.loss, tokens.current)
    torch.testing.assert_close(wrong, right * (1 + tokens.current.detach()), atol=1e-12, rtol=0)
    assert bool((wrong != right)[kept].all())


@given(st.integers(2, 12), SEEDS, st.integers(1, 11))
@FEW
def test_any_split_gives_the_same_loss_and_gradient(count: int, seed: int, cut: int) -> None:
    tokens = Tokens(count, seed)
    whole = loss_of(tokens.current, tokens.rollout, tokens.advantage, tokens.weights).loss
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = [
        loss_of(
            tokens.current[index],
            tokens.rollout[index],
            tokens.advantage[index],
            tokens.weights[index],
            is_partial=True,
        ).loss
        for index in (order[:cut], order[cut:])
    ]
    assert math.isclose(sum(part.item() for part in parts), whole.item(), abs_tol=1e-9)
    torch.testing.assert_close(
        gradient(parts[0] + parts[1], tokens.current), gradient(whole, tokens.current), atol=1e-12, rtol=0
    )


# 5. Distillation


@given(st.integers(1, 12), SEEDS, st.sampled_from(["eq1", "score"]))
@FEW
def test_teacher_that_is_the_student_teaches_nothing(count: int, seed: int, form: str) -> None:
    tokens = Tokens(count, seed)
    gap = opd_gap(tokens.current, tokens.current)
    assert gap.advantage.count_nonzero() == 0
    old = tokens.current.detach()
    result = opd_policy_loss(tokens.current, old, tokens.rollout, gap.advantage, tokens.weights, form=form)  # type: ignore[arg-type]
    assert gradient(result.loss, tokens.current).count_nonzero() == 0


@given(st.integers(1, 6), st.integers(2, 9), SEEDS, st.integers(1, 7), st.data())
@FEW
def test_reverse_kl_over_a_vocabulary(count: int, vocab: int, seed: int, chunk_size: int, data: st.DataObject) -> None:
    """Against the formula; at k = V; at the teacher itself; and whatever the block size."""
    hidden, weight = noise(seed, count, 4).requires_grad_(), noise(seed + 1, vocab, 4).requires_grad_()
    log_q = torch.log_softmax(noise(seed + 2, count, vocab), -1)
    k = data.draw(st.integers(1, vocab))
    full = full_reverse_kl(hidden, weight, lambda begin, end: log_q[begin:end], chunk_size=chunk_size).divergence
    every = top_k_reverse_kl(hidden, weight, *teacher_top_k(log_q, vocab), chunk_size=chunk_size).divergence
    some = top_k_reverse_kl(hidden, weight, *teacher_top_k(log_q, k), chunk_size=chunk_size).divergence
    log_pi = torch.log_softmax(hidden @ weight.T, -1)
    naive = (log_pi.exp() * (log_pi - log_q)).sum(-1)
    torch.testing.assert_close(full, naive, atol=1e-10, rtol=0)
    torch.testing.assert_close(every, full, atol=1e-10, rtol=0)
    assert bool((some >= -1e-12).all())
    assert bool((some <= full + 1e-10).all())
    weights = noise(seed + 3, count)
    for of in (hidden, weight):
        expected = torch.autograd.grad((weights * naive).sum(), of, retain_graph=True)[0]
        for found in (full, every):
            actual = torch.autograd.grad((weights * found).sum(), of, retain_graph=True)[0]
            torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    itself = top_k_reverse_kl(hidden, weight, *teacher_top_k(log_pi.detach(), k), chunk_size=chunk_size).divergence
    assert itself.abs().max() < 1e-12
    assert gradient(itself.sum(), hidden).abs().max() < 1e-12


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_exist_for_one_block_at_a_time() -> None:
    """Forward and backward make nothing larger than a block, and nothing of a block's size waits for the backward."""
    count, vocab, width, chunk_size = 64, 500, 4, 8
    hidden, weight = noise(1, count, width).requires_grad_(), noise(2, vocab, width).requires_grad_()
    log_q = torch.log_softmax(noise(3, count, vocab), -1)
    ids, teacher = teacher_top_k(log_q, 3)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    for divergence in (
        lambda: full_reverse_kl(hidden, weight, lambda begin, end: log_q[begin:end], chunk_size=chunk_size),
        lambda: top_k_reverse_kl(hidden, weight, ids, teacher, chunk_size=chunk_size),
    ):
        with _Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = divergence().divergence.sum()  # type: ignore[no-untyped-call]
            torch.autograd.grad(loss, [hidden, weight])
        assert largest.elements == chunk_size * vocab
    assert all(elements < chunk_size * vocab for elements in kept)


# 6. GAE


@given(LENGTHS, SEEDS, UNIT, UNIT)
@FEW
def test_rows_without_observations_have_plain_gae(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rows = rows_of(lengths)
    values, rewards = noise(seed, 2, len(rows))
    found = generalised_advantages(values, rewards, rows, gamma=gamma, lam=lam)
    for row in range(len(lengths)):
        own = rows == row
        torch.testing.assert_close(
            found[own], loop_advantages(values[own], rewards[own], gamma, lam), atol=1e-9, rtol=0
        )
        alone = generalised_advantages(values[own], rewards[own], rows[own], gamma=gamma, lam=lam)
        assert torch.equal(alone, found[own])


@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any), SEEDS, UNIT, UNIT)
@FEW
def test_inserted_observations_change_nothing(actions: list[bool], seed: int, gamma: float, lam: float) -> None:
    """A response with observations (and rewards that arrive with them) against its action tokens alone."""
    is_action = torch.tensor(actions)
    positions = torch.nonzero(is_action).flatten()
    rows = torch.zeros(len(positions), dtype=torch.int64)
    values = noise(seed, len(positions))
    amounts = noise(seed + 1, len(actions))
    # Rewards before the first action have nobody to go to.
    places = torch.arange(int(positions[0]), len(actions))
    credited = credited_rewards(amounts[places], torch.zeros_like(places), places, rows, positions)
    expected = torch.zeros(len(positions), dtype=torch.float64)
    turn = is_action.long().cumsum(0) - 1
    for place in places.tolist():
        expected[turn[place]] += amounts[place]
    torch.testing.assert_close(credited, expected, atol=1e-12, rtol=0)
    compact = generalised_advantages(values, expected, rows, gamma=gamma, lam=lam)
    found = generalised_advantages(values, credited, rows, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, compact, atol=1e-12, rtol=0)
    torch.testing.assert_close(found, loop_advantages(values, expected, gamma, lam), atol=1e-9, rtol=0)


@given(LENGTHS, SEEDS, UNIT)
@FEW
def test_discounted_sums_against_powers(lengths: list[int], seed: int, factor: float) -> None:
    rows = rows_of(lengths)
    terms = noise(seed, len(rows))
    place = torch.arange(len(rows))
    ahead = (place[None, :] - place[:, None]).clamp(min=0).double()
    reach = (rows[None, :] == rows[:, None]) & (place[None, :] >= place[:, None])
    expected = torch.where(reach, torch.tensor(factor, dtype=torch.float64) ** ahead * terms, 0.0).sum(1)
    torch.testing.assert_close(discounted_sums(terms, rows, factor), expected, atol=1e-9, rtol=0)


# 7. CompactionRL


def corrected(values: Tensor, rows: Tensor, reward: float, num_rows: int, gamma: float, lam: float) -> Tensor:
    return compaction_advantages(
        values,
        torch.full((num_rows,), reward, dtype=torch.float64),
        rows,
        rollout_of_row=torch.zeros(num_rows, dtype=torch.int64),
        segment_index=torch.arange(num_rows),
        gamma=gamma,
        lam=lam,
    )


@given(LENGTHS, SEEDS, UNIT, UNIT)
@FEW
def test_one_segment_and_no_values_are_plain_gae(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rows, one = rows_of(lengths), torch.zeros(sum(lengths), dtype=torch.int64)
    values = noise(seed, len(rows))
    rewards = terminal_rewards(torch.tensor([1.5]), one)
    plain = generalised_advantages(values, rewards, one, gamma=gamma, lam=lam)
    assert torch.equal(corrected(values, one, 1.5, 1, gamma, lam), plain)
    zeros = torch.zeros_like(values)
    stitched = generalised_advantages(zeros, rewards, one, gamma=gamma, lam=lam)
    torch.testing.assert_close(corrected(zeros, rows, 1.5, len(lengths), gamma, lam), stitched, atol=1e-12, rtol=0)


@given(LENGTHS, SEEDS)
@FEW
def test_order_of_the_segments_in_a_batch_does_not_matter(lengths: list[int], seed: int) -> None:
    """Two rollouts, their segments shuffled among each other."""
    both = lengths + lengths[::-1]
    rollouts = torch.tensor([0] * len(lengths) + [1] * len(lengths))
    segments = torch.cat([torch.arange(len(lengths))] * 2)
    rows = rows_of(both)
    values = noise(seed, len(rows))
    rewards = torch.tensor([1.0, -2.0])[rollouts]
    found = compaction_advantages(
        values, rewards, rows, rollout_of_row=rollouts, segment_index=segments, gamma=0.9, lam=0.8
    )
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    tokens = torch.cat([torch.nonzero(rows == row).flatten() for row in order.tolist()])
    moved = compaction_advantages(
        values[tokens],
        rewards[order],
        rows_of([both[row] for row in order.tolist()]),
        rollout_of_row=rollouts[order],
        segment_index=segments[order],
        gamma=0.9,
        lam=0.8,
    )
    assert torch.equal(moved, found[tokens])


@given(LENGTHS, SEEDS, st.sampled_from(["ppo", "dis"]))
@FEW
def test_loss_does_not_see_where_segments_are_cut(lengths: list[int], seed: int, ratio: str) -> None:
    tokens = Tokens(sum(lengths), seed)
    losses = []
    for rows, count in ((rows_of(lengths), len(lengths)), (torch.zeros(sum(lengths), dtype=torch.int64), 1)):
        weights = aggregation_weights(rows, mode="token_mean", num_rows=count)
        result = compaction_policy_loss(
            tokens.current,
            tokens.current.detach(),
            tokens.rollout,
            tokens.advantage,
            weights,
            ratio=ratio,  # type: ignore[arg-type]
        )
        losses.append(result.loss.item())
    assert losses[0] == losses[1]
