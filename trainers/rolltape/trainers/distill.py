"""On-policy distillation at sampled tokens: the teacher's gap as the advantage (algorithms.md §4.7, §4.10).

The teacher scores the student's own tokens, under the same prefix and at the rollout's temperature. The gap is local to
a token: no discount, no return-to-go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError
from rolltape.trainers.dis import score_policy_loss
from rolltape.trainers.gates import Gate, PopValue, closed_gate, no_gate
from rolltape.trainers.losses import Correction, PolicyLoss, check_lengths, entropy_term, icepop_policy_loss
from rolltape.trainers.reverse_kl import TokenDivergence
from rolltape.trainers.safe_math import is_stand_in, raw_ratio, trusted_log_probs, weighted_sum

OpdForm = Literal["eq1", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How much more likely the teacher finds each token; tensors are ``[N]`` and detached."""

    advantage: Tensor
    """``teacher - student``, clipped if asked; as it comes (infinite or NaN) where it is no number."""
    clipped: Tensor
    """Bool: moved to an end of the clip."""
    nonfinite: Tensor
    """Bool: no number; every loss leaves such a token untrusted, and counts it."""

    @property
    def reverse_kl(self) -> float | None:
        """Mean of ``student - teacher`` over numbers (k1, nat; of the clipped gap if it was clipped); None if none."""
        values = self.advantage[~self.nonfinite].double()
        return -float(values.mean()) if values.numel() else None


def opd_gap(teacher_logp: Tensor, student_logp: Tensor, *, max_gap: float | None = None) -> Gap:
    """``teacher - student`` per token, detached.

    Args:
        teacher_logp: ``[N]``.
        student_logp: ``[N]``: of the current θ (D12's default), or frozen from before the update.
        max_gap: clip to plus and minus this (MOPD: 5). A teacher's ``-inf``, or what an engine writes in its place, is
            not clipped into a number.

    Raises:
        ConfigError: ``max_gap`` is not above 0, or tensors have different lengths.

    Example: teacher ``[-0.1, -9.0]``, student ``[-0.2, -0.05]``, ``max_gap`` 5 give ``[0.1, -5.0]``.
    """
    check_lengths(student_logp, teacher_logp)
    if max_gap is not None and not max_gap > 0.0:
        raise ConfigError(f"max_gap: expected > 0, got {max_gap}")
    gap = torch.where(is_stand_in(teacher_logp), torch.nan, teacher_logp.detach() - student_logp.detach())
    finite = torch.isfinite(gap)
    if max_gap is None:
        return Gap(advantage=gap, clipped=torch.zeros_like(finite), nonfinite=~finite)
    return Gap(
        advantage=torch.where(finite, gap.clamp(-max_gap, max_gap), gap),
        clipped=finite & (gap.abs() > max_gap),
        nonfinite=~finite,
    )


