"""Chunked log-probs equal the naive ones, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltape.numerics import logprob
from rolltape.numerics.logprob import linear_log_probs
from rolltape.schema.errors import ConfigError

N, H, V = 37, 12, 29


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return draw(N, H, V, torch.float32)


def draw(n: int, h: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(v, h, dtype=dtype, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), generator=generator)


def naive(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_softmax.gather(1, ids[:, None]).squeeze(1), -(log_softmax.exp() * log_softmax).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("chunk_size", [1, 7, N, 1000, None])
def test_equals_the_naive_form(temperature: float, chunk_size: int | None) -> None:
    hidden, weight, ids = inputs()
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    found = linear_log_probs(hidden, weight, ids, temperature=temperature, chunk_size=chunk_size)
    expected = naive(hidden, weight, ids, temperature)
    assert found.entropy is not None
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    total = (upstream[0] * found.log_probs).sum() + (upstream[1] * found.entropy).sum()
    reference = (upstream[0] * expected[0]).sum() + (upstream[1] * expected[1]).sum()
    for ours, theirs in zip(
        torch.autograd.grad(total, [hidden, weight]), torch.autograd.grad(reference, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_of_one_output_alone(output: int) -> None:
    hidden, weight, ids = draw(5, 3, 6, torch.float64)

    def one(h: Tensor, w: Tensor) -> Tensor:
        value = linear_log_probs(h, w, ids, temperature=0.8, chunk_size=2)[output]
        assert value is not None
        return value

    assert torch.autograd.gradcheck(one, (hidden, weight))


def test_gradient_of_the_temperature_scaled_sum_of_both() -> None:
    hidden, weight, ids = draw(5, 3, 6, torch.float64)

    def both(h: Tensor, w: Tensor) -> Tensor:
        scores = linear_log_probs(h, w, ids, temperature=1.3, chunk_size=4)
        assert scores.entropy is not None
        return scores.log_probs * 2.0 + scores.entropy * 0.5

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_only_the_wanted_inputs_get_gradients() -> None:
    hidden, weight, ids = inputs()
    scores = linear_log_probs(hidden, weight.detach(), ids)
    (gradient,) = torch.autograd.grad(scores.log_probs.sum(), hidden)
    assert gradient.shape == hidden.shape
    scores = linear_log_probs(hidden.detach(), weight, ids)
    (gradient,) = torch.autograd.grad(scores.log_probs.sum(), weight)
    assert gradient.shape == weight.shape


def test_entropy_is_left_out_on_demand() -> None:
    hidden, weight, ids = inputs()
    scores = linear_log_probs(hidden, weight, ids, with_entropy=False)
    assert scores.entropy is None
    assert torch.equal(scores.log_probs, linear_log_probs(hidden, weight, ids).log_probs)
    scores.log_probs.sum().backward()  # type: ignore[no-untyped-call]


def test_bfloat16_inputs_give_float32_log_probs() -> None:
    hidden, weight, ids = inputs()
    scores = linear_log_probs(hidden.bfloat16(), weight.bfloat16(), ids)
    assert scores.log_probs.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, naive(hidden, weight, ids, 1.0)[0], atol=0.2, rtol=0.05)
    scores.log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_no_rows() -> None:
    hidden, weight, _ = inputs()
    scores = linear_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert scores.log_probs.shape == (0,)


def test_no_block_holds_more_logits_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, ids = inputs()
    seen: list[int] = []
    plain = torch.log_softmax

    def spy(values: Tensor, dim: int, out: Tensor) -> Tensor:
        seen.append(values.numel())
        return plain(values, dim=dim, out=out)

    monkeypatch.setattr(torch, "log_softmax", spy)
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", 4 * V)
    linear_log_probs(hidden, weight, ids).log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert max(seen) == 4 * V
    assert sum(seen) == 2 * N * V


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    hidden, weight, ids = inputs()
    with pytest.raises(ConfigError, match="temperature"):
        linear_log_probs(hidden, weight, ids, temperature=temperature)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, ids = inputs()
    with pytest.raises(ConfigError, match="hidden"):
        linear_log_probs(hidden[:, :3], weight, ids)
    with pytest.raises(ConfigError, match="token_ids"):
        linear_log_probs(hidden, weight, ids[:3])
    with pytest.raises(ConfigError, match="chunk_size"):
        linear_log_probs(hidden, weight, ids, chunk_size=0)
