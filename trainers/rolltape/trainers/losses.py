"""Policy losses over flat action tokens (algorithms.md §4.2, §4.3).

Every function takes the tokens of a batch or of any part of it, with weights that were computed over the whole batch;
the parts' losses and gradients then add up to the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError
from rolltape.trainers.gates import Gate, PopValue, icepop_gate, no_gate, tis_gate
from rolltape.trainers.safe_math import (
    bound,
    finite_log_ratio,
    raw_ratio,
    safe_ratio,
    trusted_log_probs,
    weighted_sum,
)

Correction = Literal["icepop", "tis", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss and what each token had to do with it. Tensors are ``[N]`` and detached, except the loss."""

    loss: Tensor
    """Scalar float64, connected to the graph even when it is zero."""
    token_losses: Tensor
    """Before weighting; 0 where untrusted. Without the entropy term."""
    gate: Gate
    gate_weights: Tensor
    """Weight that entered the loss; 0 where untrusted."""
    policy_ratio: Tensor
    """``exp(current - old)``, 1 where untrusted."""
    trusted: Tensor
    """Bool: accepted by the gate, and all inputs usable."""
    nonfinite: Tensor
    """Bool: a log-prob, an advantage or a ratio is NaN or infinite."""
    bad_log_probs: Tensor
    """Bool: the recorded log-prob is not one (NaN, infinite, above 1e-4, or a sentinel)."""
    clip_low: Tensor
    """Bool: clipped at ``1 - eps_low``, with a negative advantage."""
    clip_high: Tensor
    """Bool: clipped at ``1 + eps_high``, with a positive advantage."""
    entropy_loss: float
    """The entropy term's part of ``loss``."""

    @property
    def num_trusted(self) -> int:
        """Tokens that the loss used."""
        return int(self.trusted.sum())

    @property
    def skip_step(self) -> bool:
        """No token was used: do not call the optimizer, do not publish (algorithms.md §2.5).

        For one part of a batch this says nothing; add up ``num_trusted`` of all parts.
        """
        return self.num_trusted == 0