def mixed_advantage(task: Tensor, gap: Tensor, *, task_coef: float, opd_coef: float) -> Tensor:
    """``task_coef * A_task + opd_coef * gap``, ``[N]``, detached (§4.10).

    Normalise the task's part before it comes here; the sum is not normalised. (1, λ) and (α, 1) are the two published
    spellings. Log the two parts apart.

    Raises:
        ConfigError: a coefficient is negative or both are 0, or tensors have different lengths.
    """
    check_lengths(task, gap)
    if not (task_coef >= 0.0 and opd_coef >= 0.0 and task_coef + opd_coef > 0.0):
        raise ConfigError(f"task_coef, opd_coef: expected both >= 0 and one above 0, got {task_coef} and {opd_coef}")
    # A part with coefficient 0 is not computed with: 0 times an infinite gap would be NaN.
    parts = [c * part.detach() for c, part in ((task_coef, task), (opd_coef, gap)) if c > 0.0]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def opd_policy_loss(
    current_logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    form: OpdForm = "eq1",
    beta: float = 2.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    pop_value: PopValue = "ratio",
    correction: Correction = "icepop",
    tis_low: float = 0.0,
    tis_high: float = 2.0,
    score_low: float | None = None,
    score_high: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """The gap (or its mix with a task's advantage) in one of two losses (D11).

    ``eq1``: in place of the advantage of GRPO with IcePop, gate, clip and all. ``score``: the score-function loss
    ``-sum(agg_w * w * a * log π)`` with ``w = exp(current - rollout)`` where it lies in ``[score_low, score_high]``
    (closed), else 0; without the two ends, ``w = 1``.

    Args:
        current_logp: ``[N]``, with gradient.
        old_logp: ``[N]``, under θ_old; not read by ``score``.
        rollout_logp: ``[N]``, as recorded.
        advantage: ``[N]``, ``advantage`` of :func:`opd_gap`, or of :func:`mixed_advantage`.
        agg_w: ``[N]``, of the whole batch, mode ``seq_mean``.
        form: ``eq1`` or ``score``.
        beta: ``eq1``: IcePop's interval.
        eps_low: ``eq1``: PPO's clip.
        eps_high: likewise.
        pop_value: ``eq1``: what a kept token weighs.
        correction: ``eq1``: as in :func:`rolltape.trainers.losses.icepop_policy_loss`, like the two ends of TIS.
        tis_low: likewise.
        tis_high: likewise.
        score_low: ``score``: smallest ratio kept.
        score_high: largest.
        entropy: ``[N]``, with gradient, if there is an entropy bonus.
        entropy_coef: its coefficient (D33).
        is_partial: as in :func:`rolltape.trainers.losses.clipped_policy_loss`.

    Raises:
        ConfigError: an option outside its range, or one end of the interval without the other.
    """
    if form == "eq1":
        return icepop_policy_loss(
            current_logp,
            old_logp,
            rollout_logp,
            advantage,
            agg_w,
            beta=beta,
            eps_low=eps_low,
            eps_high=eps_high,
            pop_value=pop_value,
            correction=correction,
            tis_low=tis_low,
            tis_high=tis_high,
            entropy=entropy,
            entropy_coef=entropy_coef,
            is_partial=is_partial,
        )
    if form != "score":
        raise ConfigError(f"opd_form: expected eq1 or score, got {form!r}")
    if (score_low is None) != (score_high is None):
        raise ConfigError(f"score_low, score_high: expected both or none, got {score_low} and {score_high}")
    ratio = raw_ratio(current_logp, rollout_logp)
    gate = no_gate(ratio) if score_low is None or score_high is None else closed_gate(ratio, score_low, score_high)
    return score_policy_loss(
        current_logp,
        gate,
        advantage,
        agg_w,
        rollout_logp=rollout_logp,
        entropy=entropy,
        entropy_coef=entropy_coef,
        is_partial=is_partial,
    )


def divergence_policy_loss(
    current_logp: Tensor,
    found: TokenDivergence,
    agg_w: Tensor,
    *,
    rollout_logp: Tensor,
    coefficient: float = 1.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """``sum(agg_w * D)`` over tokens whose divergence is a number (§4.8).

    States are constants, so no ratio enters; a token whose recorded log-prob is none is left out all the same, because
    nothing says that its id was sampled.

    Args:
        current_logp: ``[N]``, of the sampled tokens.
        found: of the same tokens, with gradient.
        agg_w: ``[N]``, of the whole batch, mode ``seq_mean``.
        rollout_logp: ``[N]``, as recorded.
        coefficient: factor of the divergence.
        entropy: ``[N]``, with gradient, if there is an entropy bonus.
        entropy_coef: its coefficient (D33).
        is_partial: as in :func:`rolltape.trainers.losses.clipped_policy_loss`.

    Raises:
        ConfigError: tensors have different lengths.
    """
    check_lengths(current_logp, found.divergence, found.trusted, agg_w, rollout_logp)
    bad = ~trusted_log_probs(rollout_logp.detach())
    finite = found.trusted & torch.isfinite(found.divergence.detach()) & torch.isfinite(current_logp.detach())
    trusted = finite & ~bad
    zero = torch.zeros_like(found.divergence)
    token_losses = coefficient * torch.where(trusted, found.divergence, zero)
    loss = weighted_sum(token_losses, agg_w)
    entropy_loss = 0.0
    if entropy is not None and entropy_coef > 0.0 and (is_partial or bool(trusted.any())):
        term = entropy_term(entropy, current_logp, agg_w, entropy_coef)
        loss, entropy_loss = loss + term, float(term.detach())
    weights = trusted.to(current_logp.dtype)
    nothing = torch.zeros_like(trusted)
    return PolicyLoss(
        loss=loss,
        token_losses=token_losses.detach(),
        gate=Gate(weights=weights, trusted=trusted, low=nothing, high=nothing, nonfinite=~finite),
        gate_weights=weights,
        policy_ratio=torch.ones_like(current_logp.detach()),
        trusted=trusted,
        nonfinite=~finite,
        bad_log_probs=bad,
        clip_low=nothing,
        clip_high=nothing,
        entropy_loss=entropy_loss,
    )
