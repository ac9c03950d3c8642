"""Forming a step's batch: gather, filter, group, pin it on the tape; or take up one that was pinned before."""

from __future__ import annotations

from dataclasses import dataclass

from rolltape.ingest.recorder import Recorder
from rolltape.schema.identity import derived_id
from rolltape.store.lake import Lake
from rolltape.trainers.assembly import BatchPlan, VersionRules
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.checkpoint import Progress
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import TrainerJob
from rolltape.trainers.members import one_temperature, temperatures_of
from rolltape.trainers.pinned import read_pinned
from rolltape.trainers.records import batch_formed_columns
from rolltape.trainers.source import BatchSource, Gathered
from rolltape.trainers.summary import component_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch:
    """A batch that is pinned on the tape and ready to train."""

    batch_id: str
    plan: BatchPlan
    packed: PackedBatch
    digest: str
    newest_version: int
    temperature: float
    component_metrics: dict[str, float]


def open_batch(lake: Lake, history: RunHistory, job: TrainerJob, step: int) -> FormedBatch | None:
    """A batch that an earlier start pinned for ``step`` and did not complete."""
    row = history.open_batch(step)
    if row is None:
        return None
    pinned = read_pinned(lake, job.run_id, row["batch_id"], BatchRules.of(job.trainer))
    return FormedBatch(
        batch_id=pinned.batch_id,
        plan=BatchPlan(members=pinned.members, dropped=pinned.dropped),
        packed=pinned.packed,
        digest=pinned.digest,
        newest_version=row["staleness_version"],
        temperature=pinned.temperature,
        component_metrics=component_metrics(pinned.rewards),
    )


def form_batch(source: BatchSource, recorder: Recorder, job: TrainerJob, progress: Progress) -> FormedBatch:
    """Wait for the rollouts of the step after ``progress``, decide who is trained, and record it."""
    step = progress.step + 1
    rules = VersionRules(
        current=progress.version,
        newest=progress.version,
        staleness_tau=job.trainer.staleness_tau,
        single_version=job.trainer.needs_one_version,
    )
    found: Gathered = source.gather(step, rules)
    plan = found.plan
    members, digest = found.member_columns()
    batch_id = derived_id(job.run_id, job.trainer_id, recorder.run_epoch, step)
    recorder.record_batch(
        "batch_formed",
        batch_formed_columns(
            batch_id=batch_id,
            trainer_id=job.trainer_id,
            algorithm=job.trainer.algorithm,
            step=step,
            members=members,
            dropped=plan.dropped,
            staleness_version=rules.newest,
            staleness_run_epoch=progress.version_run_epoch,
            cursors=found.cursors,
            batch_digest=digest,
        ),
    )
    return FormedBatch(
        batch_id=batch_id,
        plan=plan,
        packed=found.packed(),
        digest=digest,
        newest_version=rules.newest,
        temperature=one_temperature(temperatures_of(found.folded, plan.members)),
        component_metrics=component_metrics(found.rewards),
    )
