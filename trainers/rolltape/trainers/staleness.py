"""Staleness: how many published versions lie between what sampled a rollout and now (algorithms.md §4.5).

Versions are published ones (D26); the reference is the newest published without an abort, pinned with the batch (D29).
A rollout is as old as its oldest action token, whatever segment that is in (D8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolltape.schema import reasons
from rolltape.schema.errors import ConfigError, IntegrityError, UntrainableError


def version_refusal(
    oldest: int,
    newest: int,
    *,
    reference: int,
    tau: int,
    required: int | None = None,
) -> str | None:
    """Name of the reason why a rollout sampled by versions ``oldest`` to ``newest`` is not trained; ``None`` if it is.

    Args:
        oldest: smallest policy version over all action tokens of the rollout, all segments.
        newest: largest.
        reference: newest published version of that policy without an abort.
        tau: largest lag that is kept: ``reference - oldest > tau`` drops.
        required: for IcePop and CompactionRL's PPO, the version of θ_old: every token must be of it, or the ratio mixes
            version lag with engine error, or knows nothing of the lag (DIS is for mixed versions).

    Raises:
        ConfigError: ``tau`` is negative.
    """
    _check_tau(tau)
    if newest > reference:
        return reasons.FUTURE_VERSION
    if reference - oldest > tau:
        return reasons.STALE
    if required is not None and oldest != newest:
        return reasons.MIXED_VERSIONS
    if required is not None and newest != required:
        return reasons.STALE
    return None


def trajectory_lags(versions: Tensor, rollouts: Tensor, num_rollouts: int, reference: int) -> Tensor:
    """``reference`` minus the oldest version of each rollout; ``[R]`` int64, 0 where a rollout has no action token.

    Args:
        versions: ``[N]`` integer policy version of each action token.
        rollouts: ``[N]`` int64 rollout number of each.
        num_rollouts: R.
        reference: newest published version.

    Raises:
        IntegrityError: a token is newer than ``reference``.
    """
    if versions.numel() and int(versions.max()) > reference:
        raise IntegrityError(
            f"{reasons.FUTURE_VERSION}: a token was sampled by version {int(versions.max())}, but the newest published "
            f"version is {reference}; the batch was pinned too early, or the tape is of another run"
        )
    oldest = torch.full((num_rollouts,), reference, dtype=torch.int64, device=versions.device)
    return reference - oldest.scatter_reduce(0, rollouts, versions.long(), "amin")


def is_fresh(lags: Tensor, tau: int) -> Tensor:
    """Bool: a lag of exactly ``tau`` is kept.

    Raises:
        ConfigError: ``tau`` is negative.
    """
    _check_tau(tau)
    return lags <= tau


def lag_histogram(lags: Tensor) -> dict[int, int]:
    """How often each lag occurs, largest lag first. Give it rollouts' lags, or tokens' ``reference - version``."""
    values, counts = torch.unique(lags, return_counts=True)
    return dict(sorted(zip(values.tolist(), counts.tolist(), strict=True), reverse=True))


def require_version(versions: Tensor, version: int) -> None:
    """IcePop's precondition, and PPO's without a correction: every action token was sampled by θ_old's version.

    Raises:
        UntrainableError: ``mixed_versions``: some were not; names the versions found.
    """
    found = torch.unique(versions).tolist()
    if found not in ([], [version]):
        raise UntrainableError(
            f"{reasons.MIXED_VERSIONS}: expected action tokens of version {version} alone, got {found[:8]}; "
            "a ratio to the version that the step starts from needs that one alone, train these with DIS"
        )


def _check_tau(tau: int) -> None:
    if tau < 0:
        raise ConfigError(f"staleness_tau: expected >= 0 published versions, got {tau}")
