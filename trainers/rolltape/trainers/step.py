"""One optimizer step on one packed batch: GRPO with IcePop (algorithms.md §4.2), and what of it goes onto the tape.

The computation is a function of (weights, optimizer state, batch, configuration, number of ranks) alone. Micro-batches
are cut by the batch's lengths and accumulate in a fixed order, so a replay adds the same numbers in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rolltape.numerics.device import rng_state_digest
from rolltape.numerics.packed import MicroBatch, micro_batches
from rolltape.numerics.weights import combine_digests, named_gradients, named_weights, tensor_digests
from rolltape.trainers.advantages import group_advantages
from rolltape.trainers.aggregation import aggregation_weights
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.checkpoint import trainable
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.dis import dis_policy_loss
from rolltape.trainers.losses import PolicyLoss, icepop_policy_loss
from rolltape.trainers.ranks import ONE_PROCESS, Ranks, global_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step computed. Token tensors run over all N tokens of the batch; other than action tokens are 0."""

    loss: float
    grad_norm: float
    skipped: bool
    old_log_probs: torch.Tensor  # float32 [N]
    current_log_probs: torch.Tensor  # float32 [N], at the last update
    entropy: torch.Tensor  # float32 [N]
    advantages: torch.Tensor  # float32 [N]
    gate_weights: torch.Tensor  # float32 [N]
    trusted: torch.Tensor  # bool [N]
    member_advantages: torch.Tensor  # float64 [M]
    micro_batches: tuple[int, ...]
    gradient_digests: Mapping[str, str]
    weight_digests: Mapping[str, str]
    rng_state_digest: str

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
        """One digest over all new weights."""
        return combine_digests(self.weight_digests)


@dataclass(slots=True)
class _Tokens:
    """Per-token tensors of a batch, filled micro-batch by micro-batch."""

    old: torch.Tensor
    current: torch.Tensor
    entropy: torch.Tensor
    gate: torch.Tensor
    trusted: torch.Tensor

    @classmethod
    def zeros(cls, count: int) -> _Tokens:
        """Nothing computed yet."""
        old, current, entropy, gate = (torch.zeros(count) for _ in range(4))
        return cls(old, current, entropy, gate, torch.zeros(count, dtype=torch.bool))

    def add_up(self, ranks: Ranks) -> None:
        """Every rank has its own micro-batches' tokens and 0 elsewhere; afterwards all have all."""
        ranks.add_up(self.old, self.current, self.entropy, self.gate, self.trusted)


@dataclass(frozen=True, slots=True)
class _Work:
    """What does not change from update to update."""

    model: torch.nn.Module
    batch: PackedBatch
    advantages: torch.Tensor  # float32 [N]
    weights: torch.Tensor  # float32 [N]
    config: TrainerConfig
    temperature: float
    ranks: Ranks


