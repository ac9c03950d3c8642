"""One training step on one packed batch, whatever the method, and what of it goes onto the tape.

The computation is a function of (weights, optimizer state, batch, configuration, number of ranks) alone. Micro-batches
are cut by the batch's lengths and accumulate in a fixed order, so a replay adds the same numbers in the same order.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rolltape.numerics.device import rng_state_digest
from rolltape.numerics.logprob import linear_log_probs
from rolltape.numerics.models import model_parts
from rolltape.numerics.packed import MicroBatch, micro_batches, states_before
from rolltape.numerics.scoring import Scorer
from rolltape.numerics.weights import combine_digests, named_gradients, named_weights, tensor_digests
from rolltape.schema.errors import ConfigError
from rolltape.trainers.algorithms import make_algorithm
from rolltape.trainers.algorithms.base import Algorithm, CriticAlgorithm, Method, PartTokens
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic_model import CRITIC_PREFIX, compute_dtype
from rolltape.trainers.critic_step import CriticOutcome, learn_values
from rolltape.trainers.learner import Learner, UpdateCount, counted_updates, make_optimizer, trainable
from rolltape.trainers.metrics import Verdicts
from rolltape.trainers.ranks import ONE_PROCESS, Ranks, clip_gradients
from rolltape.trainers.reverse_kl import TokenDivergence

__all__ = ["StepOutcome", "make_optimizer", "train_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step computed. Token tensors run over all N tokens of the batch; other than action tokens are 0."""

    loss: float
    grad_norm: float
    skipped: bool
    """Nothing was learnt. A step in which only the critic learns is not skipped."""
    old_log_probs: Tensor  # float32 [N]
    current_log_probs: Tensor  # float32 [N], at the last update
    entropy: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N]
    gate_weights: Tensor  # float32 [N]
    trusted: Tensor  # bool [N]
    verdicts: Verdicts  # of gate and clip, at the last update
    member_advantages: Tensor  # float64 [M]
    micro_batches: tuple[int, ...]
    gradient_digests: Mapping[str, str]
    weight_digests: Mapping[str, str]
    rng_state_digest: str
    actor_updates: int = 1
    """How often the policy was updated; 0 in the critic's warm-up, and where the policy's part was skipped."""
    trained: Tensor | None = None
    """Bool [N], the tokens that the method trains; None: all action tokens."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors [N] that a method logs apart: ``task_advantage``, ``teacher_gap``, ``divergence``."""
    critic: CriticOutcome | None = None

    @property
    def loss_bits(self) -> int:
        """Bit pattern of the float64 loss, as a signed integer."""
        return int(struct.unpack("<q", struct.pack("<d", self.loss))[0])

    @property
    def gradient_digest(self) -> str:
        """One digest over all gradients."""
        return combine_digests(self.gradient_digests)

    @property
    def weights_digest(self) -> str:
        """One digest over all new weights, the critic's included."""
        return combine_digests(self.weight_digests)

    @property
    def actor_digest(self) -> str:
        """One digest over the policy's new weights: that of the version that is published."""
        return combine_digests({n: d for n, d in self.weight_digests.items() if not n.startswith(CRITIC_PREFIX)})


