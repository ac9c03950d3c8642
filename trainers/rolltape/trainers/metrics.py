"""Metrics of a policy update (algorithms.md §2.6), reduced in float64.

Both trust and distance are reported: the share of trusted tokens can rise while the gap between the two engines grows.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltape.trainers.losses import PolicyLoss
from rolltape.trainers.safe_math import DIAGNOSTIC_CLAMP, finite_log_ratio, trusted_log_probs

Array = npt.NDArray[np.float64]
QUANTILES: Final = {"p01": 0.01, "p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


class Verdicts(NamedTuple):
    """What a loss did to each token; bool ``[N]`` each."""

    gate_low: Tensor
    """Below the gate's interval: rejected, or raised to its end."""
    gate_high: Tensor
    clip_low: Tensor
    """PPO's clip took its gradient away at the low end."""
    clip_high: Tensor

    @classmethod
    def of(cls, policy: PolicyLoss) -> Self:
        """Those of a loss."""
        return cls(policy.gate.low, policy.gate.high, policy.clip_low, policy.clip_high)

    def at(self, index: Tensor) -> Verdicts:
        """Of some tokens."""
        return Verdicts(*(hit[index] for hit in self))


class KlEstimate(NamedTuple):
    """Three estimators of KL(p || q) from samples of p, averaged, nat."""

    k1: float
    """Mean of d: unbiased, can be negative."""
    k2: float
    """Mean of d²/2: biased, small variance."""
    k3: float
    """Mean of exp(-d) - 1 + d: unbiased, never negative."""


def kl_terms(log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token k1, k2 and k3 of KL(p || q) for ``log_ratio = log p - log q`` at samples of p; differentiable."""
    return log_ratio, log_ratio.square() / 2, torch.expm1(-log_ratio) + log_ratio


def kl_estimate(log_ratio: Tensor) -> KlEstimate:
    """Means of :func:`kl_terms`; the caller says in the metric's name which way the divergence goes."""
    return KlEstimate(*(float(term.double().mean()) for term in kl_terms(log_ratio.detach())))


def effective_sample_size(weights: Tensor) -> float:
    """``(sum w)² / sum w²``: how many equally weighted tokens the weighted ones are worth; 0 if all weigh nothing."""
    values = weights.detach().double()
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / squares if squares > 0.0 else 0.0


def policy_metrics(
    *,
    current_logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    entropy: Tensor | None,
    gate_weight: Tensor,
    trusted: Tensor,
    verdicts: Verdicts,
    is_clamp: bool = False,
) -> dict[str, float]:
    """Metrics of one batch's action tokens by name; one that is undefined (no token, no finite pair) is left out.

    Args:
        current_logp: ``[N]``, action tokens only, like all that follow.
        old_logp: under θ_old.
        rollout_logp: as recorded.
        advantage: per token.
        entropy: of the unmasked distribution, if it was computed.
        gate_weight: ``gate_weights`` of :class:`rolltape.trainers.losses.PolicyLoss`.
        trusted: its ``trusted``.
        verdicts: what its gate and its clip did; a method without one has none.
        is_clamp: the gate lowered or raised tokens (TIS) instead of rejecting them; the names say which.

    Names: ``mismatch_*`` compare old with rollout (two engines, one version), ``policy_*`` current with old;
    ``kl_rollout_train_*`` is KL(rollout || old) and ``kl_old_current_*`` is KL(old || current). A recorded number that
    is no log-prob is counted in ``bad_log_prob_tokens`` and is in none of the means.
    """
    count = trusted.numel()
    num_trusted = int(trusted.sum())
    metrics = {"action_tokens": float(count), "trusted_tokens": float(num_trusted)}
    if count == 0:
        return metrics
    finite = finite_log_ratio(old_logp, rollout_logp) & torch.isfinite(current_logp) & torch.isfinite(advantage)
    metrics["trusted_frac"] = num_trusted / count
    metrics["nonfinite_tokens"] = float((~finite).sum())
    recorded = trusted_log_probs(rollout_logp)
    metrics["bad_log_prob_tokens"] = float((~recorded).sum())
    metrics["ess"] = effective_sample_size(torch.where(trusted, gate_weight, 0.0))
    if entropy is not None:
        metrics |= _moments("entropy", _finite(entropy), ("mean",))
    metrics |= _moments("token_advantage", _finite(advantage), ("mean", "std", "max"))
    gate = "tis_clip_frac" if is_clamp else "gate_reject_frac"
    names = (f"{gate}_low", f"{gate}_high", "clip_frac_low", "clip_frac_high")
    metrics |= {name: float(hit.double().mean()) for name, hit in zip(names, verdicts, strict=True)}
    mismatch = (old_logp - rollout_logp)[recorded]
    metrics |= _log_ratio_metrics("mismatch", "kl_rollout_train", mismatch, sampled_by_reference=True)
    metrics |= _log_ratio_metrics("policy", "kl_old_current", current_logp - old_logp, sampled_by_reference=True)
    return metrics


def _log_ratio_metrics(name: str, kl_name: str, log_ratio: Tensor, *, sampled_by_reference: bool) -> dict[str, float]:
    """Ratio before any gate, distance in nat, and KL estimators, over tokens whose log-ratio is finite."""
    values = log_ratio.detach()[torch.isfinite(log_ratio)].double()
    if not values.numel():
        return {}
    clamped = values.clamp(-DIAGNOSTIC_CLAMP, DIAGNOSTIC_CLAMP)
    metrics = _moments(f"{name}_ratio", clamped.exp().numpy(force=True), ("mean", "min", "max"), quantiles=True)
    metrics[f"{name}_abs_mean"] = float(values.abs().mean())
    metrics[f"{name}_abs_max"] = float(values.abs().max())
    kl = kl_estimate(-clamped if sampled_by_reference else clamped)
    return metrics | {f"{kl_name}_{estimator}": value for estimator, value in kl._asdict().items()}


def _finite(values: Tensor) -> Array:
    found: Array = values.detach().double().numpy(force=True)
    return found[np.isfinite(found)]


def _moments(name: str, values: Array, wanted: tuple[str, ...], *, quantiles: bool = False) -> dict[str, float]:
    if not values.size:
        return {}
    metrics = {f"{name}_{moment}": float(getattr(np, moment)(values)) for moment in wanted}
    if quantiles:
        found = np.quantile(values, list(QUANTILES.values()))
        metrics |= {f"{name}_{label}": float(value) for label, value in zip(QUANTILES, found, strict=True)}
    return metrics
