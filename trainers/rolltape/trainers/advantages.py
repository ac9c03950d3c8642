"""Advantages of whole rollouts from the rewards of their group (algorithms.md §4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from rolltape.schema import reasons
from rolltape.schema.errors import ConfigError, UntrainableError

Norm = Literal["mean_std", "mean"]

STD_EPSILON: Final = 1e-6
ZERO_STD_TOLERANCE: Final = 1e-6
"""A spread of rewards within this (relative to the mean where that is above 1) is float noise, not variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per group of ``[G]``, float64. A group without a counted member has count 0 and mean 0."""

    count: Tensor
    """int64."""
    mean: Tensor
    std: Tensor
    """Sample standard deviation (ddof 1)."""
    zero_std: Tensor
    """Bool: all rewards are equal within :data:`ZERO_STD_TOLERANCE`."""


def group_statistics(rewards: Tensor, groups: Tensor, *, counted: Tensor | None = None) -> GroupStatistics:
    """Mean and spread of each group.

    Args:
        rewards: ``[M]``, one per member (padding copies are members).
        groups: ``[M]`` int64, dense group numbers; members of a group may stand anywhere.
        counted: ``[M]`` bool, members that enter the statistics; default all. With padding, all is D10's default and
            ``~is_padding`` its option ``valid_only``.

    Raises:
        UntrainableError: a counted reward is not finite (``reward_invalid``).
    """
    rewards = rewards.double()
    counted = torch.ones_like(groups, dtype=torch.bool) if counted is None else counted
    _require_finite(rewards, counted)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    kept, values = groups[counted], rewards[counted]
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
    count = torch.bincount(kept, minlength=num_groups)
    mean = zeros.index_add(0, kept, values) / count.clamp(min=1)
    squares = zeros.index_add(0, kept, (values - mean[kept]).square())
    high = zeros.sub(torch.inf).scatter_reduce(0, kept, values, "amax")
    low = zeros.add(torch.inf).scatter_reduce(0, kept, values, "amin")
    return GroupStatistics(
        count=count,
        mean=mean,
        std=(squares / (count - 1).clamp(min=1)).sqrt(),
        zero_std=(high - low) <= ZERO_STD_TOLERANCE * mean.abs().clamp(min=1.0),
    )


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    norm: Norm = "mean_std",
    eps: float = STD_EPSILON,
    counted: Tensor | None = None,
) -> Tensor:
    """``(R - mean) / (std + eps)`` of each member within its group, or ``R - mean`` alone (D5); ``[M]`` float64.

    Groups are told apart by number, never by place. A group whose rewards are all equal gets exactly 0.
    Arguments as in :func:`group_statistics`.

    Raises:
        ConfigError: ``norm`` is unknown, or ``eps`` is negative.
        UntrainableError: a group has one counted member (``group_of_one``), or a reward is not finite.
    """
    if norm not in {"mean_std", "mean"}:
        raise ConfigError(f"adv_norm: expected mean_std or mean, got {norm!r}")
    if not eps >= 0.0:
        raise ConfigError(f"adv_eps: expected >= 0, got {eps}")
    statistics = group_statistics(rewards, groups, counted=counted)
    _require_company(statistics, groups)
    centred = rewards.double() - statistics.mean[groups]
    scaled = centred if norm == "mean" else centred / (statistics.std[groups] + eps)
    return torch.where(statistics.zero_std[groups], torch.zeros_like(scaled), scaled)


def token_advantages(advantages: Tensor, member_of_token: Tensor) -> Tensor:
    """The advantage of each token's member, ``[N]``: a rollout's tokens share one value."""
    return advantages.detach()[member_of_token]


def _require_finite(rewards: Tensor, counted: Tensor) -> None:
    bad = torch.nonzero(counted & ~torch.isfinite(rewards)).flatten().tolist()
    if bad:
        raise UntrainableError(
            f"{reasons.REWARD_INVALID}: members {bad[:5]} have rewards that are not finite; "
            "an invalid reward is refused before groups are formed, never read as 0"
        )


def _require_company(statistics: GroupStatistics, groups: Tensor) -> None:
    lonely = [group for group in torch.unique(groups).tolist() if int(statistics.count[group]) < 2]
    if lonely:
        raise UntrainableError(
            f"{reasons.GROUP_OF_ONE}: groups {lonely[:5]} have fewer than 2 counted members, which a group estimator "
            "cannot compare; use a trainer for single rollouts, or larger groups"
        )