def icepop_policy_loss(
    current_logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    beta: float = 2.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    pop_value: PopValue = "ratio",
    correction: Correction = "icepop",
    tis_low: float = 0.0,
    tis_high: float = 2.0,
    dual_clip: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """GRPO with IcePop: the engine mismatch ``rho = exp(old - rollout)`` gates, the policy ratio learns.

    ``-sum(agg_w * w(rho) * min(r A, clip(r, 1 - eps_low, 1 + eps_high) A))`` with ``r = exp(current - old)``.

    Args:
        current_logp: ``[N]``, trainer's log-probs under θ, with gradient.
        old_logp: ``[N]``, the same under θ_old; ``current_logp`` itself where a batch is used for one update.
        rollout_logp: ``[N]``, as recorded by the engine, of the same policy version as θ_old.
        advantage: ``[N]``.
        agg_w: ``[N]``, from :func:`rolltape.trainers.aggregation.aggregation_weights` over the whole batch.
        beta: IcePop keeps mismatch ratios in ``[1/beta, beta]``.
        eps_low: PPO clips the policy ratio below ``1 - eps_low``.
        eps_high: and above ``1 + eps_high``.
        pop_value: a kept token weighs its mismatch ratio, or 1 (``binary``).
        correction: ``icepop``, ``tis`` (clamp instead of reject) or ``none``.
        tis_low: smallest weight under ``tis``.
        tis_high: largest.
        dual_clip: see :func:`clipped_policy_loss`.
        entropy: ``[N]``, with gradient, if there is an entropy bonus.
        entropy_coef: c of ``-c * sum(agg_w * H)`` over action tokens (D33).
        is_partial: these tokens are a part of a larger batch: see :func:`clipped_policy_loss`.

    Raises:
        ConfigError: an option outside its range, or tensors of different lengths.
    """
    check_lengths(current_logp, old_logp, rollout_logp, advantage, agg_w)
    ratio = raw_ratio(old_logp, rollout_logp)
    if correction == "icepop":
        gate = icepop_gate(ratio, beta, pop_value=pop_value)
    elif correction == "tis":
        gate = tis_gate(ratio, tis_low, tis_high)
    elif correction == "none":
        gate = no_gate(ratio)
    else:
        raise ConfigError(f"correction: expected icepop, tis or none, got {correction!r}")
    return clipped_policy_loss(
        current_logp,
        old_logp,
        gate,
        advantage,
        agg_w,
        eps_low=eps_low,
        eps_high=eps_high,
        rollout_logp=rollout_logp,
        dual_clip=dual_clip,
        entropy=entropy,
        entropy_coef=entropy_coef,
        is_partial=is_partial,
    )


def clipped_policy_loss(
    current_logp: Tensor,
    old_logp: Tensor,
    gate: Gate,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    rollout_logp: Tensor | None = None,
    dual_clip: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """PPO's clipped objective under a gate that is given: decided once per batch, or injected by a test.

    Tokens are trusted if the gate accepts them, and every input is finite, and the recorded log-prob (if given) is
    one. Others keep their place in ``agg_w`` and give no loss and no gradient.

    If no token at all is trusted the loss is a graph-connected zero, entropy term included; with ``is_partial`` the
    entropy term stays, because the rest of the batch may hold trusted tokens, and the caller decides for the whole.

    ``dual_clip`` (off; no method here asks for it, D13) bounds the loss of a token with a negative advantage by
    ``-dual_clip * A``; such a token has no gradient.

    Raises:
        ConfigError: an option outside its range, or tensors of different lengths.
    """
    _check_options(eps_low, eps_high, entropy, entropy_coef)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(f"dual_clip: expected > 1, got {dual_clip}")
    check_lengths(current_logp, old_logp, gate.weights, advantage, agg_w)
    advantage = advantage.detach()
    finite = _finite_inputs(current_logp, old_logp, advantage, rollout_logp)
    bad = torch.zeros_like(finite) if rollout_logp is None else ~trusted_log_probs(rollout_logp.detach())
    trusted = gate.trusted & finite & ~bad
    ratio = safe_ratio(current_logp, old_logp, trusted)
    objective, clip_low, clip_high = _clipped_objective(
        ratio,
        torch.where(trusted, advantage, torch.zeros_like(advantage)).to(ratio.dtype),
        eps_low,
        eps_high,
        dual_clip,
    )
    weights = torch.where(trusted, gate.weights, torch.zeros_like(gate.weights))
    token_losses = -weights * objective
    loss = weighted_sum(token_losses, agg_w)
    entropy_loss = 0.0
    if entropy is not None and entropy_coef > 0.0 and (is_partial or bool(trusted.any())):
        term = entropy_term(entropy, current_logp, agg_w, entropy_coef)
        loss, entropy_loss = loss + term, float(term.detach())
    return PolicyLoss(
        loss=loss,
        token_losses=token_losses.detach(),
        gate=gate,
        gate_weights=weights,
        policy_ratio=ratio.detach(),
        trusted=trusted,
        nonfinite=~finite | gate.nonfinite,
        bad_log_probs=bad,
        clip_low=clip_low & trusted,
        clip_high=clip_high & trusted,
        entropy_loss=entropy_loss,
    )


def _finite_inputs(current: Tensor, old: Tensor, advantage: Tensor, rollout: Tensor | None) -> Tensor:
    """``[N]`` bool: nothing that the loss would compute with is NaN or infinite, the ratio's overflow included."""
    finite = finite_log_ratio(current, old) & torch.isfinite(raw_ratio(current, old)) & torch.isfinite(advantage)
    return finite if rollout is None else finite & torch.isfinite(rollout)


def _clipped_objective(
    ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``min(r A, clip(r) A)`` and where it is clipped: high with A > 0, low with A < 0.

    Written as a selection, so that the value at an end is the same from both sides and is not counted as clipped, and
    a clipped token's gradient is exactly 0.
    """
    floor, ceiling = bound(1.0 - eps_low, ratio), bound(1.0 + eps_high, ratio)
    clip_low = (ratio.detach() < floor) & (advantage < 0)
    clip_high = (ratio.detach() > ceiling) & (advantage > 0)
    effective = torch.where(clip_high, ceiling, torch.where(clip_low, floor, ratio))
    if dual_clip is not None:
        limit = bound(dual_clip, ratio)
        effective = torch.where((advantage < 0) & (ratio.detach() > limit), limit, effective)
    return effective * advantage, clip_low, clip_high


def entropy_term(entropy: Tensor, current: Tensor, agg_w: Tensor, coefficient: float) -> Tensor:
    """``-c * sum(agg_w * H)`` over action tokens whose distribution is a number."""
    usable = torch.isfinite(entropy.detach()) & torch.isfinite(current.detach())
    return -coefficient * weighted_sum(torch.where(usable, entropy, torch.zeros_like(entropy)), agg_w)


def _check_options(eps_low: float, eps_high: float, entropy: Tensor | None, entropy_coef: float) -> None:
    if not 0.0 <= eps_low < 1.0:
        raise ConfigError(f"eps_low: expected 0 <= eps_low < 1, got {eps_low}")
    if not eps_high >= 0.0:
        raise ConfigError(f"eps_high: expected >= 0, got {eps_high}")
    if not entropy_coef >= 0.0:
        raise ConfigError(f"entropy_coef: expected >= 0, got {entropy_coef}")
    if entropy_coef > 0.0 and entropy is None:
        raise ConfigError(f"entropy: expected the tokens' entropies because entropy_coef is {entropy_coef}, got None")


def check_lengths(current: Tensor, *others: Tensor) -> None:
    """Refuse tensors that are not flat, or not of one length.

    Raises:
        ConfigError: so it is.
    """
    lengths = [current.numel(), *(other.numel() for other in others)]
    if current.ndim != 1 or len(set(lengths)) != 1:
        raise ConfigError(f"expected flat tensors of one length [N], got lengths {lengths}")
