"""Log-probs of given tokens from hidden states, without ever holding a ``[N, V]`` matrix.

The output matrix is visited in blocks of rows; the backward pass makes each block's logits again instead of keeping
them. Values and gradients equal the naive ``log_softmax`` and ``gather`` (a test pins both).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rolltape.numerics.support import SupportBlock, TokenSupport
from rolltape.schema.errors import ConfigError

CHUNK_ELEMENTS: Final = 1 << 23
"""Logits that one block may hold, unless ``chunk_size`` says otherwise: 32 MiB of float32."""


class TokenLogProbs(NamedTuple):
    """Log-prob of each given token, and entropy of the distribution that it was scored under."""

    log_probs: Tensor
    """``[N]`` float32 (float64 for float64 inputs), nat."""
    entropy: Tensor | None
    """``[N]``, nat, of the unmasked distribution at the same temperature; ``None`` when not asked for."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = True,
    support: TokenSupport | None = None,
) -> TokenLogProbs:
    """Score ``token_ids`` under ``softmax(hidden @ weight.T / temperature)``.

    Args:
        hidden: ``[N, H]``, the state *before* each token (the caller has done the shift by one).
        weight: ``[V, H]``, the output matrix.
        token_ids: ``[N]`` integer ids in ``[0, V)``.
        temperature: the one the tokens were sampled at; the sampled distribution is the one that is scored.
        chunk_size: rows per block; by default as many as :data:`CHUNK_ELEMENTS` logits allow.
        with_entropy: also return the entropy (one more pass over each block).
        support: the tokens that each of the ``N`` was sampled from, on the inputs' device. Where it has any, its
            log-prob is normalised over them, ``z_y - logsumexp(z_j, j in support)``; one that is not among them has
            -inf, and passes no gradient on. The entropy stays that of the whole distribution (algorithms.md §2.6).

    Both outputs are differentiable in ``hidden`` and ``weight``. Logits are formed in the inputs' dtype and everything
    after them in float32.

    Raises:
        ConfigError: temperature or chunk size are not positive, or shapes do not fit.
    """
    if not temperature > 0.0:
        raise ConfigError(
            f"temperature: expected > 0 (greedy decoding has no distribution to score), got {temperature}"
        )
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"expected hidden [N, H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if token_ids.shape != hidden.shape[:1]:
        raise ConfigError(f"token_ids: expected {list(hidden.shape[:1])}, got {list(token_ids.shape)}")
    rows = chunk_size if chunk_size is not None else max(1, CHUNK_ELEMENTS // weight.shape[0])
    if rows < 1:
        raise ConfigError(f"chunk_size: expected at least 1, got {rows}")
    if support is not None and len(support.offsets) != len(token_ids) + 1:
        raise ConfigError(f"support: expected {len(token_ids) + 1} offsets, got {len(support.offsets)}")
    apply: Any = _LinearLogProbs.apply
    log_probs, entropy = apply(hidden, weight, token_ids.long(), float(temperature), rows, with_entropy, support)
    return TokenLogProbs(log_probs, entropy if with_entropy else None)


class _Blocks:
    """Two buffers of a block's logits, used for every block in turn: a fresh one each time would fragment the heap."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, rows: int) -> None:
        shape = (min(rows, hidden.shape[0]), weight.shape[0])
        self._weight = weight
        self._temperature = temperature
        self._spare = torch.empty(shape, dtype=_accumulation_dtype(hidden), device=hidden.device)
        self._values = torch.empty_like(self._spare)

    def log_softmax(self, hidden: Tensor) -> Tensor:
        """``[b, V]``, valid until the next call."""
        logits = self._spare[: hidden.shape[0]]
        if hidden.dtype == logits.dtype:
            torch.mm(hidden, self._weight.t(), out=logits)
        else:
            logits.copy_(functional.linear(hidden, self._weight))
        if self._temperature != 1.0:
            logits.div_(self._temperature)
        return torch.log_softmax(logits, dim=-1, out=self._values[: hidden.shape[0]])

    def probs(self, log_softmax: Tensor) -> Tensor:
        """``exp`` of the current block's log-softmax, in the other buffer."""
        return torch.exp(log_softmax, out=self._spare[: log_softmax.shape[0]])


def _accumulation_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        rows: int,
        with_entropy: bool,
        support: TokenSupport | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = _accumulation_dtype(hidden)
        log_probs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        entropy = torch.zeros_like(log_probs)
        blocks = _Blocks(hidden, weight, temperature, rows)
        for start in range(0, hidden.shape[0], rows):
            block = slice(start, start + rows)
            log_softmax = blocks.log_softmax(hidden[block])
            log_probs[block] = log_softmax.gather(1, token_ids[block, None]).squeeze(1)
            if support is not None:
                kept = _Kept.of(log_softmax, token_ids[block], support.block(block))
                log_probs[block] = torch.where(kept.holds, log_probs[block] - kept.log_mass, -torch.inf)
            if with_entropy:
                entropy[block] = -blocks.probs(log_softmax).mul_(log_softmax).sum(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, token_ids, entropy)
        ctx.temperature, ctx.rows, ctx.support = temperature, rows, support
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_log_probs, grad_entropy = grad_outputs
        hidden, weight, token_ids, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        if grad_log_probs is None and grad_entropy is None:
            return grad_hidden, grad_weight, None, None, None, None, None
        blocks = _Blocks(hidden, weight, ctx.temperature, ctx.rows)
        for start in range(0, hidden.shape[0], ctx.rows):
            block = slice(start, start + ctx.rows)
            log_softmax = blocks.log_softmax(hidden[block])
            of_token = None if grad_log_probs is None else grad_log_probs[block]
            kept = None
            if ctx.support is not None and of_token is not None:
                kept = _Kept.of(log_softmax, token_ids[block], ctx.support.block(block))
                of_token = torch.where(kept.holds, of_token, 0.0)
            grad = _block_logit_gradient(
                blocks,
                log_softmax,
                token_ids[block],
                of_token,
                None if grad_entropy is None else grad_entropy[block],
                entropy[block],
                kept,
            )
            if ctx.temperature != 1.0:
                grad = grad.div_(ctx.temperature)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[block] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[block])
        return grad_hidden, grad_weight, None, None, None, None, None


