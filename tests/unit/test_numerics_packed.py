"""Packed log-probs: the shift by one, the micro-batch plan, and independence of how a batch is cut."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rolltape.numerics.models import build_model
from rolltape.numerics.packed import micro_batches, packed_log_probs, plan_micro_batches, score_micro_batch
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.weights import named_weights, weights_digest
from rolltape.schema.errors import ConfigError

LENGTHS = (6, 3, 0, 1, 8, 2)


@cache
def model() -> nn.Module:
    return build_model("char-64x2", 1)


def batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 16, (sum(lengths),), generator=generator, dtype=torch.int32)
    return ids, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def naive_log_probs(ids: Tensor, bounds: Tensor) -> Tensor:
    """Row by row, whole logits, the shift written out."""
    found = torch.zeros(len(ids))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end - start > 1:
            row = ids[start:end].long()
            log_softmax = torch.log_softmax(model()(input_ids=row[None]).logits[0].float(), dim=-1)
            found[start + 1 : end] = log_softmax[:-1].gather(1, row[1:, None]).squeeze(1)
    return found


def gradient_of(values: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model().named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(values, parameters), strict=True))


@pytest.mark.parametrize("token_budget", [1, 8, 17, 1000])
def test_equals_row_by_row(token_budget: int) -> None:
    ids, bounds = batch()
    with torch.no_grad():
        found = packed_log_probs(model(), ids, bounds, token_budget=token_budget).log_probs
        torch.testing.assert_close(found, naive_log_probs(ids, bounds), atol=1e-6, rtol=1e-6)
    assert found[bounds[:-1][torch.tensor(LENGTHS) > 0]].tolist() == [0.0] * 5


@pytest.mark.parametrize("token_budget", [1, 17])
def test_gradient_does_not_depend_on_the_cut_or_the_padding(token_budget: int) -> None:
    ids, bounds = batch()
    upstream = torch.randn(len(ids), generator=torch.Generator().manual_seed(3))

    def gradient(budget: int) -> dict[str, Tensor]:
        scores = packed_log_probs(model(), ids, bounds, token_budget=budget, with_entropy=True)
        assert scores.entropy is not None
        return gradient_of((upstream * (scores.log_probs + 0.1 * scores.entropy)).sum())

    expected = gradient(1000)
    for name, found in gradient(token_budget).items():
        torch.testing.assert_close(found, expected[name], atol=2e-6, rtol=1e-5)


def test_row_order_does_not_matter() -> None:
    ids, bounds = batch()
    order = [4, 0, 5, 1, 3, 2]
    pieces = [ids[bounds[row] : bounds[row + 1]] for row in order]
    moved_bounds = torch.tensor([0, *np.cumsum([len(piece) for piece in pieces])])
    with torch.no_grad():
        expected = packed_log_probs(model(), ids, bounds, token_budget=16).log_probs
        found = packed_log_probs(model(), torch.cat(pieces), moved_bounds, token_budget=16).log_probs
    for place, row in enumerate(order):
        moved = found[moved_bounds[place] : moved_bounds[place + 1]]
        torch.testing.assert_close(moved, expected[bounds[row] : bounds[row + 1]], atol=1e-6, rtol=0)


def test_the_same_call_gives_the_same_bits() -> None:
    ids, bounds = batch()
    first, second = (packed_log_probs(model(), ids, bounds, token_budget=12).log_probs for _ in range(2))
    assert torch.equal(first, second)


def test_a_later_token_changes_no_earlier_log_prob() -> None:
    ids, bounds = batch()
    changed = ids.clone()
    changed[5] = 3 + (changed[5] - 2) % 13
    with torch.no_grad():
        before = packed_log_probs(model(), ids, bounds, token_budget=1000).log_probs
        after = packed_log_probs(model(), changed, bounds, token_budget=1000).log_probs
    different = torch.nonzero(before != after).flatten().tolist()
    assert different == [5]


def test_only_scored_tokens_are_computed() -> None:
    ids, bounds = batch()
    scored = torch.zeros(len(ids), dtype=torch.bool)
    scored[[0, 4, 5, 12, 16]] = True
    with torch.no_grad():
        every = packed_log_probs(model(), ids, bounds, token_budget=1000).log_probs
        found = packed_log_probs(model(), ids, bounds, token_budget=1000, scored=scored).log_probs
    wanted = scored.clone()
    wanted[0] = False
    torch.testing.assert_close(found, torch.where(wanted, every, 0.0), atol=1e-6, rtol=0)
    parts = list(micro_batches(ids, bounds, token_budget=1000, scored=scored))
    # Row 1 has no scored token, and row 5's only candidate is not among them.
    assert sorted(row for part in parts for row in part.rows.tolist()) == [0, 4]


def test_worked_example_of_a_micro_batch() -> None:
    (part,) = micro_batches(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 3, 5]), token_budget=100)
    assert part.rows.tolist() == [0, 1]
    assert part.input_ids.tolist() == [[5, 6], [8, 0]]
    assert part.source.tolist() == [0, 1, 2]
    assert part.targets.tolist() == [6, 7, 9]
    assert part.flat_index.tolist() == [1, 2, 4]


def test_every_scorable_token_is_in_exactly_one_micro_batch() -> None:
    ids, bounds = batch()
    for budget in (1, 5, 9, 100):
        found = torch.cat([part.flat_index for part in micro_batches(ids, bounds, token_budget=budget)])
        starts = set(bounds[:-1].tolist())
        assert sorted(found.tolist()) == [t for t in range(len(ids)) if t not in starts]


def test_plan_is_longest_first_and_within_the_budget() -> None:
    plan = [rows.tolist() for rows in plan_micro_batches(np.array([3, 9, 0, 4, 9, 1]), 18)]
    assert plan == [[1, 4], [3, 0, 5]]
    assert [rows.tolist() for rows in plan_micro_batches(np.array([5, 2]), 1)] == [[0], [1]]
    assert plan_micro_batches(np.array([], dtype=np.int64), 5) == []


def test_temperature_and_entropy() -> None:
    ids, bounds = batch((5,))
    with torch.no_grad():
        logits = model()(input_ids=ids[None].long()).logits[0] / 0.5
        log_softmax = torch.log_softmax(logits, dim=-1)
        found = packed_log_probs(model(), ids, bounds, token_budget=99, temperature=0.5, with_entropy=True)
    assert found.entropy is not None
    expected = log_softmax[:-1].gather(1, ids[1:, None].long()).squeeze(1)
    torch.testing.assert_close(found.log_probs[1:], expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.entropy[1:], -(log_softmax.exp() * log_softmax).sum(1)[:-1], atol=1e-6, rtol=1e-6)
    assert found.entropy[0] == 0.0


def test_an_empty_batch() -> None:
    none = packed_log_probs(
        model(), torch.zeros(0, dtype=torch.int32), torch.tensor([0]), token_budget=5, with_entropy=True
    )
    assert none.log_probs.shape == (0,)
    assert none.entropy is not None
    assert none.entropy.shape == (0,)


@pytest.mark.parametrize(
    ("bounds", "scored", "budget", "field"),
    [
        ([0, 4], None, 8, "cu_seqlens"),
        ([1, 5], None, 8, "cu_seqlens"),
        ([0, 3, 2, 5], None, 8, "cu_seqlens"),
        ([0, 5], [True] * 4, 8, "scored"),
        ([0, 5], None, 0, "token_budget"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(
    bounds: list[int], scored: list[bool] | None, budget: int, field: str
) -> None:
    mask = None if scored is None else torch.tensor(scored)
    with pytest.raises(ConfigError, match=field):
        list(micro_batches(torch.arange(5), torch.tensor(bounds), token_budget=budget, scored=mask))


def test_scorer_scores_like_the_trainer() -> None:
    ids, bounds = batch()
    scorer = ModelScorer(model(), temperature=0.8, token_budget=16, rows_per_part=3)
    scores = scorer.score(ids, bounds)
    assert not scores.requires_grad
    with torch.no_grad():
        expected = packed_log_probs(model(), ids, bounds, token_budget=16, temperature=0.8).log_probs
    assert torch.equal(scores, expected)
    assert scorer.identity.temperature == 0.8
    assert scorer.identity.weights_digest == weights_digest(named_weights(model()))
    seen = torch.zeros(len(ids))
    for part in scorer.distributions(ids, bounds):
        assert part.log_probs.shape[0] <= 3
        torch.testing.assert_close(part.log_probs.exp().sum(1), torch.ones(len(part.log_probs)))
        seen[part.flat_index] = part.log_probs.gather(1, ids[part.flat_index, None].long()).squeeze(1)
    torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-6)


def test_score_micro_batch_by_micro_batch_equals_the_whole() -> None:
    ids, bounds = batch()
    whole = packed_log_probs(model(), ids, bounds, token_budget=9).log_probs
    expected = gradient_of(whole.sum())
    total: dict[str, Tensor] = {}
    for part in micro_batches(ids, bounds, token_budget=9):
        scores = score_micro_batch(model(), part)
        assert torch.equal(scores.log_probs, whole[part.flat_index])
        for name, gradient in gradient_of(scores.log_probs.sum()).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in expected.items():
        torch.testing.assert_close(total[name], gradient, atol=2e-6, rtol=1e-5)
