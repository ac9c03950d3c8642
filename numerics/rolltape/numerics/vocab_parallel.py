"""Log-probs of given tokens where every rank holds some rows of the output matrix, as :mod:`rolltape.numerics.logprob`.

Each rank visits its own rows in blocks and keeps four numbers a token: its largest logit, and sums relative to it. Two
reductions then give every rank the log-sum-exp over the whole vocabulary. No rank ever sees another's logits, and
``[N, V]`` exists nowhere. Hidden states are the same on all ranks (tensor parallelism), and so are the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rolltape.numerics.logprob import CHUNK_ELEMENTS, TokenLogProbs
from rolltape.schema.errors import ConfigError


class VocabShard(NamedTuple):
    """Rows of the output matrix that one rank holds: ids ``first_id`` to ``first_id + num_ids - 1``."""

    first_id: int
    num_ids: int


def vocab_shard(vocab_size: int, rank: int, num_ranks: int) -> VocabShard:
    """The shard of a rank: contiguous, in rank order, sizes that differ by one at most (the larger ones first).

    Raises:
        ConfigError: there are fewer ids than ranks, or no such rank.
    """
    if not 0 <= rank < num_ranks <= vocab_size:
        raise ConfigError(f"expected 0 <= rank < num_ranks <= vocab_size, got {rank}, {num_ranks} and {vocab_size}")
    size, larger = divmod(vocab_size, num_ranks)
    return VocabShard(rank * size + min(rank, larger), size + (rank < larger))


def vocab_parallel_log_sum_exp(logits: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Log-sum-exp over the whole vocabulary of logits of which every rank holds some columns.

    Args:
        logits: ``[N, v]``, this rank's columns, at least one.
        group: the ranks that hold the vocabulary; default all.

    Returns ``[N]``, the same on every rank, in float32 (float64 for float64). The gradient of each rank's logits is
    exact when every rank computes the same loss from the result.
    """
    apply: Any = _LogSumExp.apply
    found: Tensor = apply(logits, group)
    return found


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    first_id: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = True,
) -> TokenLogProbs:
    """:func:`rolltape.numerics.logprob.linear_log_probs` over an output matrix that is split by rows.

    Every rank of ``group`` must make the same call, with its own rows. All get the same values. Each rank's loss must
    be the same function of them: then the gradient of ``hidden`` (added up over the ranks in the backward pass) is the
    one of a single device on every rank, and the gradient of ``weight`` is that of this rank's rows.

    Args:
        hidden: ``[N, H]``, the same on every rank.
        weight: ``[v, H]``, this rank's rows of the output matrix.
        token_ids: ``[N]`` integer ids of the whole vocabulary, the same on every rank.
        first_id: id of this rank's first row; see :func:`vocab_shard`.
        group: the ranks that hold the vocabulary; default all.
        temperature: the one the tokens were sampled at.
        chunk_size: rows of ``hidden`` per block; the default bounds a rank's block, as for a single device.
        with_entropy: also return the entropy.

    Raises:
        ConfigError: temperature or chunk size are not positive, shapes do not fit, a rank has no rows, or some id lies
            in no rank's rows or in several's (then every rank raises).
    """
    if not temperature > 0.0:
        raise ConfigError(f"temperature: expected > 0, got {temperature}")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise ConfigError(
            f"expected hidden [N, H] and weight [v >= 1, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if token_ids.shape != hidden.shape[:1]:
        raise ConfigError(f"token_ids: expected {list(hidden.shape[:1])}, got {list(token_ids.shape)}")
    rows = chunk_size if chunk_size is not None else max(1, CHUNK_ELEMENTS // weight.shape[0])
    if rows < 1:
        raise ConfigError(f"chunk_size: expected at least 1, got {rows}")
    apply: Any = _VocabParallelLogProbs.apply
    own_ids = token_ids.long() - first_id
    log_probs, entropy = apply(hidden, weight, own_ids, float(temperature), rows, group)
    return TokenLogProbs(log_probs, entropy if with_entropy else None)


def _accurate(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _block_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """``[b, v]``, formed in the inputs' dtype, then float32 or wider."""
    logits = functional.linear(hidden, weight).to(_accurate(hidden))
    return logits.div_(temperature) if temperature != 1.0 else logits


class _OwnSums(NamedTuple):
    """What one rank knows of each token's logits z; ``[N]`` each."""

    largest: Tensor
    """max z, of this rank."""
    exponentials: Tensor
    """sum exp(z - max)."""
    products: Tensor
    """sum exp(z - max) (z - max), for the entropy."""
    target: Tensor
    """z of the token itself, 0 where another rank has it."""
    found: Tensor
    """1 where this rank has the token, else 0."""


def _own_sums(hidden: Tensor, weight: Tensor, own_ids: Tensor, temperature: float, rows: int) -> _OwnSums:
    sums = _OwnSums(*(torch.zeros(len(hidden), dtype=_accurate(hidden), device=hidden.device) for _ in range(5)))
    inside = (own_ids >= 0) & (own_ids < weight.shape[0])
    sums.found.copy_(inside)
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        logits = _block_logits(hidden[block], weight, temperature)
        chosen = logits.gather(1, torch.where(inside[block], own_ids[block], 0)[:, None]).squeeze(1)
        sums.target[block] = torch.where(inside[block], chosen, 0.0)
        largest = logits.amax(1)
        shifted = logits.sub_(largest[:, None])
        exponentials = shifted.exp()
        sums.largest[block] = largest
        sums.exponentials[block] = exponentials.sum(1)
        sums.products[block] = exponentials.mul_(shifted).sum(1)
    return sums


def _reduced(sums: _OwnSums, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, log-prob and entropy of each token, from all ranks' sums; the same bits on every rank."""
    largest = sums.largest.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shift = sums.largest - largest
    scale = shift.exp()
    total = torch.stack(
        [
            sums.exponentials * scale,
            (sums.products + shift * sums.exponentials) * scale,
            sums.target,
            sums.found,
        ]
    )
    dist.all_reduce(total, dist.ReduceOp.SUM, group)
    exponentials, products, target, found = total.unbind()
    if not bool((found == 1.0).all()):
        wrong = torch.nonzero(found != 1.0).flatten().tolist()
        raise ConfigError(
            f"token_ids: expected each in the rows of exactly one rank, got tokens {wrong[:5]} in "
            f"{found[wrong[:5]].int().tolist()} ranks' rows; check first_id and the ids"
        )
    log_sum = exponentials.log()
    return largest + log_sum, target - largest - log_sum, log_sum - products / exponentials


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        own_ids: Tensor,
        temperature: float,
        rows: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        sums = _own_sums(hidden, weight, own_ids, temperature, rows)
        log_sum_exp, log_probs, entropy = _reduced(sums, group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, own_ids, log_sum_exp, entropy)
        ctx.temperature, ctx.rows, ctx.group = temperature, rows, group
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden, weight, own_ids, log_sum_exp, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_log_probs, grad_entropy = (
            torch.zeros_like(entropy) if grad is None else grad.to(entropy.dtype) for grad in grad_outputs
        )
        # Added up over blocks and ranks in float32 or wider, and rounded once.
        grad_hidden = torch.zeros_like(hidden, dtype=entropy.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if wants_weight else None
        inside = (own_ids >= 0) & (own_ids < weight.shape[0])
        for start in range(0, len(hidden), ctx.rows):
            block = slice(start, start + ctx.rows)
            log_softmax = _block_logits(hidden[block], weight, ctx.temperature).sub_(log_sum_exp[block, None])
            probs = log_softmax.exp()
            # d log p_y / d z_j = 1[j = y] - p_j and d H / d z_j = -p_j (log p_j + H).
            grad = log_softmax.add_(entropy[block, None]).mul_(-grad_entropy[block, None])
            grad = grad.sub_(grad_log_probs[block, None]).mul_(probs)
            own = torch.where(inside[block], grad_log_probs[block], 0.0)
            grad.scatter_add_(1, torch.where(inside[block], own_ids[block], 0)[:, None], own[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[block] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[block]
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, dist.ReduceOp.SUM, ctx.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        accurate = logits.to(_accurate(logits))
        largest = accurate.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        total = (accurate - largest[:, None]).exp().sum(1)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        found = largest + total.log()
        ctx.save_for_backward(logits, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        logits, found = ctx.saved_tensors
        probs = (logits.to(found.dtype) - found[:, None]).exp()
        return (probs * grad_outputs[0][:, None]).to(logits.dtype), None
