"""The critic: a model of its own that tells what a state is worth (algorithms.md §4.11).

A critic is the policy's architecture without its output layer, and a linear head. The value of an action token is read
at the state *before* the token, where its log-prob is read too, and knows no temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from rolltape.numerics.models import model_parts
from rolltape.numerics.packed import MicroBatch
from rolltape.schema.errors import ConfigError, IntegrityError
from rolltape.trainers.compute import recompute_backbone
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic import ValueNormaliser

CRITIC_POLICY_ID: Final = "critic"
CRITIC_PREFIX: Final = "critic/"
"""Before the names of the critic's tensors where they stand beside the policy's."""

_ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate"})
"""Modules that choose a mixture's experts, by the names that model families have for them."""


class CriticModel(nn.Module):
    """Hidden states of a causal model's backbone, and a linear head in float32.

    The head begins at 0: so do all values, and the first advantages are the rewards to go.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()

    def forward(self, part: MicroBatch) -> Tensor:
        """What the head predicts at the state before each scored token, ``[n]`` float32 (or wider), with gradient."""
        hidden = self.backbone(input_ids=part.input_ids, use_cache=False).last_hidden_state
        states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, part.source)
        wide = torch.promote_types(states.dtype, torch.float32)
        weight, bias = self.head.weight.to(wide), self.head.bias.to(wide)
        return nn.functional.linear(states.to(wide), weight, bias).squeeze(-1)


@dataclass(slots=True, kw_only=True)
class CriticCounts:
    """How often critic and policy were updated; what is said of one is checked against the other."""

    warmup_steps: int = 0
    """Steps done in which the critic alone was to be trained."""
    batches: int = 0
    """Steps done after those."""
    critic_updates: int = 0
    """In those ``batches``."""
    actor_updates: int = 0
    skipped_actor: int = 0
    """Updates of the policy that did not happen, because no token was trusted."""
    skipped_critic: int = 0

    def check(self, *, critic_updates: int, updates_per_batch: int) -> None:
        """Hold the ratio of updates after warm-up, as 2 to 1, against what was configured.

        Raises:
            IntegrityError: it is another one.
        """
        expected = (critic_updates * self.batches, updates_per_batch * self.batches)
        found = (self.critic_updates + self.skipped_critic, self.actor_updates + self.skipped_actor)
        if found != expected:
            raise IntegrityError(
                f"after {self.batches} steps past the critic's warm-up: expected {expected[0]} updates of the critic "
                f"and {expected[1]} of the policy, skipped ones included, got {found[0]} and {found[1]}"
            )


@dataclass(slots=True, kw_only=True)
class Critic:
    """A critic with its optimizer and what else it learns with."""

    model: CriticModel
    optimizer: torch.optim.Optimizer
    normaliser: ValueNormaliser = field(default_factory=ValueNormaliser)
    counts: CriticCounts = field(default_factory=CriticCounts)
    version: int = 0
    """Published versions of it, one a checkpoint."""

    def normalise_with(self, new: ValueNormaliser) -> None:
        """Take over new statistics, and rescale the head so that no value changes."""
        head = self.model.head
        with torch.no_grad():
            weight, bias = self.normaliser.rescaled_head(head.weight, head.bias, new)
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        self.normaliser = new


def make_critic_model(model: nn.Module, config: TrainerConfig) -> CriticModel:
    """The critic's model over the backbone of ``model``, what is to be frozen frozen.

    Raises:
        ConfigError: a part of ``train_critic`` or ``freeze_critic`` is in no module's name, or nothing learns.
    """
    parts = model_parts(model)
    critic = CriticModel(parts.backbone, parts.output_weight.shape[1])
    if config.train_critic:
        train_only(critic, config.train_critic)
    freeze(critic, config.freeze_critic)
    if not any(parameter.requires_grad for parameter in critic.parameters()):
        raise ConfigError(
            "trainer.train_critic, trainer.freeze_critic: expected a module of the critic that learns, got none of "
            f"{', '.join(config.train_critic)} left without {', '.join(config.freeze_critic)}"
        )
    if config.gradient_checkpointing:
        recompute_backbone(parts.backbone, dtype=compute_dtype(config))
    critic.train()
    return critic


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Exclude from training every parameter in whose path a module's name contains one of ``parts``.

    Frozen parameters need no gradient and are in no optimizer: weight decay would move them.

    Raises:
        ConfigError: no module's name contains one of them.
    """
    for part in parts:
        for parameter in _within(model, part, "freeze_critic"):
            parameter.requires_grad_(False)


def train_only(model: nn.Module, parts: Sequence[str]) -> None:
    """Exclude from training every parameter in whose path no module's name contains one of ``parts``.

    A mixture's router learns only where a part names it: ``mlp`` stands for a dense layer's projections and for those
    of experts (D27).

    Raises:
        ConfigError: no module's name contains one of them.
    """
    wanted = {id(parameter) for part in parts for parameter in _within(model, part, "train_critic")}
    for name, parameter in model.named_parameters():
        routers = _ROUTERS.intersection(name.split("."))
        if not all(any(part in router for part in parts) for router in routers):
            wanted.discard(id(parameter))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in wanted)


def _within(model: nn.Module, part: str, field_name: str) -> list[nn.Parameter]:
    """Parameters in whose path a module's name contains ``part``; there has to be one."""
    named = [(name.split(".")[:-1], parameter) for name, parameter in model.named_parameters()]
    found = [parameter for path, parameter in named if any(part in piece for piece in path)]
    if not found:
        known = sorted({piece for path, _ in named for piece in path})
        raise ConfigError(f"trainer.{field_name}: expected parts of {', '.join(known)}, got {part!r}")
    return found


def compute_dtype(config: TrainerConfig) -> torch.dtype | None:
    """What parameters are cast to for computing; None: they are taken as they are."""
    return None if config.compute_dtype == "float32" else getattr(torch, config.compute_dtype)
