"""Token gates: which sampled tokens a loss may use, and with which weight (algorithms.md §4.2-§4.4).

A gate takes the *ratio* tensor, not log-probs, so that a boundary can be tested with the exact number. Intervals:
IcePop is closed, DIS is open, and the two are separate functions on purpose (D2). NaN is no ratio: such a token is
untrusted and counted, never zeroed in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError
from rolltape.trainers.safe_math import bound

PopValue = Literal["ratio", "binary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A verdict per token; every tensor is ``[N]`` and detached.

    Example (IcePop, beta 2): ratios ``[0.3, 0.5, 1.2, 3.5]`` give weights ``[0, 0.5, 1.2, 0]``, ``trusted``
    ``[F, T, T, F]``, ``low`` ``[T, F, F, F]`` and ``high`` ``[F, F, F, T]``.
    """

    weights: Tensor
    """Factor of the token's loss, in the ratio's dtype; 0 where not trusted."""
    trusted: Tensor
    """Bool: the token may be used."""
    low: Tensor
    """Bool: below the interval (rejected, or under TIS raised to its end)."""
    high: Tensor
    """Bool: above the interval (rejected, or under TIS lowered to its end)."""
    nonfinite: Tensor
    """Bool: the ratio is NaN."""


def icepop_gate(ratio: Tensor, beta: float, *, pop_value: PopValue = "ratio") -> Gate:
    """Keep ``1/beta <= ratio <= beta``, ends included; a kept token weighs its ratio, or 1 if ``binary`` (D1).

    Raises:
        ConfigError: ``beta`` is below 1, or ``pop_value`` is unknown.
    """
    if not beta >= 1.0:
        raise ConfigError(f"icepop_beta: expected >= 1 (it keeps [1/beta, beta]), got {beta}")
    if pop_value not in {"ratio", "binary"}:
        raise ConfigError(f"pop_value: expected ratio or binary, got {pop_value!r}")
    ratio = ratio.detach()
    low, high = ratio < bound(1.0 / beta, ratio), ratio > bound(beta, ratio)
    return _rejecting(ratio, low, high, torch.ones_like(ratio) if pop_value == "binary" else ratio)


def dis_gate(ratio: Tensor, eps_low: float, eps_high: float) -> Gate:
    """Keep ``1 - eps_low < ratio < 1 + eps_high``, ends excluded; a kept token weighs its ratio, detached (D6).

    ``eps_low = eps_high = 0`` accepts nothing, not even a ratio of exactly 1.

    Raises:
        ConfigError: ``eps_low`` outside [0, 1) or ``eps_high`` below 0.
    """
    _check_epsilon(eps_low, eps_high)
    ratio = ratio.detach()
    low, high = ratio <= bound(1.0 - eps_low, ratio), ratio >= bound(1.0 + eps_high, ratio)
    return _rejecting(ratio, low, high, ratio)


def closed_gate(ratio: Tensor, low: float, high: float) -> Gate:
    """Keep ``low <= ratio <= high``, ends included; a kept token weighs its ratio (the score form of OPD, §4.7).

    Raises:
        ConfigError: not ``0 <= low <= high``.
    """
    if not 0.0 <= low <= high:
        raise ConfigError(f"score_low, score_high: expected 0 <= score_low <= score_high, got {low} and {high}")
    ratio = ratio.detach()
    return _rejecting(ratio, ratio < bound(low, ratio), ratio > bound(high, ratio), ratio)


def tis_gate(ratio: Tensor, low: float, high: float) -> Gate:
    """Truncated importance sampling: the weight is the ratio clamped to ``[low, high]``; every token contributes.

    ``low`` and ``high`` of the verdict mark clamped tokens, which stay trusted.

    Raises:
        ConfigError: not ``0 <= low <= high`` with ``high`` above 0.
    """
    if not (0.0 <= low <= high and high > 0.0):
        raise ConfigError(
            f"tis_low, tis_high: expected 0 <= tis_low <= tis_high and tis_high > 0, got {low} and {high}"
        )
    ratio = ratio.detach()
    floor, ceiling = bound(low, ratio), bound(high, ratio)
    nonfinite = torch.isnan(ratio)
    weights = torch.where(nonfinite, torch.zeros_like(ratio), ratio).clamp(floor, ceiling)
    return Gate(
        weights=torch.where(nonfinite, torch.zeros_like(ratio), weights),
        trusted=~nonfinite,
        low=ratio < floor,
        high=ratio > ceiling,
        nonfinite=nonfinite,
    )


def no_gate(ratio: Tensor) -> Gate:
    """No correction: weight 1 for every token. The mismatch then enters the gradient uncorrected."""
    ratio = ratio.detach()
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return Gate(weights=torch.ones_like(ratio), trusted=~nothing, low=nothing, high=nothing, nonfinite=nothing)


def _rejecting(ratio: Tensor, low: Tensor, high: Tensor, weights: Tensor) -> Gate:
    nonfinite = torch.isnan(ratio)
    trusted = ~(low | high | nonfinite)
    return Gate(
        weights=torch.where(trusted, weights, torch.zeros_like(weights)),
        trusted=trusted,
        low=low,
        high=high,
        nonfinite=nonfinite,
    )


def _check_epsilon(eps_low: float, eps_high: float) -> None:
    if not 0.0 <= eps_low < 1.0:
        raise ConfigError(f"eps_low: expected 0 <= eps_low < 1, got {eps_low}")
    if not eps_high >= 0.0:
        raise ConfigError(f"eps_high: expected >= 0, got {eps_high}")
