"""What other methods or options would have made of a recorded batch, side by side; the tape is only read.

Every variant starts from the weights that the batch was trained with: from the newest kept checkpoint before it,
through the recorded steps. Where the tape has no checkpoint at all, that is the run's initial model. A critic that the
run did not have begins with the policy's backbone, and learns on the batch as its method says, without a warm-up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from rolltape.numerics.scoring import Scorer
from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.store.lake import Lake
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic_model import CriticCounts
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import TrainerJob
from rolltape.trainers.learner import Learner, build_learner, make_critic
from rolltape.trainers.pinned import PinnedBatch, read_pinned
from rolltape.trainers.rerun import Rerun, train_pinned
from rolltape.trainers.staleness import require_version
from rolltape.trainers.step import StepOutcome
from rolltape.trainers.variant_options import refuse_idle, refuse_misnamed

RECORDED: Final = "as recorded"

ScorersOf = Callable[[TrainerConfig], Mapping[str, Scorer] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A configuration that the batch is given to."""

    name: str
    config: TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What one variant made of the batch: an outcome, or the reason why it refuses the batch."""

    variant: Variant
    pinned: PinnedBatch | None = None
    outcome: StepOutcome | None = None
    refusal: str | None = None

    @property
    def pull(self) -> torch.Tensor:
        """float32 ``[N]``: gate weight times advantage of each token, what pushes its log-prob up; 0 if untrusted."""
        assert self.outcome is not None
        return torch.where(self.outcome.trusted, self.outcome.gate_weights * self.outcome.advantages, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """Variants of one recorded step. ``from_step`` is the checkpoint's (None: the run's initial weights).

    ``differences`` say where the steps between checkpoint and batch did not come out as recorded.
    """

    batch_id: str
    step: int
    from_step: int | None
    tried: tuple[Tried, ...]
    differences: tuple[str, ...]

    @property
    def refused(self) -> tuple[Tried, ...]:
        """Variants that could not take the batch."""
        return tuple(one for one in self.tried if one.refusal is not None)

    def rows(self) -> list[dict[str, Any]]:
        """One row a variant; differences per token are to the first that took the batch."""
        base = next((one for one in self.tried if one.outcome is not None), None)
        return [_row(one, base) for one in self.tried]

    def token_rows(self, limit: int) -> list[dict[str, Any]]:
        """The tokens whose pull differs most between variants, largest first, with every variant's pull."""
        taken = [one for one in self.tried if one.outcome is not None]
        same = [one for one in taken if _same_tokens(one, taken[0])]
        if len(same) < 2:  # nothing to hold one against
            return []
        first = same[0].pinned
        assert first is not None
        pulls = torch.stack([one.pull for one in same])
        spread = pulls.amax(0) - pulls.amin(0)
        chosen = torch.argsort(spread, descending=True, stable=True)[:limit]
        chosen = chosen[spread[chosen] > 0]
        return [
            {
                **_place(first, int(token)),
                **{one.variant.name: float(value) for one, value in zip(same, pulls[:, token], strict=True)},
            }
            for token in chosen
        ]


def try_variants(
    lake: Lake,
    job: TrainerJob,
    batch_id: str,
    variants: Sequence[Variant],
    *,
    scorers_of: ScorersOf = lambda _: None,
) -> Counterfactual:
    """Give a recorded batch to each variant.

    Args:
        lake: where the batch is; nothing is written to it.
        job: the run's, with the configuration that it was started with.
        batch_id: the batch.
        variants: in the order in which they are shown.
        scorers_of: scorers of teachers for a configuration that needs full distributions.

    Raises:
        ReplayError: the batch is not on the tape.
        DigestMismatchError: it is not what was trained.
    """
    history = RunHistory.read(lake, job.run_id)
    pinned = read_pinned(lake, job.run_id, batch_id)
    learner, from_step, version, differences = _before(lake, job, history, pinned.step, scorers_of)
    tried = [_try(lake, job, batch_id, variant, learner, version, scorers_of) for variant in variants]
    return Counterfactual(
        batch_id=batch_id, step=pinned.step, from_step=from_step, tried=tuple(tried), differences=tuple(differences)
    )


def variants_of(
    config: TrainerConfig, algorithms: Sequence[str], changes: Mapping[str, Mapping[str, Any]]
) -> list[Variant]:
    """The recorded configuration first, then each algorithm's; one that comes to the same is not shown twice.

    Args:
        config: the run's.
        algorithms: to try; none: the run's own.
        changes: options by algorithm; under "" those of all.

    Raises:
        ConfigError: an option makes no sense with an algorithm, can change nothing of what is tried, or is for an
            algorithm that is not.
    """
    algorithms = algorithms or [config.algorithm]
    refuse_misnamed(algorithms, changes)
    configs: dict[str, TrainerConfig] = {}
    for algorithm in algorithms:
        options: dict[str, Any] = {**changes.get("", {}), **changes.get(algorithm, {})}
        if algorithm == config.algorithm:
            configs[algorithm] = replace(config, **options)
        else:
            options = {"critic_warmup_steps": 0, **options}
            configs[algorithm] = config.with_algorithm(algorithm, **options)  # type: ignore[arg-type]
    refuse_idle(config, configs, changes)
    variants = [Variant(name=f"{config.algorithm}, {RECORDED}", config=config)]
    for algorithm, changed in configs.items():
        if changed not in [variant.config for variant in variants]:
            variants.append(Variant(name=algorithm, config=changed))
    return variants


