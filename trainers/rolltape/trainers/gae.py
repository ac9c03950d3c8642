"""Generalised advantage estimates over action tokens, observations skipped (algorithms.md §4.11).

Everything is flat over action tokens: a row's tokens lie side by side in the order in which they were sampled, so that
the next action token is the next entry, however many observation tokens lay between. Observations have no entry, and
thus no value, no reward and no discount. Sums run in float64 by doubling, ``log2`` of the longest row many tensor
operations, and a token's sum depends on its own row alone: any cut of the batch gives the same bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError, UntrainableError

LENGTH_ALPHA: Final = 1.5
WHITEN_EPSILON: Final = 1e-8
_MIN_WHITENED: Final = 2


def generalised_advantages(
    values: Tensor,
    rewards: Tensor,
    rows: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """``A_t = d_t + gamma lam A_next`` with ``d_t = r_t + gamma V_next - V_t``; ``[N]`` float64, detached.

    Args:
        values: ``[N]``, the critic's value of the state before each action token.
        rewards: ``[N]``, from :func:`credited_rewards` or :func:`terminal_rewards`.
        rows: ``[N]`` int64, row of each token; a row's tokens are adjacent, in order.
        gamma: discount per action token, in [0, 1].
        lam: λ in [0, 1], or ``[B]``, one per row.
        bootstrap: ``[B]``, value after the last action token of each row; default 0, also for rows cut by length.

    Raises:
        ConfigError: γ or λ outside [0, 1], tensors of different lengths, or a row whose tokens are not adjacent.

    Example: values ``[.5, .6]``, rewards ``[0, 1]``, γ = 1, λ = 0.9 give ``[0.46, 0.4]``.
    """
    check_unit("gamma", gamma)
    _check_rows(rows, values, rewards)
    values, rewards = values.detach().double(), rewards.detach().double()
    last = _last_of_row(rows)
    after = torch.zeros_like(values) if bootstrap is None else bootstrap.detach().double()[rows]
    following = torch.where(last, after, values.roll(-1))
    return discounted_sums(rewards + gamma * following - values, rows, gamma * _per_token(lam, rows))


def discounted_sums(terms: Tensor, rows: Tensor, factor: float | Tensor) -> Tensor:
    """``S_t = x_t + factor S_next`` within each row; ``[N]`` float64.

    Args:
        terms: ``[N]`` x.
        rows: ``[N]`` int64; a row's tokens are adjacent.
        factor: in [0, 1], or ``[N]`` and equal over a row.
    """
    sums = terms.double()
    power = torch.as_tensor(factor, dtype=torch.float64, device=sums.device).expand_as(sums)
    step, longest = 1, int(torch.bincount(rows).max()) if rows.numel() else 0
    while step < longest:
        reached = rows[:-step] == rows[step:]
        # Selected, not multiplied by the mask: a NaN of one row must not reach another.
        further = torch.where(reached, power[:-step] * sums[step:], 0.0)
        sums = torch.cat([sums[:-step] + further, sums[-step:]])
        power, step = power.square(), step * 2
    return sums


def value_targets(
    values: Tensor,
    rewards: Tensor,
    rows: Tensor,
    *,
    gamma: float,
    critic_lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """What the critic learns, ``[N]`` float64: advantage at λ_critic plus value; at 1 the discounted reward-to-go.

    Arguments and errors as in :func:`generalised_advantages`.
    """
    advantages = generalised_advantages(values, rewards, rows, gamma=gamma, lam=critic_lam, bootstrap=bootstrap)
    return advantages + values.detach().double()


def lambda_by_length(num_actions: Tensor, alpha: float = LENGTH_ALPHA) -> Tensor:
    """``1 - 1 / (alpha l)`` clamped to [0, 1], float64, for l action tokens of the *whole rollout* (D15).

    Raises:
        ConfigError: ``alpha`` is not above 0.
    """
    if not alpha > 0.0:
        raise ConfigError(f"lambda_alpha: expected > 0, got {alpha}")
    return (1.0 - 1.0 / (alpha * num_actions.double())).clamp(0.0, 1.0)


def credited_rewards(
    amounts: Tensor, reward_rows: Tensor, reward_positions: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """Rewards at the action tokens that earned them, ``[N]`` float64: each at the last one at or before its place.

    Args:
        amounts: ``[R]`` rewards, in any order; several may fall on one token and add up.
        reward_rows: ``[R]`` int64.
        reward_positions: ``[R]`` int64, place in the row's response, observations counted.
        rows: ``[N]`` int64, ascending, row of each action token.
        positions: ``[N]`` int64, place of each action token in its row's response, ascending within the row.

    Raises:
        UntrainableError: a reward has no action token before it.
    """
    if amounts.numel() == 0:
        return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    widest = int(torch.cat([positions, reward_positions]).max()) + 1
    places = rows * widest + positions
    token = torch.searchsorted(places, reward_rows * widest + reward_positions, right=True) - 1
    earned = token >= 0
    if rows.numel():
        earned &= rows[token.clamp(min=0)] == reward_rows
    if not bool(earned.all()):
        lost = torch.nonzero(~earned).flatten().tolist()
        raise UntrainableError(
            f"rewards: expected an action token at or before each, got none for rewards {lost[:5]} of rows "
            f"{reward_rows[~earned].tolist()[:5]}; a reward is never dropped, so leave out rows without an action"
        )
    return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device).index_add(0, token, amounts.double())


def terminal_rewards(rewards: Tensor, rows: Tensor) -> Tensor:
    """``[N]`` float64: the reward ``[B]`` of each row at its last action token, observations after it or not."""
    last = _last_of_row(rows)
    return torch.where(last, rewards.detach().double()[rows], 0.0)


def whitened(advantages: Tensor) -> Tensor:
    """``(A - mean) / sqrt(var + 1e-8)`` over all finite entries, sample variance; an option, off by default.

    Fewer than two finite entries have no variance and come back as they are. Entries that are not finite stay so.
    """
    finite = advantages[torch.isfinite(advantages)].double()
    if finite.numel() < _MIN_WHITENED:
        return advantages
    return (advantages.double() - finite.mean()) * torch.rsqrt(finite.var() + WHITEN_EPSILON)


def check_unit(name: str, value: float) -> None:
    """Refuse a number outside [0, 1].

    Raises:
        ConfigError: it is.
    """
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: expected 0 <= {name} <= 1, got {value}")


def _per_token(lam: float | Tensor, rows: Tensor) -> float | Tensor:
    if not isinstance(lam, Tensor):
        check_unit("lambda", lam)
        return lam
    if lam.numel() and not bool(((lam >= 0.0) & (lam <= 1.0)).all()):
        raise ConfigError(f"lambda: expected 0 <= lambda <= 1 for each row, got {lam.min():g} to {lam.max():g}")
    return lam.detach().double()[rows]


def _last_of_row(rows: Tensor) -> Tensor:
    """``[N]`` bool."""
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    return last


def _check_rows(rows: Tensor, *others: Tensor) -> None:
    lengths = [rows.numel(), *(other.numel() for other in others)]
    if rows.ndim != 1 or len(set(lengths)) != 1:
        raise ConfigError(f"expected flat tensors of one length [N], got lengths {lengths}")
    if int(_last_of_row(rows).sum()) != torch.unique(rows).numel():
        raise ConfigError("rows: expected each row's tokens side by side, got a row in several pieces")
