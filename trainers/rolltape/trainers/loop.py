"""The trainer process: batches from the tape, weights out through the tape (design §6 to §8).

In lock step a step waits for all of its groups and the next one for the engines; an asynchronous trainer takes groups
as they complete and goes on while engines take up its weights.

Order at a step: batch pinned → trained → checkpoint → ``train_step_completed`` → ``weights_published``. A trainer that
comes back raises the run epoch, loads the newest checkpoint, runs the pinned batches after it again, compares digests,
and goes on where the tape ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.device import set_deterministic
from rolltape.numerics.models import build_model
from rolltape.numerics.weights import named_weights, weights_digest
from rolltape.schema.crash import crash_window
from rolltape.schema.identity import derived_id
from rolltape.schema.policy import PolicyVersion
from rolltape.store.lake import Lake
from rolltape.trainers.assembly import BatchPlan, VersionRules
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.checkpoint import Progress, save_checkpoint
from rolltape.trainers.coordinator import Coordinator, Rollover
from rolltape.trainers.environment import describe_environment
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import TrainerJob
from rolltape.trainers.members import one_temperature, pack_members, temperatures_of
from rolltape.trainers.pinned import PinnedBatch, member_columns, read_pinned
from rolltape.trainers.probe import MismatchProbe, probe
from rolltape.trainers.publish import publish_columns
from rolltape.trainers.records import batch_formed_columns, step_completed_fields, tokens_trained_columns
from rolltape.trainers.rerun import Rerun
from rolltape.trainers.source import BatchSource, Gathered
from rolltape.trainers.sources import open_source
from rolltape.trainers.step import StepOutcome, make_optimizer, train_step
from rolltape.trainers.summary import component_means, step_metrics

POLICY_ID = "actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch:
    """A batch that is pinned on the tape and ready to train."""

    batch_id: str
    plan: BatchPlan
    packed: PackedBatch
    digest: str
    newest_version: int
    temperature: float
    component_means: dict[str, float]


def build_trainer(job: TrainerJob) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with its initial weights, and its optimizer; deterministic in the job."""
    set_deterministic(job.trainer.num_threads, job.seed)
    model = build_model(job.model_name, job.seed)
    model.train()
    return model, make_optimizer(model, job.trainer)