def make_optimizer(model: torch.nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, in the model's order."""
    return torch.optim.AdamW(
        [parameter for _, parameter in trainable(model)],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: PackedBatch,
    config: TrainerConfig,
    *,
    step: int,
    temperature: float,
    ranks: Ranks = ONE_PROCESS,
) -> StepOutcome:
    """Update ``model`` on ``batch``, ``config.updates_per_batch`` times, at the learning rate of ``step``.

    The optimizer is not called, and ``skipped`` is true, when no action token is trusted (algorithms.md §2.5): moments
    and weight decay would move weights. Gradient digests are of the last update, before clipping.

    With several ``ranks`` each calls this with the same batch, and gets the same outcome.
    """
    for group in optimizer.param_groups:
        group["lr"] = config.lr_at(step)
    counted = ~batch.is_padding if config.stats == "valid_only" else None
    member_advantages = group_advantages(batch.rewards, batch.groups, norm=config.adv_norm, counted=counted)
    token_advantages = member_advantages[batch.row_member][batch.row_of_token()].float()
    token_advantages = torch.where(batch.action_mask, token_advantages, 0.0)
    work = _Work(model, batch, token_advantages, _token_weights(batch, config), config, temperature, ranks)
    old = _old_log_probs(work) if config.updates_per_batch > 1 else None
    tokens = _Tokens.zeros(batch.num_tokens)
    loss = grad_norm = 0.0
    gradient_digests: dict[str, str] = {}
    sizes: tuple[int, ...] = ()
    skipped = False
    for _ in range(config.updates_per_batch):
        optimizer.zero_grad(set_to_none=True)
        tokens, loss, sizes = _accumulate(work, old)
        gradient_digests = tensor_digests(ranks.whole(named_gradients(model)))
        skipped = not bool(tokens.trusted.any())
        if skipped:
            loss = 0.0
            break
        grad_norm = _clip(model, config.max_grad_norm, ranks)
        optimizer.step()
    return StepOutcome(
        loss=loss,
        grad_norm=grad_norm,
        skipped=skipped,
        old_log_probs=tokens.old,
        current_log_probs=tokens.current,
        entropy=tokens.entropy,
        advantages=token_advantages,
        gate_weights=tokens.gate,
        trusted=tokens.trusted,
        member_advantages=member_advantages,
        micro_batches=sizes,
        gradient_digests=gradient_digests,
        weight_digests=tensor_digests(ranks.whole(named_weights(model))),
        rng_state_digest=rng_state_digest(),
    )


def _token_weights(batch: PackedBatch, config: TrainerConfig) -> torch.Tensor:
    """Aggregation weight of each token, float32 [N], computed before any split (algorithms.md §2.4)."""
    weights = torch.zeros(batch.num_tokens)
    rows = batch.row_of_token()[batch.action_mask]
    weights[batch.action_mask] = aggregation_weights(
        rows,
        mode=config.aggregation,
        num_rows=batch.num_rows,
        rollout_of_row=batch.row_member,
        max_length=config.const_length or None,
    )
    return weights


def _parts(work: _Work, sizes: list[int] | None = None) -> Iterator[MicroBatch]:
    """This rank's micro-batches; ``sizes`` gets the rows of every rank's."""

    def all_parts() -> Iterator[MicroBatch]:
        batch = work.batch
        for part in micro_batches(
            batch.token_ids, batch.cu_seqlens, token_budget=work.config.token_budget, scored=batch.action_mask
        ):
            if sizes is not None:
                sizes.append(part.rows.numel())
            yield part

    return work.ranks.own_parts(all_parts())


def _old_log_probs(work: _Work) -> torch.Tensor:
    """Log-probs under the weights before the first update, float32 [N], on every rank."""
    old = torch.zeros(work.batch.num_tokens)
    with torch.no_grad():
        for part in _parts(work):
            old[part.flat_index] = work.ranks.score(work.model, part, temperature=work.temperature).log_probs
    work.ranks.add_up(old)
    return old


def _accumulate(work: _Work, old: torch.Tensor | None) -> tuple[_Tokens, float, tuple[int, ...]]:
    """Forward and backward of every micro-batch: the tokens, the loss, and the rows of each; of all ranks."""
    batch, config = work.batch, work.config
    tokens = _Tokens.zeros(batch.num_tokens)
    total = torch.zeros((), dtype=torch.float64)
    sizes: list[int] = []
    for part in _parts(work, sizes):
        scores = work.ranks.score(work.model, part, temperature=work.temperature, with_entropy=True)
        index = part.flat_index
        current = scores.log_probs
        before = current.detach() if old is None else old[index]
        result = _loss(
            (current, before, batch.rollout_log_probs[index]),
            work.advantages[index],
            work.weights[index],
            scores.entropy,
            config,
        )
        torch.autograd.backward(result.loss)
        total += result.loss.detach().double()
        tokens.old[index] = before
        tokens.current[index] = current.detach()
        if scores.entropy is not None:
            tokens.entropy[index] = scores.entropy.detach().float()
        tokens.gate[index] = result.gate_weights
        tokens.trusted[index] = result.trusted
    work.ranks.add_up(total)
    tokens.add_up(work.ranks)
    return tokens, float(total), tuple(sizes)


def _loss(
    log_probs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    advantages: torch.Tensor,
    weights: torch.Tensor,
    entropy: torch.Tensor | None,
    config: TrainerConfig,
) -> PolicyLoss:
    """The configured loss of one micro-batch; ``log_probs`` are current, old and the rollout's."""
    current, old, rollout = log_probs
    if config.correction == "dis":
        return dis_policy_loss(
            current,
            rollout,
            advantages,
            weights,
            eps_low=config.epsilon_low,
            eps_high=config.epsilon_high,
            entropy=entropy,
            entropy_coef=config.entropy_coef,
            is_partial=True,
        )
    return icepop_policy_loss(
        current,
        old,
        rollout,
        advantages,
        weights,
        beta=config.icepop_beta,
        eps_low=config.epsilon_low,
        eps_high=config.epsilon_high,
        pop_value=config.pop_value,
        correction=config.correction,
        tis_low=config.tis_low,
        tis_high=config.tis_high,
        entropy=entropy,
        entropy_coef=config.entropy_coef,
        is_partial=True,
    )


def _clip(model: torch.nn.Module, max_norm: float, ranks: Ranks) -> float:
    """Global norm of the gradients before clipping, reduced tensor by tensor in float64 and a fixed order."""
    grads = [p.grad for _, p in trainable(model) if p.grad is not None]
    norm = global_norm(grads, ranks)
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm
