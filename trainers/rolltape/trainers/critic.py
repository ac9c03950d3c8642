"""What a critic learns from, and how well it does (algorithms.md §4.11)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError
from rolltape.trainers.losses import check_lengths
from rolltape.trainers.safe_math import weighted_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Loss of the values of action tokens."""

    loss: Tensor
    """Scalar float64, connected to the graph even when it is zero."""
    trusted: Tensor
    """``[N]`` bool: value and target are finite. Others give no loss, no gradient, and keep their weight."""

    @property
    def num_nonfinite(self) -> int:
        """Tokens without a usable value or target."""
        return int((~self.trusted).sum())


def value_loss(
    values: Tensor,
    targets: Tensor,
    agg_w: Tensor,
    *,
    clip: float | None = None,
    old_values: Tensor | None = None,
) -> ValueLoss:
    """``sum(agg_w * (V - target)²)``, scale 1 (not ½).

    Args:
        values: ``[N]``, with gradient.
        targets: ``[N]``, constants.
        agg_w: ``[N]``, of the whole batch, mode ``token_mean``.
        clip: optional, off: the larger of the plain loss and that of V kept within ``clip`` of the old value.
        old_values: ``[N]``, needed by ``clip``.

    Raises:
        ConfigError: ``clip`` is not above 0 or lacks the old values, or tensors have different lengths.
    """
    check_lengths(values, targets, agg_w)
    targets = targets.detach().to(values.dtype)
    trusted = torch.isfinite(values.detach()) & torch.isfinite(targets)
    zero = torch.zeros_like(targets)
    kept, aims = torch.where(trusted, values, zero), torch.where(trusted, targets, zero)
    errors = (kept - aims).square()
    if clip is not None:
        if not clip > 0.0 or old_values is None:
            raise ConfigError(f"value_clip: expected > 0 together with the old values, got {clip}")
        old = torch.where(trusted, old_values.detach().to(values.dtype), zero)
        errors = torch.maximum(errors, (old + (kept - old).clamp(-clip, clip) - aims).square())
    return ValueLoss(loss=weighted_sum(torch.where(trusted, errors, zero), agg_w), trusted=trusted)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """``1 - Var(R - V) / Var(R)`` over finite pairs, on values from before the update; None where R has no variance."""
    finite = torch.isfinite(values) & torch.isfinite(returns)
    aims, errors = returns.detach().double()[finite], (returns - values).detach().double()[finite]
    if not aims.numel():
        return None
    variance = float(aims.var(correction=0))
    return 1.0 - float(errors.var(correction=0)) / variance if variance > 0.0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNormaliser:
    """Running mean and spread of the critic's targets; off unless somebody asks for it (D13).

    The head predicts ``v`` and the value is ``mean + std v``. When the statistics move the head is rescaled, so that
    no value changes.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0.0:
            raise ConfigError(f"value normaliser: expected std > 0, got {self.std}")

    def value(self, prediction: Tensor) -> Tensor:
        """V of what the head predicts."""
        return self.mean + self.std * prediction

    def target(self, returns: Tensor) -> Tensor:
        """What the head shall predict for these returns."""
        return (returns - self.mean) / self.std

    def moved(self, returns: Tensor, *, rate: float, min_std: float = 1e-4) -> ValueNormaliser:
        """Statistics moved by ``rate`` towards the finite returns', in second moments; unmoved where there are none.

        Raises:
            ConfigError: ``rate`` outside (0, 1].
        """
        if not 0.0 < rate <= 1.0:
            raise ConfigError(f"value_norm_rate: expected 0 < value_norm_rate <= 1, got {rate}")
        finite = returns.detach().double()[torch.isfinite(returns)]
        if not finite.numel():
            return self
        mean = self.mean + rate * (float(finite.mean()) - self.mean)
        before = self.std**2 + self.mean**2
        square = before + rate * (float(finite.square().mean()) - before)
        return ValueNormaliser(mean=mean, std=max(square - mean**2, min_std**2) ** 0.5)

    def rescaled_head(self, weight: Tensor, bias: Tensor, new: ValueNormaliser) -> tuple[Tensor, Tensor]:
        """Weight and bias that give under ``new`` the values that the given ones give now."""
        return weight * (self.std / new.std), (self.std * bias + self.mean - new.mean) / new.std
