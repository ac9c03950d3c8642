"""The trainer process: on-policy lock step from the tape, weights out through the tape (design §6 to §8).

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
from rolltape.schema.fold import Fold
from rolltape.schema.identity import derived_id
from rolltape.schema.policy import PolicyVersion
from rolltape.store.lake import Lake
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.checkpoint import Progress, save_checkpoint
from rolltape.trainers.collect import KINDS, StepCollector
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.coordinator import Coordinator
from rolltape.trainers.environment import describe_environment
from rolltape.trainers.history import RunHistory
from rolltape.trainers.members import one_temperature, pack_members, temperatures_of
from rolltape.trainers.pinned import PinnedBatch, member_columns, read_pinned
from rolltape.trainers.probe import MismatchProbe, probe
from rolltape.trainers.publish import publish_columns
from rolltape.trainers.records import batch_formed_columns, step_completed_fields, tokens_trained_columns
from rolltape.trainers.rerun import Rerun
from rolltape.trainers.step import StepOutcome, make_optimizer, train_step
from rolltape.trainers.summary import component_means, step_metrics

POLICY_ID = "actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """What one trainer process is to do."""

    run_id: str
    seed: int
    model_name: str
    groups_per_step: int
    group_size: int
    num_workers: int
    trainer: TrainerConfig
    trainer_id: str = "trainer"

    @property
    def num_members(self) -> int:
        """Rollouts of one step."""
        return self.groups_per_step * self.group_size


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
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer

    # Start

    def run(self) -> None:
        """Train to the end."""
        self.recorder.wait_for_older_epochs()
        history = RunHistory.read(self.lake, self.job.run_id)
        if history.has_trained:
            history = self._resume(history)
        else:
            self._begin(history)
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
        if key not in history.published:
            self.progress.version_run_epoch = epoch
            self._publish()
        self.recorder.flush("logged")
        return RunHistory.read(self.lake, self.job.run_id)

    # Steps

    def _train(self, history: RunHistory) -> None:
        line = history.line
        reader = self.log.reader(history.cursor_after(history.last_step), topics=("rollout", "control"), kinds=KINDS)
        collector = StepCollector(
            reader, run_id=self.job.run_id, run_started=self.lake.read("run_started", run_id=self.job.run_id)
        )
        finished = _is_final(history)
        try:
            self.coordinator.bring_into_effect(self._version())
            while not finished and self.progress.step < self.config.max_steps:
                step = self.progress.step + 1
                batch = self._open_batch(history, step) if step == history.last_step + 1 else None
                if batch is None:
                    while (folded := collector.complete(step, self.job.num_members, line)) is None:
                        collector.poll(0.5)
                    batch = self._form(step, folded, collector)
                collector.forget()
                finished = self._train_one(step, batch)
                self.coordinator.bring_into_effect(self._version())
        finally:
            reader.close()

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

    def _form(self, step: int, folded: Fold, collector: StepCollector) -> FormedBatch:
        """Filter, group, pin."""
        rules = VersionRules(
            current=self.progress.version,
            newest=self.progress.version,
            staleness_tau=self.config.staleness_tau,
        )
        plan = plan_batch(folded, rules, pad_rule=self.config.pad_rule)
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
                cursors=collector.cursors,
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
            component_means=component_means(collector.rewards_of(plan.members)),
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
        return PolicyVersion(
            policy_id=POLICY_ID,
            run_epoch=self.progress.version_run_epoch,
            version=self.progress.version,
            weights_digest=self.progress.weights_digest,
        )

    def _publish(self) -> None:
        columns = publish_columns(self.lake, self.job.run_id, self.model, self._version(), step=self.progress.step)
        self.recorder.record("weights_published", **columns)
        self.recorder.flush("spooled")

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
