"""The likeliest tokens of a distribution, in one order for everybody (algorithms.md §4.8, §4.16)."""

from __future__ import annotations

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError


def teacher_top_k(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs ``[N, k]`` of the k likeliest of ``[N, V]``: by log-prob, ties by lower id.

    Raises:
        ConfigError: not ``1 <= k <= V``.
    """
    if not 1 <= k <= log_probs.shape[-1]:
        raise ConfigError(f"k: expected 1 to {log_probs.shape[-1]}, got {k}")
    values, ids = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    return ids[:, :k], values[:, :k]
