"""CompactionRL: advantages across the segments of a rollout, and its loss (algorithms.md §4.12).

A row is a segment: execution or summary. Every segment is credited with the rollout's final reward, and its local
advantages shrink by γλ for each trainable token that the rollout still had before it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.trainers.dis import dis_policy_loss
from rolltape.trainers.gae import check_unit, discounted_sums, generalised_advantages, terminal_rewards
from rolltape.trainers.gates import no_gate
from rolltape.trainers.losses import PolicyLoss, clipped_policy_loss
from rolltape.trainers.safe_math import raw_ratio

Ratio = Literal["ppo", "dis"]


def complete_rollouts(rollout_of_row: Tensor, segment_index: Tensor, num_segments: Tensor) -> Tensor:
    """``[R]`` bool: all segments of the rollout are present, once each; others are dropped whole.

    Args:
        rollout_of_row: ``[B]`` int64, dense rollout numbers.
        segment_index: ``[B]`` int64, from 0.
        num_segments: ``[R]`` int64, how many the tape has for each rollout.
    """
    expected = num_segments[rollout_of_row]
    inside = (segment_index >= 0) & (segment_index < expected)
    width = int(num_segments.max()) + 1 if num_segments.numel() else 1
    found = torch.unique((rollout_of_row * width + segment_index)[inside])
    distinct = torch.bincount(found // width, minlength=num_segments.numel())
    rows = torch.bincount(rollout_of_row, minlength=num_segments.numel())
    return (distinct == num_segments) & (rows == num_segments)


def tokens_after(rows: Tensor, rollout_of_row: Tensor, segment_index: Tensor) -> Tensor:
    """``[B]`` int64: trainable tokens of the later segments of each row's rollout, whatever order the rows are in.

    Args:
        rows: ``[N]`` int64, row of each trainable token, after truncation and before any split over ranks.
        rollout_of_row: ``[B]`` int64.
        segment_index: ``[B]`` int64.

    Raises:
        UntrainableError: a rollout's segments are not 0, 1, 2 … without a gap.
    """
    num_rows = rollout_of_row.numel()
    if not num_rows:
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    _check_segments(rollout_of_row, segment_index)
    order = torch.argsort(rollout_of_row * (int(segment_index.max()) + 1) + segment_index, stable=True)
    lengths = torch.bincount(rows, minlength=num_rows)[order]
    rollouts = rollout_of_row[order]
    ends = lengths.cumsum(0)
    totals = torch.zeros(int(rollouts.max()) + 1, dtype=ends.dtype, device=ends.device)
    totals = totals.scatter_reduce(0, rollouts, ends, "amax")
    after = torch.empty_like(ends)
    after[order] = totals[rollouts] - ends
    return after


def compaction_advantages(
    values: Tensor,
    rewards: Tensor,
    rows: Tensor,
    *,
    rollout_of_row: Tensor,
    segment_index: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """``(γλ)^N_after`` times the segment's own advantage, whole; ``[N]`` float64.

    Args:
        values: ``[N]``, of trainable tokens.
        rewards: ``[B]``, the rollout's final reward, once for each of its segments.
        rows: ``[N]`` int64, segment of each token; a segment's tokens are adjacent, in order.
        rollout_of_row: ``[B]`` int64.
        segment_index: ``[B]`` int64.
        gamma: discount per trainable token.
        lam: one λ, or ``[B]`` and equal over a rollout (D16): only then does the multiplier equal the distance to the
            reward.
        bootstrap: ``[B]``, value after each segment's last token; default 0, and 0 for all but a rollout's last
            segment, where a rollout that was cut by length may have one.

    Raises:
        ConfigError: γ or λ outside [0, 1], or λ differs within a rollout.
        UntrainableError: a rollout lacks a segment.
    """
    _check_lambda(lam, rollout_of_row)
    after = tokens_after(rows, rollout_of_row, segment_index)
    ends = terminal_rewards(rewards, rows)
    local = generalised_advantages(values, ends, rows, gamma=gamma, lam=lam, bootstrap=bootstrap)
    factor = torch.as_tensor(lam, dtype=torch.float64, device=local.device) * gamma
    return torch.pow(factor.expand(after.shape), after.double())[rows] * local


def compaction_value_targets(rewards: Tensor, rows: Tensor, after: Tensor, *, gamma: float) -> Tensor:
    """The final reward discounted by each token's distance to the end of its *rollout*; ``[N]`` float64 (D17).

    Args:
        rewards: ``[B]``.
        rows: ``[N]`` int64.
        after: ``[B]``, from :func:`tokens_after`.
        gamma: discount per trainable token.
    """
    check_unit("gamma", gamma)
    ends = torch.as_tensor(gamma, dtype=torch.float64).pow(after.double()) * rewards.detach().double()
    return discounted_sums(terminal_rewards(ends, rows), rows, gamma)


def compaction_policy_loss(
    current_logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    agg_w: Tensor,
    *,
    ratio: Ratio = "ppo",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    is_partial: bool = False,
) -> PolicyLoss:
    """PPO's clipped loss, or DIS (``ratio="dis"``, unpublished, and recorded as such), with corrected advantages.

    Args:
        current_logp: ``[N]``, all trainable tokens, each scored in the context of its own segment.
        old_logp: the same under θ_old; not read by ``dis``.
        rollout_logp: as recorded; under ``ppo`` it only says whether a token can be trusted.
        advantage: from :func:`compaction_advantages`.
        agg_w: mode ``token_mean`` over the global batch: it does not see where segments are cut.
        ratio: ``ppo`` or ``dis``.
        eps_low: of the clip, or of the gate.
        eps_high: likewise.
        entropy: ``[N]``, with gradient, if there is an entropy bonus.
        entropy_coef: its coefficient (D33).
        is_partial: as in :func:`rolltape.trainers.losses.clipped_policy_loss`.

    Raises:
        ConfigError: an option outside its range.
    """
    if ratio == "dis":
        return dis_policy_loss(
            current_logp,
            rollout_logp,
            advantage,
            agg_w,
            eps_low=eps_low,
            eps_high=eps_high,
            entropy=entropy,
            entropy_coef=entropy_coef,
            is_partial=is_partial,
        )
    if ratio != "ppo":
        raise ConfigError(f"ratio: expected ppo or dis, got {ratio!r}")
    return clipped_policy_loss(
        current_logp,
        old_logp,
        no_gate(raw_ratio(old_logp, rollout_logp)),
        advantage,
        agg_w,
        eps_low=eps_low,
        eps_high=eps_high,
        rollout_logp=rollout_logp,
        entropy=entropy,
        entropy_coef=entropy_coef,
        is_partial=is_partial,
    )


def _check_segments(rollout_of_row: Tensor, segment_index: Tensor) -> None:
    counts = torch.bincount(rollout_of_row)
    complete = complete_rollouts(rollout_of_row, segment_index, counts)
    if not bool(complete.all()):
        lacking = torch.nonzero(~complete).flatten().tolist()
        raise UntrainableError(
            f"segments: expected 0, 1, 2 … of each rollout, once each, got others for rollouts {lacking[:5]}; "
            "a rollout that lacks a segment is dropped whole"
        )


def _check_lambda(lam: float | Tensor, rollout_of_row: Tensor) -> None:
    if not isinstance(lam, Tensor) or not lam.numel():
        return
    per_rollout = torch.empty(int(rollout_of_row.max()) + 1, dtype=lam.dtype, device=lam.device)
    per_rollout[rollout_of_row] = lam
    if not torch.equal(per_rollout[rollout_of_row], lam):
        raise ConfigError("lambda: expected one for all segments of a rollout, got several; use the rollout's length")
