"""A step of the critic: values, what they should be, and updates towards it (algorithms.md §4.11).

The order per batch: values of the batch → targets and advantages → the critic's updates → the policy's. Whether the
advantages use the values from before or from after the updates is D14's option.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolltape.numerics.packed import MicroBatch, micro_batches
from rolltape.numerics.weights import named_gradients, tensor_digests
from rolltape.trainers.algorithms.base import CriticAlgorithm
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.critic import ValueLoss, explained_variance, value_loss
from rolltape.trainers.critic_model import CRITIC_PREFIX, Critic, CriticModel, compute_dtype
from rolltape.trainers.learner import trainable
from rolltape.trainers.ranks import Ranks, clip_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOutcome:
    """What the critic did in a step. Token tensors are ``[N]``, 0 at tokens that are not trained."""

    values: Tensor  # float32, before the updates
    targets: Tensor  # float64
    losses: tuple[float, ...]  # before each update, of what the head predicts
    grad_norm: float  # at the last update, before clipping
    num_updates: int
    num_skipped: int  # updates left out because no token had a usable value and target
    num_nonfinite: int  # tokens without a usable value or target
    explained_variance: float | None  # of the values before the updates
    gradient_digests: Mapping[str, str] = field(default_factory=dict)  # of the last update, names with their prefix


def learn_values(critic: Critic, algorithm: CriticAlgorithm, ranks: Ranks) -> CriticOutcome:
    """Set the algorithm's advantages, and update the critic ``critic_updates`` times on the whole batch.

    An update without a usable value and target is left out: moments and weight decay would move weights.
    """
    work = _Work(critic, algorithm, ranks)
    config = algorithm.config
    values, ends = work.values()
    targets = algorithm.targets(values, ends)
    trained = algorithm.trained
    variance = explained_variance(values[trained], targets[trained])
    if config.value_norm:
        critic.normalise_with(critic.normaliser.moved(targets[trained], rate=config.value_norm_rate))
    aims = torch.where(trained, critic.normaliser.target(targets), 0.0).float()
    before = critic.normaliser.target(values)
    for group in critic.optimizer.param_groups:
        group["lr"] = config.critic_lr
    losses: list[float] = []
    grad_norm, num_updates, num_skipped, num_trusted = 0.0, 0, 0, 0
    digests: dict[str, str] = {}
    for _ in range(config.critic_updates):
        critic.optimizer.zero_grad(set_to_none=True)
        loss, num_trusted = work.accumulate(aims, before)
        losses.append(loss)
        digests = tensor_digests(ranks.whole(named_gradients(critic.model)))
        if not num_trusted:
            num_skipped = config.critic_updates - num_updates  # nothing moved, so the next would find the same
            break
        grad_norm = clip_gradients((p for _, p in trainable(critic.model)), config.max_grad_norm, ranks)
        critic.optimizer.step()
        num_updates += 1
    algorithm.estimate(*(work.values() if config.advantage_values == "post_update" else (values, ends)))
    return CriticOutcome(
        values=values,
        targets=targets,
        losses=tuple(losses),
        grad_norm=grad_norm,
        num_updates=num_updates,
        num_skipped=num_skipped,
        num_nonfinite=int(trained.sum()) - num_trusted,
        explained_variance=variance,
        gradient_digests={CRITIC_PREFIX + name: digest for name, digest in digests.items()},
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What does not change from update to update."""

    critic: Critic
    algorithm: CriticAlgorithm
    ranks: Ranks

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Values before trained tokens, float32 [N], and after the rows' last tokens, [B], if they are wanted."""
        batch, scored = self.algorithm.batch, self.algorithm.trained
        if not self.algorithm.wants_ends:
            found = self.critic.normaliser.value(self._predict(batch.token_ids, batch.cu_seqlens, scored))
            return torch.where(scored, found, 0.0), None
        token_ids, bounds, places = _with_ends(batch)
        ends = bounds[1:] - 1
        wanted = torch.zeros(token_ids.numel(), dtype=torch.bool)
        wanted[places] = scored
        # Values before tokens that are not trained are no one's: rows may have none.
        wanted[ends] = True
        found = self.critic.normaliser.value(self._predict(token_ids, bounds, wanted))
        return torch.where(scored, found[places], 0.0), found[ends]

    def accumulate(self, aims: Tensor, before: Tensor) -> tuple[float, int]:
        """Forward and backward of every micro-batch: the loss, and how many tokens it used; of all ranks."""
        algorithm, clip = self.algorithm, self.algorithm.config.value_clip
        total = torch.zeros((), dtype=torch.float64)
        trusted = torch.zeros((), dtype=torch.int64)
        for part in self._parts(algorithm.batch.token_ids, algorithm.batch.cu_seqlens, algorithm.trained):
            index = part.flat_index
            found: ValueLoss = value_loss(
                self._forward(part),
                aims[index],
                algorithm.value_weights[index],
                clip=clip,
                old_values=before[index] if clip is not None else None,
            )
            torch.autograd.backward(found.loss)
            total += found.loss.detach()
            trusted += found.trusted.sum()
        self.ranks.add_up(total, trusted)
        return float(total), int(trusted)

    @torch.no_grad()
    def _predict(self, token_ids: Tensor, bounds: Tensor, scored: Tensor) -> Tensor:
        found = torch.zeros(token_ids.numel())
        for part in self._parts(token_ids, bounds, scored):
            found[part.flat_index] = self._forward(part).float()
        self.ranks.add_up(found)
        return found

    def _forward(self, part: MicroBatch) -> Tensor:
        dtype = compute_dtype(self.algorithm.config)
        return self.ranks.forward(self.critic.model, functools.partial(_values_of, part), dtype=dtype)

    def _parts(self, token_ids: Tensor, bounds: Tensor, scored: Tensor) -> Iterator[MicroBatch]:
        budget = self.algorithm.config.token_budget
        return self.ranks.own_parts(micro_batches(token_ids, bounds, token_budget=budget, scored=scored))


def _values_of(part: MicroBatch, model: torch.nn.Module) -> Tensor:
    assert isinstance(model, CriticModel)
    predicted: Tensor = model(part)
    return predicted


def _with_ends(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The batch with one more token after each row, before which the row's end is read.

    Returns ids ``[N + B]``, bounds ``[B + 1]``, and where the batch's own tokens are, int64 ``[N]``. The added token is
    only ever a target; its id is never seen.
    """
    places = torch.arange(batch.num_tokens) + batch.row_of_token()
    bounds = batch.cu_seqlens + torch.arange(batch.num_rows + 1)
    token_ids = torch.zeros(batch.num_tokens + batch.num_rows, dtype=batch.token_ids.dtype)
    token_ids[places] = batch.token_ids
    return token_ids, bounds, places
