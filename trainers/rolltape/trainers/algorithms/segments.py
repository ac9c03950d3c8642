"""CompactionRL: all segments of a rollout, summaries included, with one critic (algorithms.md §4.12)."""

from __future__ import annotations

import torch
from torch import Tensor

from rolltape.schema.errors import UntrainableError
from rolltape.trainers.algorithms.base import CriticAlgorithm, Method, PartLoss, PartTokens
from rolltape.trainers.algorithms.rollouts import RolloutTokens, total_rewards
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.compaction import (
    compaction_advantages,
    compaction_policy_loss,
    compaction_value_targets,
    complete_rollouts,
    tokens_after,
)
from rolltape.trainers.gae import (
    generalised_advantages,
    lambda_by_length,
    terminal_rewards,
    value_targets,
    whitened,
)


class Compaction(CriticAlgorithm):
    """Every segment is credited with its rollout's reward; those of single tokens are added to it.

    Raises:
        UntrainableError: a rollout lacks a segment.
    """

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        _require_complete(self.batch)
        batch = self.batch
        self.tokens = RolloutTokens.of(batch, self.trained)
        self.member_rewards = total_rewards(batch)
        # λ is the rollout's, not the segment's: only then is its power the distance to the reward (D16).
        self.lam = lambda_by_length(self.tokens.lengths(batch.num_members), self.config.lambda_alpha)
        self.rows = batch.row_of_token()[self.trained]

    def targets(self, values: Tensor, ends: Tensor | None) -> Tensor:
        """The final reward by distance to the end of the rollout, or (``local``) of the segment (D17)."""
        config, batch = self.config, self.batch
        rewards = self.member_rewards[batch.row_member]
        if config.critic_target == "global":
            after = tokens_after(self.rows, batch.row_member, batch.segment_index)
            found = compaction_value_targets(rewards, self.rows, after, gamma=config.gamma)
        else:
            found = value_targets(
                values[self.trained],
                terminal_rewards(rewards, self.rows),
                self.rows,
                gamma=config.gamma,
                critic_lam=config.critic_lambda,
                bootstrap=self._bootstrap(ends),
            )
        return self._to_batch(found)

    def estimate(self, values: Tensor, ends: Tensor | None) -> None:
        """Local advantages times (γλ)^N_after; or, with ``boundary_value`` bootstrap, over the rollout as one line."""
        config, batch = self.config, self.batch
        if config.boundary_value == "bootstrap":
            found = self._stitched(values, ends)
        else:
            local = compaction_advantages(
                values[self.trained],
                self.member_rewards[batch.row_member],
                self.rows,
                rollout_of_row=batch.row_member,
                segment_index=batch.segment_index,
                gamma=config.gamma,
                lam=self.lam[batch.row_member],
                bootstrap=self._bootstrap(ends),
            )
            found = self._to_batch(local)
        if config.whiten:
            found[self.trained] = whitened(found[self.trained])
        self.advantages = found.float()

    def loss(self, tokens: PartTokens) -> PartLoss:
        """See :func:`rolltape.trainers.compaction.compaction_policy_loss`."""
        config, index = self.config, tokens.index
        return PartLoss(
            policy=compaction_policy_loss(
                tokens.current,
                tokens.old,
                self.batch.rollout_log_probs[index],
                self.advantages[index],
                self.weights[index],
                ratio=config.compaction_ratio,
                eps_low=config.epsilon_low,
                eps_high=config.epsilon_high,
                entropy=tokens.entropy,
                entropy_coef=config.entropy_coef,
                is_partial=True,
            )
        )

    def _trained(self) -> Tensor:
        batch = self.batch
        if self.config.train_summary:
            return batch.action_mask
        return batch.action_mask & ~batch.is_summary[batch.row_of_token()]

    def _stitched(self, values: Tensor, ends: Tensor | None) -> Tensor:
        """Advantages in which a segment's last token is followed by the value of the next segment's first, [N]."""
        tokens, batch = self.tokens, self.batch
        after = None
        if ends is not None:
            rows = torch.nonzero(tokens.last_rows(batch.num_rows)).flatten()
            after = torch.zeros(batch.num_members, dtype=torch.float64)
            bootstrap = self._bootstrap(ends)
            assert bootstrap is not None
            after[batch.row_member[rows]] = bootstrap[rows]
        found = generalised_advantages(
            values[tokens.index],
            terminal_rewards(self.member_rewards, tokens.members),
            tokens.members,
            gamma=self.config.gamma,
            lam=self.lam,
            bootstrap=after,
        )
        return tokens.scatter(found, batch.num_tokens)

    def _bootstrap(self, ends: Tensor | None) -> Tensor | None:
        """Value after each row's last token, float64 [B]: of the last row of a truncated rollout, if asked for."""
        if ends is None:
            return None
        batch = self.batch
        wanted = self.tokens.last_rows(batch.num_rows) & batch.is_truncated[batch.row_member]
        return torch.where(wanted, ends.double(), 0.0)

    def _to_batch(self, values: Tensor) -> Tensor:
        found = torch.zeros(self.batch.num_tokens, dtype=torch.float64)
        found[self.trained] = values
        return found


def _require_complete(batch: PackedBatch) -> None:
    complete = complete_rollouts(batch.row_member, batch.segment_index, batch.num_segments)
    if not bool(complete.all()):
        lacking = torch.nonzero(~complete).flatten().tolist()
        raise UntrainableError(
            f"segments: expected all that the tape has of each rollout, got others for members {lacking[:5]}; "
            "a rollout that lacks a segment is dropped whole"
        )
