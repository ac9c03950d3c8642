"""Log-probs over a kept support equal the naive ones over the same tokens, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.numerics.logprob import linear_log_probs
from rolltape.numerics.models import build_model
from rolltape.numerics.packed import micro_batches, packed_log_probs, score_micro_batch
from rolltape.numerics.support import TokenSupport
from rolltape.schema.errors import ConfigError

N, H, V = 23, 6, 11


def draw(dtype: torch.dtype, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, H, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, V, (n,), generator=generator)


def masks(ids: Tensor, seed: int = 1) -> Tensor:
    """Which tokens each of ``ids`` was sampled from, bool [n, V]; every third from the whole vocabulary."""
    kept = torch.rand(len(ids), V, generator=torch.Generator().manual_seed(seed)) < 0.4
    kept.scatter_(1, ids[:, None].long(), value=True)
    kept[::3] = True
    return kept


def support_of(kept: Tensor) -> TokenSupport:
    """A full row is one without a support."""
    limited = kept & ~kept.all(1, keepdim=True)
    counts = limited.sum(1)
    return TokenSupport(
        ids=torch.nonzero(limited)[:, 1].int(), offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    )


def naive(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, kept: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T / temperature
    over_kept = torch.log_softmax(torch.where(kept, logits, -torch.inf), dim=-1)
    whole = torch.log_softmax(logits, dim=-1)
    return over_kept.gather(1, ids[:, None]).squeeze(1), -(whole.exp() * whole).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 5, N, None])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_equals_the_naive_form_and_its_gradients(
    temperature: float, chunk_size: int | None, with_entropy: bool
) -> None:
    hidden, weight, ids = draw(torch.float64)
    kept = masks(ids)
    found = linear_log_probs(
        hidden,
        weight,
        ids,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        support=support_of(kept),
    )
    expected = naive(hidden, weight, ids, temperature, kept)
    torch.testing.assert_close(found.log_probs, expected[0], atol=1e-12, rtol=0)
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    total, reference = (upstream[0] * found.log_probs).sum(), (upstream[0] * expected[0]).sum()
    if found.entropy is not None:
        torch.testing.assert_close(found.entropy, expected[1], atol=1e-12, rtol=0)
        total, reference = total + (upstream[1] * found.entropy).sum(), reference + (upstream[1] * expected[1]).sum()
    for ours, theirs in zip(
        torch.autograd.grad(total, [hidden, weight]), torch.autograd.grad(reference, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_the_derivative_is_that_of_the_value() -> None:
    hidden, weight, ids = draw(torch.float64, 5)
    support = support_of(masks(ids))
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, ids, temperature=0.8, chunk_size=2, support=support).log_probs,
        (hidden, weight),
    )


def test_tokens_of_the_whole_vocabulary_keep_their_bits() -> None:
    hidden, weight, ids = draw(torch.float32)
    kept = masks(ids)
    plain = linear_log_probs(hidden, weight, ids)
    limited = linear_log_probs(hidden, weight, ids, support=support_of(kept))
    whole = kept.all(1)
    assert torch.equal(plain.log_probs[whole], limited.log_probs[whole])
    assert bool((limited.log_probs[~whole] > plain.log_probs[~whole]).all()), "less mass to share"


def test_a_token_outside_its_support_has_probability_0_and_no_gradient() -> None:
    hidden, weight, ids = draw(torch.float64, 3)
    support = TokenSupport(ids=((ids + 1) % V).int(), offsets=torch.tensor([0, 1, 2, 3]))
    found = linear_log_probs(hidden, weight, ids, support=support)
    assert found.log_probs.tolist() == [float("-inf")] * 3
    gradients = torch.autograd.grad(torch.where(torch.isfinite(found.log_probs), found.log_probs, 0.0).sum(), hidden)
    assert not gradients[0].any()


def test_a_support_of_one_token_is_certain() -> None:
    hidden, weight, ids = draw(torch.float64, 3)
    support = TokenSupport(ids=ids.int(), offsets=torch.arange(4))
    found = linear_log_probs(hidden, weight, ids, support=support).log_probs
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0)
    assert torch.autograd.grad(found.sum(), hidden)[0].abs().max() < 1e-12


def test_supports_go_with_their_tokens() -> None:
    support = TokenSupport(ids=torch.tensor([4, 5, 9, 1, 2, 3]), offsets=torch.tensor([0, 2, 2, 3, 6]))
    taken = support.take(torch.tensor([3, 1, 0]))
    assert taken is not None
    assert taken.ids.tolist() == [1, 2, 3, 4, 5]
    assert taken.offsets.tolist() == [0, 3, 3, 5]
    assert support.take(torch.tensor([1])) is None
    block = support.block(slice(1, 3))
    assert (block.ids.tolist(), block.inside.tolist()) == ([[0], [9]], [[False], [True]])
    assert block.is_limited().tolist() == [False, True]
    assert block.holds(torch.tensor([0, 0])).tolist() == [True, False]


def test_as_many_supports_as_tokens_are_asked_for() -> None:
    hidden, weight, ids = draw(torch.float32)
    with pytest.raises(ConfigError, match=r"support: expected 24 offsets, got 3"):
        linear_log_probs(hidden, weight, ids, support=TokenSupport(ids=ids[:2], offsets=torch.arange(3)))


@pytest.mark.parametrize("token_budget", [8, 20, 64])
def test_any_cut_into_micro_batches_gives_the_same_log_probs_and_gradients(token_budget: int) -> None:
    model = build_model("char-64x2", 0)
    bounds = torch.tensor([0, 7, 11, 12, 20])
    ids = torch.randint(0, 12, (20,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    kept = torch.ones(20, 12, dtype=torch.bool)
    kept[:, 8:] = torch.rand(20, 4, generator=torch.Generator().manual_seed(4)) < 0.5
    kept[5:, :3] = False
    kept.scatter_(1, ids[:, None].long(), value=True)
    support = support_of(kept)
    whole = packed_log_probs(model, ids, bounds, token_budget=10**6, support=support).log_probs
    whole.sum().backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    found = torch.zeros(20)
    for part in micro_batches(ids, bounds, token_budget=token_budget, support=support):
        scores = score_micro_batch(model, part)
        found[part.flat_index] = scores.log_probs.detach()
        scores.log_probs.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, whole.detach(), atol=1e-6, rtol=0)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
