"""What a trainer trains: a policy's model with its optimizer, and a critic where the method has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from rolltape.numerics.device import set_deterministic
from rolltape.numerics.models import model_parts
from rolltape.trainers.compute import recompute_backbone
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic_model import Critic, compute_dtype, make_critic_model
from rolltape.trainers.initial import initial_model
from rolltape.trainers.job import TrainerJob


@dataclass(slots=True)
class Learner:
    """A policy and its critic, with their optimizers. Steps change them in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None


def build_learner(job: TrainerJob, *, from_checkpoint: bool = False) -> Learner:
    """Models with their initial weights, and their optimizers; deterministic in the job.

    The critic begins with the policy's backbone. ``from_checkpoint``: weights are about to be loaded, so initial ones
    that another run published, and that may be gone, are not read.

    Raises:
        ConfigError: an option that the model does not allow.
        ReplayError: see :func:`rolltape.trainers.initial.initial_model`, as for others.
    """
    config = job.trainer
    set_deterministic(config.num_threads, job.seed)
    if from_checkpoint:
        job = replace(job, initial=None)
    model = initial_model(job)
    if config.gradient_checkpointing:
        recompute_backbone(model_parts(model).backbone, dtype=compute_dtype(config))
    learner = Learner(model, make_optimizer(model, config))
    if config.uses_critic:
        learner.critic = make_critic(initial_model(job), config)
    return learner


def make_critic(model: nn.Module, config: TrainerConfig) -> Critic:
    """A critic that has learnt nothing yet, over the backbone of ``model``, which becomes its own."""
    critic = make_critic_model(model, config)
    return Critic(model=critic, optimizer=make_optimizer(critic, config, lr=config.critic_lr))


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters that the optimizer owns, in the model's order (a tied tensor appears once)."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def make_optimizer(model: nn.Module, config: TrainerConfig, *, lr: float | None = None) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in the model's order; ``lr`` instead of the configured one."""
    return torch.optim.AdamW(
        [parameter for _, parameter in trainable(model)],
        lr=config.lr if lr is None else lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )


@dataclass(slots=True)
class UpdateCount:
    """How often an optimizer was called."""

    done: int = 0


@contextmanager
def counted_updates(optimizer: torch.optim.Optimizer) -> Iterator[UpdateCount]:
    """Count the updates of an optimizer where they happen, not where somebody says that they did."""
    count = UpdateCount()

    def add(*_: object) -> None:
        count.done += 1

    hook = optimizer.register_step_post_hook(add)
    try:
        yield count
    finally:
        hook.remove()


def reset_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Forget both moments and the count of steps that corrects their bias (D25); says what was forgotten.

    Weights stay, and so does the learning rate, which is a function of the trainer's step.
    """
    optimizer.state.clear()  # made again, as zeros, by the next step
    return "exp_avg, exp_avg_sq, step"