class _Kept(NamedTuple):
    """What a block's tokens kept of their distributions."""

    block: SupportBlock
    holds: Tensor  # [b], whether the token is in its own support
    log_mass: Tensor  # [b], of its support; 0 where that is the whole vocabulary
    probs: Tensor  # [b, k], renormalised over the support; 0 behind it

    @classmethod
    def of(cls, log_softmax: Tensor, token_ids: Tensor, block: SupportBlock) -> _Kept:
        values = torch.where(block.inside, log_softmax.gather(1, block.ids), -torch.inf)
        # The log_softmax of a row of -inf would be NaN.
        log_mass = torch.where(block.is_limited(), torch.logsumexp(values, 1), 0.0)
        return cls(block, block.holds(token_ids), log_mass, torch.exp(values - log_mass[:, None]))


def _block_logit_gradient(
    blocks: _Blocks,
    log_softmax: Tensor,
    token_ids: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    kept: _Kept | None,
) -> Tensor:
    """Gradient of one block's (tempered) logits.

    ``d log p_y / d z_j = 1[j = y] - p_j``, with ``p`` renormalised over what was ``kept``, and
    ``d H / d z_j = -p_j (log p_j + H)``. Overwrites ``log_softmax``: a block is large, and this is its last use.
    """
    grad_normaliser = grad_log_probs
    if kept is not None and grad_log_probs is not None:
        grad_normaliser = grad_log_probs * ~kept.block.is_limited()
    if grad_entropy is None:
        assert grad_normaliser is not None
        grad = log_softmax.exp_().mul_(-grad_normaliser[:, None])
    else:
        probs = blocks.probs(log_softmax)
        grad = log_softmax.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_normaliser is not None:
            grad = grad.sub_(grad_normaliser[:, None])
        grad = grad.mul_(probs)
    if grad_log_probs is not None:
        grad.scatter_add_(1, token_ids[:, None], grad_log_probs[:, None])
        if kept is not None:
            grad.scatter_add_(1, kept.block.ids, kept.probs * -grad_log_probs[:, None])
    return grad
