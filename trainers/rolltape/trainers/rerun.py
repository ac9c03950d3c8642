"""Running recorded steps again, from the nearest kept checkpoint: for a resume, and for a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolltape.numerics.scoring import Scorer
from rolltape.numerics.weights import first_difference
from rolltape.schema.errors import ReplayError
from rolltape.store.lake import Lake
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.checkpoint import Progress, load_checkpoint
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.history import RunHistory
from rolltape.trainers.learner import Learner, reset_optimizer
from rolltape.trainers.pinned import PinnedBatch, read_pinned
from rolltape.trainers.records import metric_values
from rolltape.trainers.step import StepOutcome, train_step


def digests_by_name(entries: list[dict[str, str]] | None) -> dict[str, str]:
    """A recorded list of (name, digest) as a mapping."""
    return {entry["name"]: entry["digest"] for entry in entries or ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step as it ran again beside the tape. ``differences`` names what differs, the first tensor included."""

    step: int
    batch_id: str
    outcome: StepOutcome
    recorded: dict[str, Any]
    batch_digest: str
    differences: tuple[str, ...]


class Rerun:
    """A learner, moved along recorded steps."""

    def __init__(
        self,
        lake: Lake,
        history: RunHistory,
        learner: Learner,
        config: TrainerConfig,
        *,
        scorers: Mapping[str, Scorer] | None = None,
    ) -> None:
        self.lake = lake
        self.history = history
        self.learner = learner
        self.config = config
        self.scorers = scorers
        self.progress = Progress()

    def load_before(self, step: int) -> None:
        """Load the newest kept checkpoint before ``step``."""
        row = self.history.checkpoint_before(step)
        self.progress = load_checkpoint(self.lake.location, row["path"], row["digest"], self.learner)
        self._reset_as_recorded()

    def to_step(self, last: int) -> int:
        """Run up to ``last``; returns the last step whose weights came out as recorded, and stands there.

        Stands before ``last`` where a step gives other weights here: the caller opens a new run epoch from there.
        """
        self.load_before(last + 1)
        reached = self.progress.step
        while reached < last:
            comparison = self.next_step()
            if comparison.outcome.weights_digest != comparison.recorded["weights_digest"]:
                self.load_before(reached + 1)
                while self.progress.step < reached:
                    self.next_step()
                break
            reached += 1
        return reached

    def next_step(self) -> StepComparison:
        """Train the next recorded batch and compare it with the tape.

        Raises:
            DigestMismatchError: the batch on the tape is not what was trained.
            ReplayError: the step is not on the tape.
        """
        step = self.progress.step + 1
        recorded = self.history.step(step)
        rules = BatchRules.of(self.config)
        pinned = read_pinned(self.lake, self.history.run_id, recorded["batch_id"], rules)
        outcome = train_pinned(self.learner, pinned, self.config, scorers=self.scorers)
        self._advance(step, recorded, outcome)
        self._reset_as_recorded()
        return StepComparison(
            step=step,
            batch_id=recorded["batch_id"],
            outcome=outcome,
            recorded=recorded,
            batch_digest=pinned.digest,
            differences=compare(recorded, outcome, pinned.digest),
        )

    def _advance(self, step: int, recorded: dict[str, Any], outcome: StepOutcome) -> None:
        self.progress.step = step
        self.progress.version = recorded["version_out"]
        if recorded["version_out"] != recorded["version_in"]:
            self.progress.version_run_epoch = recorded["run_epoch"]
        self.progress.weights_digest = outcome.actor_digest
        self.progress.stop_average = metric_values(recorded).get("stop_average", self.progress.stop_average)

    def _reset_as_recorded(self) -> None:
        """What followed the step that was reached: when new weights came to serve is the tape's to say."""
        if self.progress.step in self.history.resets:
            reset_optimizer(self.learner.optimizer)


def train_pinned(
    learner: Learner, pinned: PinnedBatch, config: TrainerConfig, *, scorers: Mapping[str, Scorer] | None = None
) -> StepOutcome:
    """One step on a recorded batch."""
    return train_step(learner, pinned.packed, config, step=pinned.step, temperature=pinned.temperature, scorers=scorers)


def compare(recorded: dict[str, Any], outcome: StepOutcome, batch_digest: str) -> tuple[str, ...]:
    """What differs between a recorded step and its rerun, in the order in which it arises."""
    found = []
    if recorded["batch_digest"] != batch_digest:
        found.append(f"batch digest: recorded {recorded['batch_digest']}, here {batch_digest}")
    if recorded["loss_bits"] != outcome.loss_bits:
        was, now = f"{recorded['loss_bits']:#x} ({recorded['loss']})", f"{outcome.loss_bits:#x} ({outcome.loss})"
        found.append(f"loss bits: recorded {was}, here {now}")
    for what, old, new in (
        ("gradient", digests_by_name(recorded["gradient_digests"]), outcome.gradient_digests),
        ("new weights", digests_by_name(recorded["weight_digests"]), outcome.weight_digests),
    ):
        name = first_difference(old, new)
        if name is not None:
            found.append(f"{what}: first tensor that differs is {name}")
    return tuple(found)


def require_equal(comparison: StepComparison) -> None:
    """Refuse a rerun that differs.

    Raises:
        ReplayError: names the step and what differs first.
    """
    if comparison.differences:
        raise ReplayError(f"step {comparison.step} differs: {'; '.join(comparison.differences)}")
