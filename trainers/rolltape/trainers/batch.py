"""The packed batch: what a trainer computes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from rolltape.numerics.support import TokenSupport

_FROM_ROWS: Final[Any] = None
"""Stands for what follows from the rows alone until ``__post_init__`` has put it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """Rewards of single tokens, of all rows. A token may have several: they add up."""

    amounts: torch.Tensor  # float64 [R]
    rows: torch.Tensor  # int64 [R], row that the token is in
    positions: torch.Tensor  # int64 [R], its place in the row's response, from 0

    @classmethod
    def none(cls) -> TokenRewards:
        """No token has one."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(amounts=torch.zeros(0, dtype=torch.float64), rows=nothing, positions=nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """What teachers said of a batch's tokens, under the very ids and the very context that are trained."""

    log_probs: torch.Tensor  # float32 [N], NaN where there is no score
    teacher_ids: tuple[str | None, ...]  # [M], who scored each member; None: nobody, it has no row
    top_k_ids: torch.Tensor | None = None  # int64 [N, k], -1 where there is none
    top_k_log_probs: torch.Tensor | None = None  # float32 [N, k], NaN where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Rows of a batch, packed without padding; one row is one segment.

    ``N`` tokens in all, ``B`` rows, ``M`` members (trajectories; padding copies count). Masks are aligned to targets:
    ``action_mask[t]`` says that token ``t`` was sampled by the policy in this row, and is to be
    trained; its log-prob scores it given everything before it in its row.

    A member's rows are all of its segments that have a token to train, or none. ``segment_index`` numbers them from 0
    in their order on the tape; what the fold counts beside them (rejected or untrained summaries) has no number here.
    """

    token_ids: torch.Tensor  # int32 [N], context then response of each row
    cu_seqlens: torch.Tensor  # int64 [B+1], row b is token_ids[cu_seqlens[b]:cu_seqlens[b+1]]
    context_lengths: torch.Tensor  # int64 [B]
    action_mask: torch.Tensor  # bool [N]
    rollout_log_probs: torch.Tensor  # float32 [N], 0 at other tokens, NaN where the tape holds null at an action
    policy_versions: torch.Tensor  # int32 [N], -1 at other tokens
    row_member: torch.Tensor  # int64 [B], index of the member that the row belongs to
    rewards: torch.Tensor  # float64 [M], NaN where the whole attempt has none
    groups: torch.Tensor  # int64 [M], dense group number
    is_padding: torch.Tensor  # bool [M], a copy that fills its group
    segment_index: torch.Tensor = _FROM_ROWS  # int64 [B]; default: the order of a member's rows
    is_summary: torch.Tensor = _FROM_ROWS  # bool [B], the tokens to train are a summary's
    num_segments: torch.Tensor = _FROM_ROWS  # int64 [M], rows that the rollout must have
    is_truncated: torch.Tensor = _FROM_ROWS  # bool [M], cut off by length
    token_rewards: TokenRewards = _FROM_ROWS
    teacher: TeacherScores | None = None
    domains: tuple[str | None, ...] = _FROM_ROWS  # [M], None: unknown
    support: TokenSupport | None = None  # of the N tokens; those that are not to be trained have none

    def __post_init__(self) -> None:
        members = self.rewards.numel()
        made: dict[str, Callable[[], Any]] = {
            "segment_index": lambda: _ranks(self.row_member),
            "is_summary": lambda: torch.zeros(self.num_rows, dtype=torch.bool),
            "num_segments": lambda: torch.bincount(self.row_member, minlength=members),
            "is_truncated": lambda: torch.zeros(members, dtype=torch.bool),
            "token_rewards": TokenRewards.none,
            "domains": lambda: (None,) * members,
        }
        for name, make in made.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, make())

    @property
    def num_rows(self) -> int:
        """Rows (segments), B."""
        return self.context_lengths.numel()

    @property
    def num_members(self) -> int:
        """Members, M."""
        return self.rewards.numel()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, N."""
        return self.token_ids.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return _num_bytes(self)

    def row_of_token(self) -> torch.Tensor:
        """Row of each token, int64 [N]."""
        return torch.repeat_interleave(torch.arange(self.num_rows), self.cu_seqlens.diff())


def _ranks(row_member: torch.Tensor) -> torch.Tensor:
    """Number of each row among its member's, from 0, in the order in which they stand."""
    order = torch.argsort(row_member, stable=True)
    sizes = torch.bincount(row_member)
    firsts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    ranks = torch.empty_like(row_member)
    ranks[order] = torch.arange(row_member.numel()) - firsts
    return ranks


def _num_bytes(holder: PackedBatch | TokenRewards | TeacherScores) -> int:
    values = [getattr(holder, field.name) for field in fields(holder)]
    own = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    own += sum(value.nbytes for value in values if isinstance(value, TokenSupport))
    return own + sum(_num_bytes(value) for value in values if isinstance(value, TokenRewards | TeacherScores))
