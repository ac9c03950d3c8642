"""Opening the source that a job's mode asks for, where the tape says that its trainer stood."""

from __future__ import annotations

import time

import pyarrow as pa

from rolltape.ingest.log import EventLog
from rolltape.store.lake import Lake
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.buffer import KINDS
from rolltape.trainers.collect import StepCollector
from rolltape.trainers.coordinator import Rollover
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import TrainerJob
from rolltape.trainers.score_book import TEACHER_KINDS
from rolltape.trainers.source import BatchSource, LockStepSource
from rolltape.trainers.stream import GroupStream
from rolltape.trainers.streaming import StreamRules, StreamSource, consumed_by


def open_source(
    lake: Lake,
    log: EventLog,
    job: TrainerJob,
    history: RunHistory,
    rollover: Rollover | None,
    live_versions: set[tuple[int, int]],
) -> BatchSource:
    """Batches from the last completed step's cursor on: of steps, or (with ``rollover``) of groups as they complete.

    Args:
        lake: where the run's history is.
        log: where rollouts come from.
        job: what the trainer is to do.
        history: what it has done.
        rollover: brings weights into effect while the source waits; None in lock step.
        live_versions: (run epoch, version) of versions on the live line; the trainer adds to it.
    """
    config = job.trainer
    batch = BatchRules.of(config)
    run_started = lake.read("run_started", run_id=job.run_id)
    topics: tuple[str, ...] = ("rollout", "control")
    kinds: tuple[str, ...] = KINDS
    known: dict[str, pa.Table] = {}
    if batch.uses_teacher:
        topics, kinds = (*topics, "teacher"), (*KINDS, *TEACHER_KINDS)
        # They were recorded before any rollout, so what goes on in the middle does not come by them again.
        known = {kind: lake.read(kind, run_id=job.run_id) for kind in ("problem_registered", "teacher_routed")}
    reader = log.reader(history.cursor_after(history.last_step), topics=topics, kinds=kinds)
    if rollover is None:
        collector = StepCollector(reader, run_id=job.run_id, run_started=run_started, known=known)
        return LockStepSource(collector, history.line, num_members=job.num_members, rules=batch)
    stream = GroupStream(
        reader,
        run_id=job.run_id,
        run_started=run_started,
        consumed=consumed_by(lake, history),
        clock=time.monotonic,
        known=known,
    )
    rules = StreamRules(
        num_groups=job.groups_per_step,
        group_timeout_s=config.group_timeout_s,
        train_overdue=config.overdue_groups == "train",
        batch=batch,
    )
    return StreamSource(stream, rules, live_versions=live_versions, meanwhile=rollover.settle, clock=time.monotonic)
