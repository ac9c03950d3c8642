"""Numerics that keep a bad token from spoiling a batch (algorithms.md §2.3).

Trust is decided on unclamped values. A token that is not trusted has its inputs replaced *before* the exponential and
its output selected away after it: a mask applied only afterwards leaves NaN gradients, and NaN times zero is NaN.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rolltape.schema.trust import MAX_LOG_PROB, SENTINELS

DIAGNOSTIC_CLAMP: Final = 20.0
"""Log-ratios are clamped to plus and minus this for metrics only."""

_SUM_BLOCK: Final = 4096


def trusted_log_probs(log_probs: Tensor, sentinels: tuple[float, ...] = SENTINELS) -> Tensor:
    """``[N]`` bool: finite, at most 1e-4 (rounding above 0), and no engine's stand-in for "unknown"."""
    return torch.isfinite(log_probs) & (log_probs <= MAX_LOG_PROB) & ~is_stand_in(log_probs, sentinels)


def is_stand_in(log_probs: Tensor, sentinels: tuple[float, ...] = SENTINELS) -> Tensor:
    """Bool, in the shape of ``log_probs``: what an engine writes where it has no log-prob."""
    found = torch.zeros_like(log_probs, dtype=torch.bool)
    for sentinel in sentinels:
        found |= log_probs == sentinel
    return found


def finite_log_ratio(log_probs: Tensor, reference: Tensor) -> Tensor:
    """``[N]`` bool: both log-probs and their difference are finite."""
    return torch.isfinite(log_probs) & torch.isfinite(reference) & torch.isfinite(log_probs - reference)


def raw_ratio(log_probs: Tensor, reference: Tensor) -> Tensor:
    """``exp(log_probs - reference)`` as it comes, detached: 0, inf and NaN stay visible to a gate's verdict."""
    return torch.exp(log_probs.detach() - reference.detach())


def safe_ratio(log_probs: Tensor, reference: Tensor, keep: Tensor) -> Tensor:
    """``exp(log_probs - reference)`` where ``keep``, exactly 1 elsewhere, differentiable in ``log_probs`` where kept.

    ``reference`` is a constant. Both are replaced by 0 where not kept, before they meet.
    """
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    kept = torch.where(keep, log_probs, zero)
    return torch.exp(kept - torch.where(keep, reference.detach().to(log_probs.dtype), zero))


def bound(value: float, like: Tensor) -> Tensor:
    """An interval's end in the dtype of the ratio: cast once, so a boundary case compares equal values."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def fixed_sum(values: Tensor) -> Tensor:
    """Sum of a flat tensor in float64, in an order that the number of threads does not change.

    Torch splits one long full sum by threads; sums of short rows it does not split.
    """
    flat = values.reshape(-1).double()
    short = -flat.numel() % _SUM_BLOCK
    if short and flat.numel() > _SUM_BLOCK:
        flat = torch.cat([flat, flat.new_zeros(short)])
    if flat.numel() > _SUM_BLOCK:
        flat = flat.view(-1, _SUM_BLOCK).sum(1)
    return flat.sum()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """``sum(weights * values)`` in float64; ``weights`` are constants."""
    return fixed_sum(values.double() * weights.detach().double())
