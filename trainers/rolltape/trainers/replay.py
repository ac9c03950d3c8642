"""Replaying one recorded step to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolltape.numerics.scoring import Scorer
from rolltape.store.lake import Lake
from rolltape.trainers.environment import describe_environment, differences
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import TrainerJob
from rolltape.trainers.learner import build_learner
from rolltape.trainers.rerun import Rerun, StepComparison


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay found. ``equal`` needs batch, loss, gradient and new weights to be equal to the bit."""

    run_id: str
    step: int
    from_checkpoint: int
    comparison: StepComparison
    environment_differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every bit came out as recorded."""
        return not self.comparison.differences

    def rows(self) -> list[dict[str, Any]]:
        """One row a compared thing."""
        recorded, outcome = self.comparison.recorded, self.comparison.outcome
        pairs = (
            ("batch_digest", recorded["batch_digest"], self.comparison.batch_digest),
            ("loss_bits", recorded["loss_bits"], outcome.loss_bits),
            ("gradient_digest", recorded["gradient_digest"], outcome.gradient_digest),
            ("weights_digest", recorded["weights_digest"], outcome.weights_digest),
        )
        return [
            {
                "run_id": self.run_id,
                "step": self.step,
                "what": name,
                "recorded": was,
                "replayed": now,
                "equal": was == now,
            }
            for name, was, now in pairs
        ]


def replay_step(
    lake: Lake,
    job: TrainerJob,
    step: int,
    *,
    on_step: Callable[[int], None] = lambda _: None,
    scorers: Mapping[str, Scorer] | None = None,
) -> ReplayReport:
    """Run ``step`` again from tape and weights: from the newest checkpoint before it, through the pinned batches.

    Raises:
        ReplayError: the step or every checkpoint before it is gone.
        DigestMismatchError: the tape is not what was trained; names the trajectory and the tensor.
    """
    history = RunHistory.read(lake, job.run_id)
    history.step(step)
    rerun = Rerun(lake, history, build_learner(job, from_checkpoint=True), job.trainer, scorers=scorers)
    rerun.load_before(step)
    start = rerun.progress.step
    comparison = rerun.next_step()
    on_step(comparison.step)
    while comparison.step < step and not comparison.differences:
        comparison = rerun.next_step()
        on_step(comparison.step)
    return ReplayReport(
        run_id=job.run_id,
        step=comparison.step,
        from_checkpoint=start,
        comparison=comparison,
        environment_differences=tuple(differences(history.started, describe_environment())),
    )
