"""Sampling: the declared distribution, one token of it by inverse CDF, and that token's log-prob."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rolltape.rollout.engine import SamplingConfig


class Sampled(NamedTuple):
    """One token for each of ``B`` rows."""

    token_ids: torch.Tensor  # int64 [B]
    log_probs: torch.Tensor  # float32 [B], under the distribution that the configuration declares
    support: torch.Tensor | None  # bool [B, V], kept tokens; None: all


def support_mask(log_probs_BV: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """The tokens that top-k and then top-p keep.

    Ranks go by probability, of equal ones by lowest id. Top-p keeps the shortest head of what top-k kept whose
    probability, renormalised there, reaches ``top_p``; the likeliest token always stays.

    Args:
        log_probs_BV: float32 [B, V], of the distribution after temperature.
        top_k: tokens to keep; 0 keeps all.
        top_p: in (0, 1].

    Returns:
        bool [B, V].
    """
    sorted_BV, order_BV = torch.sort(log_probs_BV, dim=-1, descending=True, stable=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if top_k > 0:
        keep_BV[:, top_k:] = False
    if top_p < 1:
        mass_BV = torch.where(keep_BV, sorted_BV, -torch.inf).double().softmax(dim=-1)
        before_BV = mass_BV.cumsum(dim=-1) - mass_BV
        keep_BV &= before_BV < top_p
        keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter_(1, order_BV, keep_BV)


def sample_tokens(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: SamplingConfig) -> Sampled:
    """Sample one token for each row.

    The token is the first whose cumulative probability (float64, in order of ids) exceeds the uniform number, so it
    depends on its own row and number alone.

    Args:
        logits_BV: [B, V], the model's.
        uniforms_B: float64 [B], in [0, 1).
        sampling: temperature, top-k and top-p.
    """
    logits_BV = logits_BV.float()
    if sampling.temperature == 0:
        return _likeliest(logits_BV)
    log_probs_BV = torch.log_softmax(logits_BV / sampling.temperature, dim=-1)
    support_BV = None
    if sampling.limits_support:
        support_BV = support_mask(log_probs_BV, top_k=sampling.top_k, top_p=sampling.top_p)
        log_probs_BV = torch.log_softmax(torch.where(support_BV, log_probs_BV, -torch.inf), dim=-1)
    token_ids_B = _inverse_cdf(log_probs_BV, uniforms_B)
    return Sampled(token_ids_B, _gather(log_probs_BV, token_ids_B), support_BV)


def _inverse_cdf(log_probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    cdf_BV = log_probs_BV.double().exp_().cumsum_(dim=-1)
    total_B1 = cdf_BV[:, -1:].clone()
    token_ids_B1 = torch.searchsorted(cdf_BV, uniforms_B[:, None] * total_B1, right=True)
    # rounding may lift the product up to the total; the last token with probability is then meant
    last_B1 = torch.searchsorted(cdf_BV, total_B1, right=False)
    return torch.minimum(token_ids_B1, last_B1).clamp_(max=log_probs_BV.shape[-1] - 1)[:, 0]


def _likeliest(logits_BV: torch.Tensor) -> Sampled:
    ids_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    is_largest_BV = logits_BV == logits_BV.amax(dim=-1, keepdim=True)
    token_ids_B = torch.where(is_largest_BV, ids_V, logits_BV.shape[-1] - 1).amin(dim=-1)
    return Sampled(token_ids_B, _gather(torch.log_softmax(logits_BV, dim=-1), token_ids_B), None)


def _gather(log_probs_BV: torch.Tensor, token_ids_B: torch.Tensor) -> torch.Tensor:
    return log_probs_BV.gather(1, token_ids_B[:, None])[:, 0]
