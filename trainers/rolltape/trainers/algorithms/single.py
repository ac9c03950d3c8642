"""SAO: single rollouts, a critic's skip-observation advantages, DIS's loss (algorithms.md §4.11)."""

from __future__ import annotations

import torch
from torch import Tensor

from rolltape.trainers.algorithms.base import CriticAlgorithm, Method
from rolltape.trainers.algorithms.groups import DirectLoss
from rolltape.trainers.algorithms.rollouts import RolloutTokens
from rolltape.trainers.gae import generalised_advantages, lambda_by_length, value_targets, whitened


class Sao(DirectLoss, CriticAlgorithm):
    """A rollout is one line of action tokens, however many segments and observations cut it."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.tokens = RolloutTokens.of(self.batch, self.trained)
        self.rewards = self.tokens.rewards(self.batch)
        lengths = self.tokens.lengths(self.batch.num_members)
        self.lam = lambda_by_length(lengths, self.config.lambda_alpha)

    def targets(self, values: Tensor, ends: Tensor | None) -> Tensor:
        """See :func:`rolltape.trainers.gae.value_targets`."""
        tokens = self.tokens
        found = value_targets(
            values[tokens.index],
            self.rewards,
            tokens.members,
            gamma=self.config.gamma,
            critic_lam=self.config.critic_lambda,
            bootstrap=self._bootstrap(ends),
        )
        return tokens.scatter(found, self.batch.num_tokens)

    def estimate(self, values: Tensor, ends: Tensor | None) -> None:
        """Advantages with one λ a rollout, by its length (D15)."""
        tokens = self.tokens
        found = generalised_advantages(
            values[tokens.index],
            self.rewards,
            tokens.members,
            gamma=self.config.gamma,
            lam=self.lam,
            bootstrap=self._bootstrap(ends),
        )
        if self.config.whiten:
            found = whitened(found)
        self.advantages = tokens.scatter(found, self.batch.num_tokens).float()

    def _bootstrap(self, ends: Tensor | None) -> Tensor | None:
        """Value after each member's last token, float64 [M]: that of a truncated one's end, if asked for."""
        if ends is None:
            return None
        rows = torch.nonzero(self.tokens.last_rows(self.batch.num_rows)).flatten()
        members = self.batch.row_member[rows]
        found = torch.zeros(self.batch.num_members, dtype=torch.float64)
        found[members] = torch.where(self.batch.is_truncated[members], ends[rows].double(), 0.0)
        return found
