"""The trained tokens of a batch in the order of their rollouts, and the rewards that fell on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rolltape.schema import reasons
from rolltape.schema.errors import UntrainableError
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.gae import credited_rewards, terminal_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTokens:
    """Trained tokens, rollout by rollout, segment by segment, whatever order the batch's rows are in."""

    index: Tensor
    """int64 ``[T]``, places in the batch."""
    rows: Tensor
    """int64 ``[T]``, row of each."""
    members: Tensor
    """int64 ``[T]``, member of each; a member's tokens are adjacent."""
    positions: Tensor
    """int64 ``[T]``, place in the rollout's responses taken as one, observations counted."""
    row_begins: Tensor
    """int64 ``[B]``, what is added to a place in a row's response to make it one in the rollout's."""

    @classmethod
    def of(cls, batch: PackedBatch, trained: Tensor) -> Self:
        """Order the tokens of ``trained`` (bool ``[N]``)."""
        index = torch.nonzero(trained).flatten()
        row_of_token = batch.row_of_token()
        width = int(batch.segment_index.max()) + 1 if batch.num_rows else 1
        key = batch.row_member * width + batch.segment_index
        order_of_row = torch.argsort(torch.argsort(key, stable=True))
        index = index[torch.argsort(order_of_row[row_of_token[index]], stable=True)]
        rows = row_of_token[index]
        begins = _row_begins(batch, key)
        places = index - batch.cu_seqlens[rows] - batch.context_lengths[rows]
        return cls(
            index=index,
            rows=rows,
            members=batch.row_member[rows],
            positions=begins[rows] + places,
            row_begins=begins,
        )

    def lengths(self, num_members: int) -> Tensor:
        """Trained tokens of each member, int64 ``[M]``."""
        return torch.bincount(self.members, minlength=num_members)

    def last_rows(self, num_rows: int) -> Tensor:
        """Bool ``[B]``: the row holds its rollout's last trained token."""
        last = torch.ones_like(self.members, dtype=torch.bool)
        last[:-1] = self.members[1:] != self.members[:-1]
        found = torch.zeros(num_rows, dtype=torch.bool)
        found[self.rows[last]] = True
        return found

    def rewards(self, batch: PackedBatch) -> Tensor:
        """The reward at each token, float64 ``[T]``: token rewards where they fell, a rollout's own at its last token.

        Raises:
            UntrainableError: a member has neither, or a reward is not finite (``reward_invalid``).
        """
        given = batch.token_rewards
        credited = credited_rewards(
            given.amounts,
            batch.row_member[given.rows],
            self.row_begins[given.rows] + given.positions,
            self.members,
            self.positions,
        )
        return credited + terminal_rewards(whole_rewards(batch), self.members)

    def scatter(self, values: Tensor, num_tokens: int) -> Tensor:
        """``[T]`` back to places in the batch, ``[N]``, 0 elsewhere."""
        return torch.zeros(num_tokens, dtype=values.dtype).index_copy(0, self.index, values)


def known_rewards(batch: PackedBatch) -> Tensor:
    """Each member's reward with those of its tokens added, float64 ``[M]``, NaN where there is none: for reports."""
    given = batch.token_rewards
    absent = batch.rewards.isnan() & _has_token_rewards(batch)
    return torch.where(absent, 0.0, batch.rewards).index_add(0, batch.row_member[given.rows], given.amounts)


def whole_rewards(batch: PackedBatch) -> Tensor:
    """Each member's reward as a whole attempt, float64 ``[M]``; 0 for one whose tokens alone have rewards.

    Raises:
        UntrainableError: a member has neither, or a reward is not finite (``reward_invalid``).
    """
    absent = batch.rewards.isnan() & _has_token_rewards(batch)
    found = torch.where(absent, 0.0, batch.rewards)
    _require_finite(found, "rewards of members")
    _require_finite(batch.token_rewards.amounts, "rewards of tokens")
    return found


def total_rewards(batch: PackedBatch) -> Tensor:
    """Each member's reward with those of its tokens added, float64 ``[M]``.

    Raises:
        UntrainableError: as :func:`whole_rewards`.
    """
    given = batch.token_rewards
    return whole_rewards(batch).index_add(0, batch.row_member[given.rows], given.amounts)


def _has_token_rewards(batch: PackedBatch) -> Tensor:
    """Bool ``[M]``."""
    found = torch.zeros(batch.num_members, dtype=torch.bool)
    found[batch.row_member[batch.token_rewards.rows]] = True
    return found


def _require_finite(values: Tensor, what: str) -> None:
    bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
    if bad:
        raise UntrainableError(
            f"{reasons.REWARD_INVALID}: {what} {bad[:5]} are not finite; an attempt without a valid reward is refused "
            "before a batch is formed, never read as 0"
        )


def _row_begins(batch: PackedBatch, key: Tensor) -> Tensor:
    """int64 ``[B]``: response tokens of the rows of the same rollout that come before each row."""
    order = torch.argsort(key, stable=True)
    lengths = (batch.cu_seqlens.diff() - batch.context_lengths)[order]
    members = batch.row_member[order]
    ends = lengths.cumsum(0)
    begins = ends - lengths
    # The first row of each member begins at 0.
    first = torch.ones_like(members, dtype=torch.bool)
    first[1:] = members[1:] != members[:-1]
    offset = torch.where(first, begins, 0).cummax(0).values if begins.numel() else begins
    found = torch.empty_like(begins)
    found[order] = begins - offset
    return found