class Trainer:
    """One trainer process. :meth:`run` returns when the run's last version is in effect."""

    def __init__(self, lake: Lake, log: EventLog, job: TrainerJob) -> None:
        self.lake = lake
        self.log = log
        self.job = job
        self.config = job.trainer
        self.recorder = Recorder(log, producer_id=f"{job.trainer_id}-{job.run_id}", run_id=job.run_id)
        self.progress = Progress()
        self.live_versions: set[tuple[int, int]] = set()
        self.rollover: Rollover | None = None
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer

    # Start

    def run(self) -> None:
        """Train to the end."""
        self.recorder.wait_for_older_epochs()
        history = self._history()
        if history.has_trained:
            history = self._resume(history)
        else:
            self._begin(history)
        self.live_versions |= history.published.keys()
        self.coordinator = Coordinator(
            self.lake,
            self.log,
            self.recorder,
            coordinator_id=self.recorder.producer.producer_id,
            run_id=self.job.run_id,
            min_engines=self.job.num_workers,
            engine_timeout_s=self.config.engine_timeout_s,
        )
        try:
            self._train(history)
        finally:
            self.coordinator.close()
            self.recorder.close()

    def _history(self) -> RunHistory:
        """The run as the log has it now: whatever is logged has to be in the lake first."""
        self.log.wait_until_archived(self.config.archive_timeout_s)
        return RunHistory.read(self.lake, self.job.run_id)

    def _begin(self, history: RunHistory) -> None:
        """First start: version 0 from the seed, and the checkpoint that every replay can start from."""
        self.model, self.optimizer = build_trainer(self.job)
        self.recorder.set_run_epoch(history.line.epoch)
        digest = weights_digest(named_weights(self.model))
        self.progress = Progress(version_run_epoch=history.line.epoch, weights_digest=digest)
        self._save_checkpoint()
        self._publish()

    def _resume(self, history: RunHistory) -> RunHistory:
        """Come back: run the pinned batches after the newest checkpoint again, then raise the run epoch."""
        self.model, self.optimizer = build_trainer(self.job)
        last = history.last_step
        if history.checkpoints:
            rerun = Rerun(self.lake, history, self.model, self.optimizer, self.config)
            last = rerun.to_step(last)
            self.progress = rerun.progress
        else:
            # Died before its first checkpoint was known: nothing was trained yet.
            digest = weights_digest(named_weights(self.model))
            self.progress = Progress(version_run_epoch=history.line.epoch, weights_digest=digest)
        epoch = history.line.epoch + 1
        self.recorder.set_run_epoch(epoch)
        self.recorder.record(
            "run_resumed",
            purpose="train",
            config_json=history.started["config_json"],
            config_digest=history.started["config_digest"],
            model_name=self.job.model_name,
            seed=self.job.seed,
            vocab_size=history.started["vocab_size"],
            tokenizer=history.started["tokenizer"],
            continues_from_step=last,
            reason="restart" if last == history.last_step else "divergence",
            **describe_environment(),
        )
        if not history.checkpoints:
            self._save_checkpoint()
        key = (self.progress.version_run_epoch, self.progress.version)
        if key not in history.published or last != history.last_step:
            # Engines go forward only: after a rewind the version that is trained on is a newer one than they serve.
            self.progress.version_run_epoch = epoch
            self._publish()
        self.recorder.flush("logged")
        return self._history()

    # Steps

    def _train(self, history: RunHistory) -> None:
        finished = _is_final(history)
        self.coordinator.bring_into_effect(self._version())
        if self.job.max_lead_steps:
            self.rollover = Rollover(self.coordinator)
        source = open_source(self.lake, self.log, self.job, history, self.rollover, self.live_versions)
        try:
            while not finished and self.progress.step < self.config.max_steps:
                step = self.progress.step + 1
                batch = self._open_batch(history, step) if step == history.last_step + 1 else None
                if batch is None:
                    batch = self._form(step, source)
                source.consumed()
                finished = self._train_one(step, batch)
                if self.rollover is None or finished:
                    self.coordinator.bring_into_effect(self._version())
                else:
                    self.rollover.published(self._version())
        finally:
            source.close()

    def _open_batch(self, history: RunHistory, step: int) -> FormedBatch | None:
        """A batch that an earlier start pinned for this step and did not complete."""
        row = history.open_batch(step)
        if row is None:
            return None
        pinned = read_pinned(self.lake, self.job.run_id, row["batch_id"])
        return self._formed(pinned, row["staleness_version"])

    def _formed(self, pinned: PinnedBatch, newest: int) -> FormedBatch:
        plan = BatchPlan(members=pinned.members, dropped=())
        return FormedBatch(
            batch_id=pinned.batch_id,
            plan=plan,
            packed=pinned.packed,
            digest=pinned.digest,
            newest_version=newest,
            temperature=pinned.temperature,
            component_means=component_means(pinned.rewards),
        )

    def _form(self, step: int, source: BatchSource) -> FormedBatch:
        """Gather, filter, group, pin."""
        rules = VersionRules(
            current=self.progress.version,
            newest=self.progress.version,
            staleness_tau=self.config.staleness_tau,
            single_version=self.config.needs_one_version,
        )
        found: Gathered = source.gather(step, rules)
        folded, plan = found.folded, found.plan
        members, digest = member_columns(folded, plan.members)
        batch_id = derived_id(self.job.run_id, self.job.trainer_id, self.recorder.run_epoch, step)
        self.recorder.record_batch(
            "batch_formed",
            batch_formed_columns(
                batch_id=batch_id,
                trainer_id=self.job.trainer_id,
                algorithm=self.config.algorithm,
                step=step,
                members=members,
                dropped=plan.dropped,
                staleness_version=rules.newest,
                staleness_run_epoch=self.progress.version_run_epoch,
                cursors=found.cursors,
                batch_digest=digest,
            ),
        )
        return FormedBatch(
            batch_id=batch_id,
            plan=plan,
            packed=pack_members(folded, plan.members),
            digest=digest,
            newest_version=rules.newest,
            temperature=one_temperature(temperatures_of(folded, plan.members)),
            component_means=component_means(found.rewards),
        )

    def _train_one(self, step: int, batch: FormedBatch) -> bool:
        """Train a formed batch and write down what came of it; whether the run ends here."""
        started = time.perf_counter()
        outcome = train_step(
            self.model, self.optimizer, batch.packed, self.config, step=step, temperature=batch.temperature
        )
        metrics = step_metrics(
            batch.packed,
            batch.plan,
            outcome,
            self.config,
            newest_version=batch.newest_version,
            component_means=batch.component_means,
        )
        version_in = self.progress.version
        self.progress.step = step
        if not outcome.skipped:
            self.progress.version += 1
            self.progress.version_run_epoch = self.recorder.run_epoch
            self.progress.weights_digest = outcome.weights_digest
        final = self._final(step, metrics)
        metrics["final"] = float(final)
        if self.progress.stop_average is not None:
            metrics["stop_average"] = self.progress.stop_average
        digest = self._save_checkpoint() if step % self.config.checkpoint_every == 0 else None
        self._record_probe(step, batch, outcome, version_in)
        self.recorder.record_batch(
            "tokens_trained",
            tokens_trained_columns(batch.packed, batch.plan.members, outcome, batch_id=batch.batch_id, step=step),
        )
        self.recorder.record(
            "train_step_completed",
            **step_completed_fields(
                outcome,
                trainer_id=self.job.trainer_id,
                policy_id=POLICY_ID,
                step=step,
                batch_id=batch.batch_id,
                batch_digest=batch.digest,
                version_in=version_in,
                version_out=self.progress.version,
                checkpoint_digest=digest,
                metrics=metrics,
                duration_s=time.perf_counter() - started,
            ),
        )
        self.recorder.flush("spooled")
        crash_window("after_step_event")
        if not outcome.skipped:
            self._publish()
        return final

    def _final(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run ends: its last step, or the moving average of the stop metric is high enough."""
        value = metrics.get(self.config.stop_metric)
        if self.config.stop_metric and value is not None:
            average = self.progress.stop_average
            keep = self.config.stop_ema
            self.progress.stop_average = value if average is None else keep * average + (1 - keep) * value
            if self.progress.stop_average >= self.config.stop_above:
                return True
        return step >= self.config.max_steps

    def _record_probe(self, step: int, batch: FormedBatch, outcome: StepOutcome, version: int) -> None:
        if not self.config.probe_every or step % self.config.probe_every:
            return
        found: MismatchProbe = probe(batch.packed, outcome, beta=self.config.icepop_beta)
        self.recorder.record("mismatch_probed", policy_id=POLICY_ID, version=version, step=step, **found.fields())

    # Weights and checkpoints

    def _version(self) -> PolicyVersion:
        progress = self.progress
        return PolicyVersion(POLICY_ID, progress.version_run_epoch, progress.version, progress.weights_digest)

    def _publish(self) -> None:
        columns = publish_columns(self.lake, self.job.run_id, self.model, self._version(), step=self.progress.step)
        self.recorder.record("weights_published", **columns)
        self.recorder.flush("spooled")
        self.live_versions.add(self._version().key)

    def _save_checkpoint(self) -> str:
        path = f"checkpoints/{self.job.run_id}/{self.recorder.run_epoch:04d}-{self.progress.step:08d}"
        saved = save_checkpoint(self.lake.location, path, self.model, self.optimizer, self.progress)
        crash_window("after_checkpoint")
        self.recorder.record(
            "checkpoint_saved",
            trainer_id=self.job.trainer_id,
            step=self.progress.step,
            path=saved.path,
            num_bytes=saved.num_bytes,
            digest=saved.digest,
        )
        return saved.digest


def _is_final(history: RunHistory) -> bool:
    from rolltape.trainers.records import metric_values

    if not history.steps:
        return False
    return metric_values(history.steps[history.last_step]).get("final") == 1.0


def run_trainer(lake: Lake, log: EventLog, job: TrainerJob, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Run one trainer process to the end of its run."""
    trainer = Trainer(lake, log, job)
    on_ready()
    trainer.run()
