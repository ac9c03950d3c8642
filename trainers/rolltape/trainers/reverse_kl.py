"""Reverse KL from student to teacher over the vocabulary, exact or at the teacher's top k (algorithms.md §4.8).

Computed from hidden states in blocks of tokens, and each block again in the backward pass: logits exist for one block
at a time, never for all tokens. Sampled states are constants, and so is the teacher; the gradient flows through the
student's distribution alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rolltape.numerics.top_k import teacher_top_k
from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.trainers.safe_math import is_stand_in

__all__ = ["TeacherBlock", "TokenDivergence", "full_reverse_kl", "teacher_top_k", "top_k_reverse_kl"]

TeacherBlock = Callable[[int, int], Tensor]
"""``(begin, end)`` -> the teacher's log-probs ``[end - begin, V]`` of those tokens; called twice if gradients are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDivergence:
    """A divergence at each token's state."""

    divergence: Tensor
    """``[N]`` float32 (or wider, as the hidden states), nat, with gradient; 0 where not trusted."""
    trusted: Tensor
    """``[N]`` bool: all numbers of student and teacher are such."""


def full_reverse_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherBlock,
    *,
    temperature: float = 1.0,
    floor: float | None = None,
    chunk_size: int = 256,
) -> TokenDivergence:
    """``D = sum_v π (log π - log q)`` at every token; its gradient on the logits is ``π (log π/q - D)``.

    Args:
        hidden: ``[N, H]``, the student's last hidden states.
        weight: ``[V, H]``, its output layer.
        teacher: gives the teacher's log-probs of a block, at the same temperature.
        temperature: logits are divided by it.
        floor: raise the teacher's log-probs to at least this; without it a ``-inf`` is an error, because the
            divergence would be infinite.
        chunk_size: tokens whose logits exist at once.

    Raises:
        ConfigError: an option outside its range, or a block of another shape.
        UntrainableError: the teacher gives ``-inf`` and there is no floor.
    """

    def block(begin: int, end: int, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        log_pi, finite = _log_softmax(hidden, weight, temperature)
        log_q = teacher(begin, end).detach()
        if log_q.shape != log_pi.shape:
            raise ConfigError(f"teacher: expected log-probs {tuple(log_pi.shape)}, got {tuple(log_q.shape)}")
        log_q, known = _floored(log_q.to(log_pi.dtype), floor)
        terms = log_pi.exp() * (log_pi - log_q)
        return torch.where(finite & known, terms.sum(-1), 0.0), finite & known

    return _in_blocks(block, hidden, weight, temperature, chunk_size)


def top_k_reverse_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    teacher_logp: Tensor,
    *,
    temperature: float = 1.0,
    floor: float | None = None,
    chunk_size: int = 256,
) -> TokenDivergence:
    """``sum_S (π log(π/q) - π + q)`` over the teacher's top k, probabilities of the *full* softmax.

    Without the correction ``q - π`` a student equal to the teacher would still be moved. With k = V this is the full
    divergence.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        ids: ``[N, k]`` int64, from :func:`teacher_top_k`, distinct per token; -1 where a token has fewer than k.
        teacher_logp: ``[N, k]``, the teacher's log-probs of them, not renormalised.
        temperature: as in :func:`full_reverse_kl`, like the rest.
        floor: see there.
        chunk_size: see there.

    Raises:
        ConfigError: an option outside its range, shapes that differ, or an id outside the vocabulary.
        UntrainableError: the teacher gives ``-inf`` and there is no floor.
    """
    if ids.shape != teacher_logp.shape or ids.shape[:1] != hidden.shape[:1]:
        raise ConfigError(
            f"ids, teacher_logp: expected [{hidden.shape[0]}, k] twice, got {tuple(ids.shape)} and "
            f"{tuple(teacher_logp.shape)}"
        )
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise ConfigError(
            f"ids: expected -1 or 0 to {weight.shape[0] - 1}, got {int(ids.min())} to {int(ids.max())}; the teacher's "
            "vocabulary must be the student's"
        )

    def block(begin: int, end: int, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        log_pi, finite = _log_softmax(hidden, weight, temperature)
        present = ids[begin:end] >= 0
        chosen = log_pi.gather(1, ids[begin:end].clamp(min=0))
        log_q = torch.where(present, teacher_logp[begin:end].detach().to(log_pi.dtype), 0.0)
        log_q, known = _floored(log_q, floor)
        terms = chosen.exp() * (chosen - log_q) - chosen.exp() + log_q.exp()
        return torch.where(finite & known, torch.where(present, terms, 0.0).sum(-1), 0.0), finite & known

    return _in_blocks(block, hidden, weight, temperature, chunk_size)


_Block = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]


def _in_blocks(block: _Block, hidden: Tensor, weight: Tensor, temperature: float, chunk_size: int) -> TokenDivergence:
    if not temperature > 0.0:
        raise ConfigError(f"temperature: expected > 0, got {temperature}")
    if chunk_size < 1:
        raise ConfigError(f"chunk_size: expected >= 1, got {chunk_size}")
    count = hidden.shape[0]
    divergences, trusted = [hidden.sum(-1)[:0].to(_accurate(hidden))], [torch.zeros(0, dtype=torch.bool)]
    for begin in range(0, count, chunk_size):
        end = min(begin + chunk_size, count)
        # Drawn from no random numbers, so there is no generator state to keep for the second run.
        found = checkpoint(block, begin, end, hidden[begin:end], weight, use_reentrant=False, preserve_rng_state=False)
        divergences.append(found[0])
        trusted.append(found[1].to(trusted[0].device))
    return TokenDivergence(divergence=torch.cat(divergences), trusted=torch.cat(trusted).to(hidden.device))


def _accurate(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs ``[n, V]`` of a block, and ``[n]`` bool: the token's logits are numbers; others are replaced first."""
    logits = (hidden @ weight.T).to(_accurate(hidden)) / temperature
    finite = torch.isfinite(logits.detach()).all(-1)
    return torch.log_softmax(torch.where(finite[:, None], logits, 0.0), -1), finite


def _floored(log_q: Tensor, floor: float | None) -> tuple[Tensor, Tensor]:
    """Teacher's log-probs with a floor, and ``[n]`` bool: all are numbers; a token's are replaced by 0 otherwise."""
    if floor is not None:
        log_q = torch.where(log_q < floor, floor, log_q)
    elif bool(torch.isneginf(log_q).any()):
        raise UntrainableError(
            f"teacher: expected log-probs above -inf, got -inf at {int(torch.isneginf(log_q).any(-1).sum())} tokens "
            "of a block; set a floor, or drop the samples"
        )
    known = (torch.isfinite(log_q) & ~is_stand_in(log_q)).all(-1)
    return torch.where(known[:, None], log_q, 0.0), known