def learner_for(config: TrainerConfig, learner: Learner) -> Learner:
    """A copy of the run's learner for one step with ``config``, with a critic where that needs one."""
    own = copy.deepcopy(learner)
    if own.critic is not None:
        # The run's updates were made in its own ratio; those of ``config`` may be in another.
        own.critic.counts = CriticCounts(warmup_steps=own.critic.counts.warmup_steps)
    elif config.uses_critic:
        own.critic = make_critic(copy.deepcopy(own.model), config)
    return own


def _before(
    lake: Lake, job: TrainerJob, history: RunHistory, step: int, scorers_of: ScorersOf
) -> tuple[Learner, int | None, int, list[str]]:
    """The learner as it stood before ``step``: itself, the checkpoint's step, its version, and what did not agree."""
    learner = build_learner(job, from_checkpoint=bool(history.checkpoints))
    if not history.checkpoints:
        return learner, None, 0, []
    rerun = Rerun(lake, history, learner, job.trainer, scorers=scorers_of(job.trainer))
    rerun.load_before(step)
    from_step = rerun.progress.step
    differences = []
    while rerun.progress.step < step - 1:
        comparison = rerun.next_step()
        differences += [f"step {comparison.step}: {found}" for found in comparison.differences]
    return learner, from_step, rerun.progress.version, differences


def _try(
    lake: Lake,
    job: TrainerJob,
    batch_id: str,
    variant: Variant,
    learner: Learner,
    version: int,
    scorers_of: ScorersOf,
) -> Tried:
    config = variant.config
    try:
        pinned = read_pinned(lake, job.run_id, batch_id, BatchRules.of(config))
        batch = pinned.packed
        if config.needs_one_version:
            require_version(batch.policy_versions[batch.action_mask], version)
        own = learner_for(config, learner)
        outcome = train_pinned(own, pinned, config, scorers=scorers_of(config))
    except (ConfigError, UntrainableError) as error:
        return Tried(variant=variant, refusal=str(error))
    return Tried(variant=variant, pinned=pinned, outcome=outcome)


def _row(one: Tried, base: Tried | None) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": one.variant.name}
    names = (
        "loss",
        "grad_norm",
        "value_loss",
        "tokens",
        "trusted_frac",
        "pull_abs_mean",
        "pull_diff_mean",
        "pull_diff_max",
    )
    row |= dict.fromkeys((*names, "signs_flipped", "verdicts_differ", "refused"))
    if one.outcome is None or one.pinned is None:
        return {**row, "refused": one.refusal}
    outcome, batch = one.outcome, one.pinned.packed
    tokens = _trained(outcome, batch)
    count = int(tokens.sum())
    pull = one.pull.double()
    row |= {
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "value_loss": None if outcome.critic is None else outcome.critic.losses[-1],
        "tokens": count,
        "trusted_frac": float(outcome.trusted[tokens].double().mean()) if count else None,
        "pull_abs_mean": float(pull[tokens].abs().mean()) if count else None,
    }
    if base is None or base is one or base.outcome is None or not _same_tokens(one, base) or not count:
        return row
    other = base.pull.double()
    difference = (pull - other)[tokens].abs()
    return row | {
        "pull_diff_mean": float(difference.mean()),
        "pull_diff_max": float(difference.max()),
        "signs_flipped": int((pull * other < 0).sum()),
        "verdicts_differ": int((outcome.trusted != base.outcome.trusted).sum()),
    }


def _trained(outcome: StepOutcome, batch: PackedBatch) -> torch.Tensor:
    return batch.action_mask if outcome.trained is None else outcome.trained


def _same_tokens(one: Tried, other: Tried) -> bool:
    """Whether both packed the same rows: an option may leave some out."""
    assert one.pinned is not None
    assert other.pinned is not None
    return torch.equal(one.pinned.packed.token_ids, other.pinned.packed.token_ids)


def _place(pinned: PinnedBatch, token: int) -> dict[str, Any]:
    """Where a token of the batch is."""
    batch = pinned.packed
    row = int(torch.searchsorted(batch.cu_seqlens, token, right=True)) - 1
    start = int(batch.cu_seqlens[row] + batch.context_lengths[row])
    return {
        "trajectory_id": pinned.members[int(batch.row_member[row])].trajectory_id,
        "segment": int(batch.segment_index[row]),
        "position": token - start,
        "token_id": int(batch.token_ids[token]),
    }
