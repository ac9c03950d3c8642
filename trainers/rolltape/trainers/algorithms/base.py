"""What a step asks of a method: token weights and advantages of the whole batch, and the loss of any part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rolltape.numerics.packed import MicroBatch
from rolltape.numerics.scoring import Scorer
from rolltape.trainers.advantages import group_advantages
from rolltape.trainers.aggregation import Mode, aggregation_weights
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.losses import PolicyLoss
from rolltape.trainers.reverse_kl import TokenDivergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What a step knows when it begins: the same for every part of the batch, and on every rank."""

    batch: PackedBatch
    config: TrainerConfig
    temperature: float
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    """By teacher id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTokens:
    """The scored tokens of one micro-batch; tensors are ``[n]``."""

    index: Tensor
    """int64, places in the batch."""
    current: Tensor
    """Log-probs under θ, with gradient."""
    old: Tensor
    """Under θ_old."""
    entropy: Tensor | None
    divergence: TokenDivergence | None = None
    """Of a method with ``needs_hidden``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """The loss of one micro-batch, and what of it is logged apart."""

    policy: PolicyLoss
    logged: Mapping[str, Tensor] = field(default_factory=dict)
    """``[n]`` each, by the names in :attr:`Algorithm.logged`."""


class Algorithm(ABC):
    """One method on one batch. Made anew for each step; keeps nothing from step to step."""

    logged: ClassVar[tuple[str, ...]] = ()
    """Tensors that arise with the loss. ``advantage`` is one where the advantage depends on θ."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.batch = method.batch
        self.config = method.config
        self.trained = self._trained()
        """Bool ``[N]``: tokens that are trained."""
        self.weights = token_weights(self.batch, self.config, self.trained)
        """float32 ``[N]``, aggregation weights over the whole batch (algorithms.md §2.4)."""
        self.member_advantages = torch.zeros(self.batch.num_members, dtype=torch.float64)
        """float64 ``[M]``."""
        self.advantages = torch.zeros(self.batch.num_tokens)
        """float32 ``[N]``, 0 at tokens that are not trained; constants."""
        self.fixed_parts: dict[str, Tensor] = {}
        """Tensors ``[N]`` to be logged apart that do not depend on θ."""

    @property
    def needs_hidden(self) -> bool:
        """Whether the loss is made of hidden states, beside log-probs."""
        return False

    def divergence(self, part: MicroBatch, hidden: Tensor, weight: Tensor) -> TokenDivergence:
        """Of a method with ``needs_hidden``: the divergence at each scored token, from its state and the output layer.

        Args:
            part: the micro-batch.
            hidden: ``[n, H]``, with gradient.
            weight: ``[V, H]``, likewise.
        """
        raise NotImplementedError

    @abstractmethod
    def loss(self, tokens: PartTokens) -> PartLoss:
        """The part's loss: a sum of weight times token loss."""

    def _trained(self) -> Tensor:
        return self.batch.action_mask

    def _group_advantages(self) -> Tensor:
        """Advantage of each member within its group, float64 [M]; members of a batch without any have none."""
        counted = ~self.batch.is_padding if self.config.stats == "valid_only" else None
        return group_advantages(self.batch.rewards, self.batch.groups, norm=self.config.adv_norm, counted=counted)

    def _to_tokens(self, of_members: Tensor) -> Tensor:
        """A member's value at its trained tokens, float32 [N]."""
        batch = self.batch
        return torch.where(self.trained, of_members[batch.row_member][batch.row_of_token()].float(), 0.0)


class CriticAlgorithm(Algorithm):
    """A method whose advantages come from a critic's values."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.value_weights = token_weights(self.batch, self.config, self.trained, mode="token_mean")
        """float32 ``[N]``: the value loss is a mean over trained tokens (algorithms.md §4.11)."""

    @property
    def wants_ends(self) -> bool:
        """Whether the values at the ends of rows are read, too."""
        return self.config.bootstrap_truncated and bool(self.batch.is_truncated.any())

    @abstractmethod
    def targets(self, values: Tensor, ends: Tensor | None) -> Tensor:
        """What the critic is to learn, float64 ``[N]``, 0 at tokens that are not trained.

        Args:
            values: ``[N]``, before the critic's update.
            ends: ``[B]``, values after each row's last token, if :attr:`wants_ends`.
        """

    @abstractmethod
    def estimate(self, values: Tensor, ends: Tensor | None) -> None:
        """Set the advantages from values ``[N]``."""


def token_weights(batch: PackedBatch, config: TrainerConfig, trained: Tensor, *, mode: Mode | None = None) -> Tensor:
    """Aggregation weight of each token, float32 ``[N]``, computed before any split; ``mode`` instead of the configured.

    Tokens that a gate rejects later keep their place in the denominator; tokens that are not ``trained`` have none.
    """
    weights = torch.zeros(batch.num_tokens)
    weights[trained] = aggregation_weights(
        batch.row_of_token()[trained],
        mode=mode or config.aggregation,
        num_rows=batch.num_rows,
        rollout_of_row=batch.row_member,
        max_length=config.const_length or None,
    )
    return weights
