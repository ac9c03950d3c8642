"""Two ranks with half of the output matrix each find what one device finds, values and gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.integration.distributed.ranks import Ranks
from torch import Tensor

from rolltape.numerics.logprob import linear_log_probs
from rolltape.numerics.vocab_parallel import (
    VocabShard,
    vocab_parallel_log_probs,
    vocab_parallel_log_sum_exp,
    vocab_shard,
)
from rolltape.schema.errors import ConfigError

N, H, V = 23, 8, 29


class Result(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def draw(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, ids and upstream gradients of both outputs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, dtype=torch.float64, generator=generator) * scale
    weight = torch.randn(V, H, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, V, (N,), generator=generator)
    # Both ends of both shards are among them.
    ids[:4] = torch.tensor([0, 14, 15, V - 1])
    upstream = torch.randn(2, N, dtype=torch.float64, generator=generator)
    return hidden.to(dtype), weight.to(dtype), ids, upstream


def single(dtype: torch.dtype, temperature: float, scale: float, entropy_weight: float) -> Result:
    hidden, weight, ids, upstream = draw(dtype, scale)
    hidden.requires_grad_()
    weight.requires_grad_()
    found = linear_log_probs(hidden, weight, ids, temperature=temperature)
    assert found.entropy is not None
    loss = (upstream[0] * found.log_probs).sum() + entropy_weight * (upstream[1] * found.entropy).sum()
    grads = torch.autograd.grad(loss, [hidden, weight])
    return Result(found.log_probs.detach(), found.entropy.detach(), *grads)


def split(dtype: torch.dtype, temperature: float, scale: float, entropy_weight: float, chunk: int | None) -> Result:
    """The same on one of the ranks, with its rows of the weight."""
    hidden, weight, ids, upstream = draw(dtype, scale)
    shard = vocab_shard(V, dist.get_rank(), dist.get_world_size())
    rows = weight[shard.first_id : shard.first_id + shard.num_ids].clone().requires_grad_()
    hidden.requires_grad_()
    found = vocab_parallel_log_probs(
        hidden, rows, ids, first_id=shard.first_id, temperature=temperature, chunk_size=chunk
    )
    assert found.entropy is not None
    loss = (upstream[0] * found.log_probs).sum() + entropy_weight * (upstream[1] * found.entropy).sum()
    grads = torch.autograd.grad(loss, [hidden, rows])
    return Result(found.log_probs.detach(), found.entropy.detach(), *grads)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.5])
def test_equals_the_single_device(
    two_ranks: Ranks, temperature: float, chunk: int | None, entropy_weight: float
) -> None:
    expected = single(torch.float64, temperature, 1.0, entropy_weight)
    found = two_ranks.run(split, torch.float64, temperature, 1.0, entropy_weight, chunk)
    for result in found:
        for ours, theirs in zip(result[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    stitched = torch.cat([result.grad_weight for result in found])
    torch.testing.assert_close(stitched, expected.grad_weight, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "scale", "tolerance"), [(torch.float32, 1.0, 1e-6), (torch.float64, 40.0, 1e-12)])
def test_ranks_agree_to_the_bit_and_with_the_single_device_also_where_logits_are_far_apart(
    two_ranks: Ranks, dtype: torch.dtype, scale: float, tolerance: float
) -> None:
    """At scale 40 whole shards have no probability: sums relative to each rank's own maximum must not overflow."""
    expected = single(dtype, 1.0, scale, 0.5)
    found = two_ranks.run(split, dtype, 1.0, scale, 0.5, 7)
    for name in ("log_probs", "entropy", "grad_hidden"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    stitched = found[0]._replace(grad_weight=torch.cat([result.grad_weight for result in found]))
    for name, ours, theirs in zip(Result._fields, stitched, expected, strict=True):
        size = float(theirs.abs().max().clamp(min=1.0))
        assert float((ours - theirs).abs().max()) <= tolerance * size, name


def test_values_are_float32_and_gradients_bfloat16_for_bfloat16_inputs(two_ranks: Ranks) -> None:
    expected = single(torch.bfloat16, 1.0, 1.0, 0.0)
    for result in two_ranks.run(split, torch.bfloat16, 1.0, 1.0, 0.0, None):
        assert result.log_probs.dtype == torch.float32
        assert result.grad_hidden.dtype == result.grad_weight.dtype == torch.bfloat16
        torch.testing.assert_close(result.log_probs, expected.log_probs, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(result.grad_hidden, expected.grad_hidden, atol=2e-2, rtol=2e-2)


def log_sum_exp_of_columns(temperature: float) -> tuple[Tensor, Tensor]:
    hidden, weight, _, upstream = draw(torch.float64)
    shard = vocab_shard(V, dist.get_rank(), dist.get_world_size())
    columns = (hidden @ weight.T / temperature)[:, shard.first_id : shard.first_id + shard.num_ids]
    columns = columns.clone().requires_grad_()
    found = vocab_parallel_log_sum_exp(columns)
    (gradient,) = torch.autograd.grad((found * upstream[0]).sum(), columns)
    return found.detach(), gradient


def test_log_sum_exp_equals_the_single_device(two_ranks: Ranks) -> None:
    hidden, weight, _, upstream = draw(torch.float64)
    logits = (hidden @ weight.T / 0.8).requires_grad_()
    expected = torch.logsumexp(logits, 1)
    (gradient,) = torch.autograd.grad((expected * upstream[0]).sum(), logits)
    found = two_ranks.run(log_sum_exp_of_columns, 0.8)
    for value, _ in found:
        torch.testing.assert_close(value, expected.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in found], 1), gradient, atol=1e-12, rtol=1e-12)


def error_of(first_ids: tuple[int, int], token_id: int) -> str:
    hidden, weight, ids, _ = draw(torch.float32)
    ids[2] = token_id
    first = first_ids[dist.get_rank()]
    try:
        vocab_parallel_log_probs(hidden, weight[first : first + 15], ids, first_id=first)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_every_rank_refuses_an_id_that_no_rank_or_several_have(two_ranks: Ranks) -> None:
    for message in two_ranks.run(error_of, (0, 15), V):
        assert "got tokens [2] in [0] ranks' rows" in message
    for message in two_ranks.run(error_of, (0, 14), 14):
        assert "in [2" in message
    assert two_ranks.run(error_of, (0, 15), 3) == ["no error"] * 2


def test_shards_are_contiguous_and_cover_the_vocabulary() -> None:
    assert [vocab_shard(29, rank, 4) for rank in range(4)] == [
        VocabShard(0, 8),
        VocabShard(8, 7),
        VocabShard(15, 7),
        VocabShard(22, 7),
    ]
    with pytest.raises(ConfigError, match="got 2, 2 and 29"):
        vocab_shard(29, 2, 2)
    with pytest.raises(ConfigError, match="got 0, 3 and 2"):
        vocab_shard(2, 0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": 0.0}, "temperature"), ({"chunk_size": 0}, "chunk_size")],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    hidden, weight, ids, _ = draw(torch.float32)
    with pytest.raises(ConfigError, match=message):
        vocab_parallel_log_probs(hidden, weight, ids, first_id=0, **options)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, ids, _ = draw(torch.float32)
    with pytest.raises(ConfigError, match="hidden"):
        vocab_parallel_log_probs(hidden, weight[:0], ids, first_id=0)
    with pytest.raises(ConfigError, match="token_ids"):
        vocab_parallel_log_probs(hidden, weight, ids[1:], first_id=0)