def train_step(
    learner: Learner,
    batch: PackedBatch,
    config: TrainerConfig,
    *,
    step: int,
    temperature: float,
    ranks: Ranks = ONE_PROCESS,
    scorers: Mapping[str, Scorer] | None = None,
) -> StepOutcome:
    """Update ``learner`` on ``batch``: its critic, if it has one, then its policy, at the learning rate of ``step``.

    The policy's optimizer is not called when no token is trusted (algorithms.md §2.5): moments and weight decay would
    move weights; nor in the critic's warm-up. Gradient digests are of the last update, before clipping.

    With several ``ranks`` each calls this with the same batch, and gets the same outcome.

    Args:
        learner: changed in place.
        batch: rows in any order.
        config: the method and its options.
        step: from 1.
        temperature: at which the batch was sampled.
        ranks: over which the learner's models are sharded.
        scorers: of teachers by id, for ``opd_form`` full.

    Raises:
        ConfigError: the method needs a critic, and the learner has none.
        UntrainableError: the batch lacks what the method learns from.
        IntegrityError: the updates that were made of critic and policy are not in the configured ratio.
    """
    for group in learner.optimizer.param_groups:
        group["lr"] = config.lr_at(step)
    method = Method(batch=batch, config=config, temperature=temperature, scorers=scorers or {})
    algorithm = make_algorithm(method)
    is_warmup = False
    critic, of_critic = None, UpdateCount()
    if isinstance(algorithm, CriticAlgorithm):
        is_warmup, critic, of_critic = _critic_phase(learner, algorithm, ranks)
    work = _Work(learner.model, algorithm, temperature, ranks)
    with counted_updates(learner.optimizer) as of_actor:
        updates = work.look() if is_warmup else work.update(learner.optimizer)
    if learner.critic is not None and critic is not None and not is_warmup:
        counts = learner.critic.counts
        counts.batches += 1
        counts.critic_updates += of_critic.done
        counts.skipped_critic += critic.num_skipped
        counts.actor_updates += of_actor.done
        counts.skipped_actor += updates.skipped
        counts.check(critic_updates=config.critic_updates, updates_per_batch=config.updates_per_batch)
    tokens = updates.tokens
    return StepOutcome(
        loss=updates.loss,
        grad_norm=updates.grad_norm,
        skipped=not (updates.done or (is_warmup and critic is not None and critic.num_updates > 0)),
        old_log_probs=tokens.old,
        current_log_probs=tokens.current,
        entropy=tokens.entropy,
        advantages=tokens.logged.get("advantage", algorithm.advantages),
        gate_weights=tokens.gate,
        trusted=tokens.trusted,
        verdicts=tokens.verdicts,
        member_advantages=algorithm.member_advantages,
        micro_batches=updates.sizes,
        gradient_digests={**updates.digests, **(critic.gradient_digests if critic else {})},
        weight_digests=_weight_digests(learner, ranks),
        rng_state_digest=rng_state_digest(),
        actor_updates=updates.done,
        trained=algorithm.trained,
        parts={**algorithm.fixed_parts, **{n: t for n, t in tokens.logged.items() if n != "advantage"}},
        critic=critic,
    )


def _critic_phase(
    learner: Learner, algorithm: CriticAlgorithm, ranks: Ranks
) -> tuple[bool, CriticOutcome | None, UpdateCount]:
    """Whether the step is one of the critic's warm-up, and its updates; nothing where there is no token."""
    critic = learner.critic
    if critic is None:
        raise ConfigError(
            f"algorithm {algorithm.config.algorithm}: expected a learner with a critic, got none; "
            "make it with build_learner"
        )
    if not bool(algorithm.trained.any()):
        return False, None, UpdateCount()
    is_warmup = critic.counts.warmup_steps < algorithm.config.critic_warmup_steps
    if is_warmup:
        critic.counts.warmup_steps += 1
    with counted_updates(critic.optimizer) as count:
        return is_warmup, learn_values(critic, algorithm, ranks), count


def _weight_digests(learner: Learner, ranks: Ranks) -> dict[str, str]:
    found = tensor_digests(ranks.whole(named_weights(learner.model)))
    if learner.critic is not None:
        of_critic = tensor_digests(ranks.whole(named_weights(learner.critic.model)))
        found |= {CRITIC_PREFIX + name: digest for name, digest in of_critic.items()}
    return found


@dataclass(slots=True)
class _Tokens:
    """Per-token tensors of a batch, filled micro-batch by micro-batch."""

    old: Tensor
    current: Tensor
    entropy: Tensor
    gate: Tensor
    trusted: Tensor
    verdicts: Verdicts
    logged: dict[str, Tensor]

    @classmethod
    def zeros(cls, count: int, logged: tuple[str, ...]) -> _Tokens:
        """Nothing computed yet."""
        old, current, entropy, gate = (torch.zeros(count) for _ in range(4))
        others = {name: torch.zeros(count) for name in logged}
        trusted, *verdicts = (torch.zeros(count, dtype=torch.bool) for _ in range(5))
        return cls(old, current, entropy, gate, trusted, Verdicts(*verdicts), others)

    def add_up(self, ranks: Ranks) -> None:
        """Every rank has its own micro-batches' tokens and 0 elsewhere; afterwards all have all."""
        tensors = (self.old, self.current, self.entropy, self.gate, self.trusted)
        ranks.add_up(*tensors, *self.verdicts, *self.logged.values())


class _Updates(NamedTuple):
    """What the policy's updates on a batch came to; other than the counts, of the last one, or of a look."""

    tokens: _Tokens
    loss: float
    grad_norm: float
    done: int
    digests: dict[str, str]
    sizes: tuple[int, ...]
    skipped: int = 0
    """Updates left out because no token was trusted."""


