"""Direct importance sampling: the score-function loss under a gate on current / rollout (algorithms.md §4.4).

There is no θ_old forward: the ratio compares θ with the engine that sampled, and it is taken anew for every minibatch,
because the gate moves with θ. The weight is a constant of the gradient (D6): without the detach the coefficient of a
token would be ``f A (1 + log π)``, of the wrong sign wherever π < 1/e. The loss' value does not show that; its gradient
does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError
from rolltape.trainers.gates import Gate, dis_gate
from rolltape.trainers.losses import PolicyLoss, check_lengths, entropy_term
from rolltape.trainers.safe_math import raw_ratio, safe_ratio, trusted_log_probs, weighted_sum


def dis_policy_loss(
    current_logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """``-sum(agg_w * f * A * log π)`` with ``f = exp(current - rollout)`` inside the open interval, else 0; detached.

    Args:
        current_logp: ``[N]``, under θ, with gradient.
        rollout_logp: ``[N]``, as recorded by the engine; may be of several policy versions.
        advantage: ``[N]``.
        agg_w: ``[N]``, of the whole batch, mode ``token_mean``.
        eps_low: the interval begins above ``1 - eps_low``. No default: no source states one (D7).
        eps_high: and ends below ``1 + eps_high``: 5 keeps ratios below 6.
        entropy: ``[N]``, with gradient, if there is an entropy bonus.
        entropy_coef: its coefficient (D33).
        is_partial: as in :func:`rolltape.trainers.losses.clipped_policy_loss`.

    Raises:
        ConfigError: an option outside its range, or tensors of different lengths.
    """
    check_lengths(current_logp, rollout_logp, advantage, agg_w)
    return score_policy_loss(
        current_logp,
        dis_gate(raw_ratio(current_logp, rollout_logp), eps_low, eps_high),
        advantage,
        agg_w,
        rollout_logp=rollout_logp,
        entropy=entropy,
        entropy_coef=entropy_coef,
        is_partial=is_partial,
    )


def dis_surrogate(
    current_logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> Tensor:
    """``-sum(agg_w * f * A)`` with ``f`` differentiable inside the interval: a metric, scalar float64.

    Same gradient as :func:`dis_policy_loss`, another value, which moves with the advantage alone when ratios are 1.

    Raises:
        ConfigError: as :func:`dis_policy_loss`.
    """
    check_lengths(current_logp, rollout_logp, advantage, agg_w)
    gate = dis_gate(raw_ratio(current_logp, rollout_logp), eps_low, eps_high)
    usable, _ = _usable(current_logp, advantage, rollout_logp)
    trusted = gate.trusted & usable
    ratio = safe_ratio(current_logp, rollout_logp, trusted)
    kept = torch.where(trusted, advantage.detach(), torch.zeros_like(advantage)).to(ratio.dtype)
    return weighted_sum(-ratio * kept, agg_w)


def score_policy_loss(
    current_logp: Tensor,
    gate: Gate,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    rollout_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """``-sum(agg_w * w * A * log π)`` under a gate that is given; ``w`` and ``A`` are constants.

    ``policy_ratio`` of the result is the gate's weight (1 where untrusted) and nothing is ever clipped. What is
    trusted, and a batch without a trusted token, are as in :func:`rolltape.trainers.losses.clipped_policy_loss`.

    Raises:
        ConfigError: an entropy coefficient below 0 or without entropies, or tensors of different lengths.
    """
    check_lengths(current_logp, gate.weights, advantage, agg_w)
    if not entropy_coef >= 0.0 or (entropy_coef > 0.0 and entropy is None):
        raise ConfigError(f"entropy_coef: expected >= 0, and the tokens' entropies where above 0, got {entropy_coef}")
    usable, bad = _usable(current_logp, advantage, rollout_logp)
    trusted = gate.trusted & usable
    weights = torch.where(trusted, gate.weights.detach(), torch.zeros_like(gate.weights))
    coefficient = weights * torch.where(trusted, advantage.detach(), torch.zeros_like(advantage)).to(weights.dtype)
    token_losses = -coefficient * torch.where(trusted, current_logp, torch.zeros_like(current_logp))
    loss = weighted_sum(token_losses, agg_w)
    entropy_loss = 0.0
    if entropy is not None and entropy_coef > 0.0 and (is_partial or bool(trusted.any())):
        term = entropy_term(entropy, current_logp, agg_w, entropy_coef)
        loss, entropy_loss = loss + term, float(term.detach())
    nothing = torch.zeros_like(trusted)
    return PolicyLoss(
        loss=loss,
        token_losses=token_losses.detach(),
        gate=gate,
        gate_weights=weights,
        policy_ratio=torch.where(trusted, weights, torch.ones_like(weights)),
        trusted=trusted,
        nonfinite=_nonfinite(current_logp, advantage, rollout_logp) | gate.nonfinite,
        bad_log_probs=bad,
        clip_low=nothing,
        clip_high=nothing,
        entropy_loss=entropy_loss,
    )


def _nonfinite(current: Tensor, advantage: Tensor, rollout: Tensor | None) -> Tensor:
    """``[N]`` bool. A ratio that overflows is not meant: the gate rejects it as high."""
    finite = torch.isfinite(current.detach()) & torch.isfinite(advantage)
    return ~finite if rollout is None else ~(finite & torch.isfinite(rollout))


def _usable(current: Tensor, advantage: Tensor, rollout: Tensor | None) -> tuple[Tensor, Tensor]:
    """``[N]`` bool twice: all inputs usable; the recorded log-prob is not one."""
    finite = ~_nonfinite(current, advantage, rollout)
    bad = torch.zeros_like(finite) if rollout is None else ~trusted_log_probs(rollout.detach())
    return finite & ~bad, bad