@dataclass(frozen=True, slots=True)
class _Work:
    """The policy's part of a step."""

    model: torch.nn.Module
    algorithm: Algorithm
    temperature: float
    ranks: Ranks

    def update(self, optimizer: torch.optim.Optimizer) -> _Updates:
        """Update the policy ``updates_per_batch`` times; an update without a trusted token ends it."""
        config = self.algorithm.config
        old = self._old_log_probs() if config.updates_per_batch > 1 else None
        found = None
        grad_norm, done = 0.0, 0
        for _ in range(config.updates_per_batch):
            optimizer.zero_grad(set_to_none=True)
            found = self._accumulate(old)
            digests = tensor_digests(self.ranks.whole(named_gradients(self.model)))
            found = found._replace(digests=digests)
            if not bool(found.tokens.trusted.any()):
                found = found._replace(loss=0.0, skipped=config.updates_per_batch - done)
                break
            grad_norm = clip_gradients((p for _, p in trainable(self.model)), config.max_grad_norm, self.ranks)
            optimizer.step()
            done += 1
        assert found is not None
        return found._replace(grad_norm=grad_norm, done=done)

    def look(self) -> _Updates:
        """What an update would see; nothing is updated."""
        with torch.no_grad():
            return self._accumulate(None)

    def _parts(self, sizes: list[int] | None = None) -> Iterator[MicroBatch]:
        """This rank's micro-batches; ``sizes`` gets the rows of every rank's."""

        def all_parts() -> Iterator[MicroBatch]:
            batch, budget = self.algorithm.batch, self.algorithm.config.token_budget
            scored = self.algorithm.trained
            for part in micro_batches(
                batch.token_ids, batch.cu_seqlens, token_budget=budget, scored=scored, support=batch.support
            ):
                if sizes is not None:
                    sizes.append(part.rows.numel())
                yield part

        return self.ranks.own_parts(all_parts())

    def _old_log_probs(self) -> Tensor:
        """Log-probs under the weights before the first update, float32 [N], on every rank."""
        old = torch.zeros(self.algorithm.batch.num_tokens)
        dtype = compute_dtype(self.algorithm.config)
        with torch.no_grad():
            for part in self._parts():
                scores = self.ranks.score(self.model, part, temperature=self.temperature, dtype=dtype)
                old[part.flat_index] = scores.log_probs
        self.ranks.add_up(old)
        return old

    def _accumulate(self, old: Tensor | None) -> _Updates:
        """Forward and (where gradients are on) backward of every micro-batch; of all ranks."""
        tokens = _Tokens.zeros(self.algorithm.batch.num_tokens, self.algorithm.logged)
        total = torch.zeros((), dtype=torch.float64)
        sizes: list[int] = []
        for part in self._parts(sizes):
            scores = self._score(part)
            index = part.flat_index
            current = scores.log_probs
            before = current.detach() if old is None else old[index]
            found = self.algorithm.loss(
                PartTokens(
                    index=index, current=current, old=before, entropy=scores.entropy, divergence=scores.divergence
                )
            )
            if torch.is_grad_enabled():
                torch.autograd.backward(found.policy.loss)
            total += found.policy.loss.detach().double()
            tokens.old[index] = before
            tokens.current[index] = current.detach()
            tokens.entropy[index] = scores.entropy.detach().float()
            tokens.gate[index] = found.policy.gate_weights
            tokens.trusted[index] = found.policy.trusted
            for whole, of_part in zip(tokens.verdicts, Verdicts.of(found.policy), strict=True):
                whole[index] = of_part
            for name, values in found.logged.items():
                tokens.logged[name][index] = values
        self.ranks.add_up(total)
        tokens.add_up(self.ranks)
        return _Updates(tokens, float(total), 0.0, 0, {}, tuple(sizes))

    def _score(self, part: MicroBatch) -> _Scores:
        dtype = compute_dtype(self.algorithm.config)
        if self.algorithm.needs_hidden:
            function = functools.partial(_with_divergence, self.algorithm, part, self.temperature)
            log_probs, entropy, divergence, is_number = self.ranks.forward(self.model, function, dtype=dtype)
            return _Scores(log_probs, entropy, TokenDivergence(divergence=divergence, trusted=is_number))
        found = self.ranks.score(self.model, part, temperature=self.temperature, with_entropy=True, dtype=dtype)
        assert found.entropy is not None
        return _Scores(found.log_probs, found.entropy, None)


class _Scores(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    divergence: TokenDivergence | None


def _with_divergence(
    algorithm: Algorithm, part: MicroBatch, temperature: float, model: torch.nn.Module
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, divergence, and whether that is a number, of a part's tokens from one pass of the model."""
    weight = model_parts(model).output_weight
    states = states_before(model, part)
    scores = linear_log_probs(
        states, weight, part.targets, temperature=temperature, with_entropy=True, support=part.support
    )
    assert scores.entropy is not None
    found = algorithm.divergence(part, states, weight)
    return scores.log_probs, scores.entropy, found.divergence, found.trusted
