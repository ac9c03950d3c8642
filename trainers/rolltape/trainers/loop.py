"""The trainer process: batches from the tape, weights out through the tape (design §6 to §8).

In lock step a step waits for all of its groups and the next one for the engines; an asynchronous trainer takes groups
as they complete and goes on while engines take up its weights.

Order at a step: batch pinned → trained → checkpoint → ``train_step_completed`` → ``weights_published``. A trainer that
comes back raises the run epoch, loads the newest checkpoint, runs the pinned batches after it again, compares digests,
and goes on where the tape ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.scoring import Scorer
from rolltape.numerics.weights import named_weights, weights_digest
from rolltape.schema.crash import crash_window
from rolltape.schema.policy import PolicyVersion
from rolltape.store.lake import Lake
from rolltape.trainers.alarms import Alarms
from rolltape.trainers.checkpoint import Progress, save_checkpoint
from rolltape.trainers.coordinator import Coordinator, Rollover
from rolltape.trainers.critic_model import CRITIC_POLICY_ID, Critic
from rolltape.trainers.environment import describe_environment
from rolltape.trainers.forming import FormedBatch, form_batch, open_batch
from rolltape.trainers.history import POLICY_ID, RunHistory
from rolltape.trainers.job import TrainerJob
from rolltape.trainers.learner import Learner, build_learner
from rolltape.trainers.probe import MismatchProbe, probe
from rolltape.trainers.publish import publish_columns
from rolltape.trainers.records import metric_values, step_completed_fields, tokens_trained_columns
from rolltape.trainers.rerun import Rerun
from rolltape.trainers.resets import OptimizerResets
from rolltape.trainers.sources import open_source
from rolltape.trainers.step import StepOutcome, train_step
from rolltape.trainers.summary import step_metrics


class Trainer:
    """One trainer process. :meth:`run` returns when the run's last version is in effect."""

    def __init__(
        self, lake: Lake, log: EventLog, job: TrainerJob, *, scorers: Mapping[str, Scorer] | None = None
    ) -> None:
        self.lake = lake
        self.log = log
        self.job = job
        self.config = job.trainer
        self.scorers = scorers
        self.recorder = Recorder(log, producer_id=f"{job.trainer_id}-{job.run_id}", run_id=job.run_id)
        self.progress = Progress()
        self.live_versions: set[tuple[int, int]] = set()
        self.updates_at: dict[int, int] = {0: 0}
        self.rollover: Rollover | None = None
        self.learner: Learner
        self.alarms = Alarms(self.config)
        self.resets = OptimizerResets(self.recorder, enabled=job.resets_optimizer)

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
        self.updates_at = _updates_at(history)
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
        self.learner = build_learner(self.job)
        self.recorder.set_run_epoch(history.line.epoch)
        digest = weights_digest(named_weights(self.learner.model))
        self.progress = Progress(version_run_epoch=history.line.epoch, weights_digest=digest)
        self._save_checkpoint()
        self._publish()

    def _resume(self, history: RunHistory) -> RunHistory:
        """Come back: run the pinned batches after the newest checkpoint again, then raise the run epoch."""
        self.learner = build_learner(self.job, from_checkpoint=bool(history.checkpoints))
        last = history.last_step
        if history.checkpoints:
            rerun = Rerun(self.lake, history, self.learner, self.config, scorers=self.scorers)
            last = rerun.to_step(last)
            self.progress = rerun.progress
        else:
            # Died before its first checkpoint was known: nothing was trained yet.
            digest = weights_digest(named_weights(self.learner.model))
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
        served = self.coordinator.bring_into_effect(self._version())
        self.resets.begin(history, served)
        self._catch_up_on_alarms(history)
        if self.job.max_lead_steps:
            self.rollover = Rollover(self.coordinator, served, live_versions=self.live_versions)
            self.rollover.settle()
        source = open_source(self.lake, self.log, self.job, history, self.rollover, self.live_versions)
        try:
            while not finished and self.progress.step < self.config.max_steps:
                step = self.progress.step + 1
                resumed = step == history.last_step + 1
                batch = open_batch(self.lake, history, self.job, step) if resumed else None
                if batch is None:
                    batch = form_batch(source, self.recorder, self.job, self.progress)
                source.consumed()
                self.resets.settle(self.learner, self.rollover.serving if self.rollover else served, step=step - 1)
                finished = self._train_one(step, batch)
                if self.rollover is None or finished:
                    served = self.coordinator.bring_into_effect(self._version())
                else:
                    self.rollover.published(self._version())
        finally:
            source.close()

    def _train_one(self, step: int, batch: FormedBatch) -> bool:
        """Train a formed batch and write down what came of it; whether the run ends here."""
        started = time.perf_counter()
        outcome = train_step(
            self.learner, batch.packed, self.config, step=step, temperature=batch.temperature, scorers=self.scorers
        )
        metrics = step_metrics(
            batch.packed,
            batch.plan,
            outcome,
            self.config,
            newest_version=batch.newest_version,
            component_metrics=batch.component_metrics,
            updates_at=self.updates_at,
        )
        version_in = self.progress.version
        self.progress.step = step
        if outcome.actor_updates:
            self.progress.version += 1
            self.updates_at[self.progress.version] = self.updates_at[version_in] + outcome.actor_updates
            self.progress.version_run_epoch = self.recorder.run_epoch
            self.progress.weights_digest = outcome.actor_digest
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
        for alarm in self.alarms.step(step, metrics):
            self.recorder.record("alarm_raised", **alarm.fields(self.job.run_id, self.recorder.run_epoch))
        self.recorder.flush("spooled")
        crash_window("after_step_event")
        if outcome.actor_updates:
            self._publish()
        return final

    def _final(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run ends: its last step, or the moving average of the stop metric is high enough."""
        value = metrics.get(self.config.stop_metric)
        if self.config.stop_metric and value is not None and math.isfinite(value):
            average = self.progress.stop_average
            keep = self.config.stop_ema
            self.progress.stop_average = value if average is None else keep * average + (1 - keep) * value
            if self.progress.stop_average >= self.config.stop_above:
                return True
        return step >= self.config.max_steps

    def _catch_up_on_alarms(self, history: RunHistory) -> None:
        """Take over what the run's steps have raised, and record what a kill kept from being recorded."""
        steps = ((number, metric_values(history.steps[number])) for number in sorted(history.steps))
        past = self.alarms.fold(steps)
        if not past:
            return
        known = set(self.lake.read("alarm_raised", run_id=self.job.run_id)["event_id"].to_pylist())
        for alarm in past:
            fields = alarm.fields(self.job.run_id, history.steps[alarm.step]["run_epoch"])
            if fields["event_id"] not in known:
                self.recorder.record("alarm_raised", **fields)

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
        columns = publish_columns(
            self.lake, self.job.run_id, self.learner.model, self._version(), step=self.progress.step
        )
        self.recorder.record("weights_published", **columns)
        self.recorder.flush("spooled")
        self.live_versions.add(self._version().key)

    def _save_checkpoint(self) -> str:
        path = f"checkpoints/{self.job.run_id}/{self.recorder.run_epoch:04d}-{self.progress.step:08d}"
        critic = self.learner.critic
        if critic is not None and self.progress.step:
            critic.version += 1
        saved = save_checkpoint(self.lake.location, path, self.learner, self.progress)
        crash_window("after_checkpoint")
        self.recorder.record(
            "checkpoint_saved",
            trainer_id=self.job.trainer_id,
            step=self.progress.step,
            path=saved.path,
            num_bytes=saved.num_bytes,
            digest=saved.digest,
        )
        if critic is not None:
            self._publish_critic(critic)
        return saved.digest

    def _publish_critic(self, critic: Critic) -> None:
        """The critic's weights beside a checkpoint: no engine serves them."""
        digest = weights_digest(named_weights(critic.model))
        version = PolicyVersion(CRITIC_POLICY_ID, self.recorder.run_epoch, critic.version, digest)
        columns = publish_columns(
            self.lake, self.job.run_id, critic.model, version, step=self.progress.step, role="critic"
        )
        self.recorder.record("weights_published", **columns)


def _is_final(history: RunHistory) -> bool:
    if not history.steps:
        return False
    return metric_values(history.steps[history.last_step]).get("final") == 1.0


def _updates_at(history: RunHistory) -> dict[int, int]:
    """The optimizer's updates that had made each version of the live line, by its number."""
    found, total = {0: 0}, 0
    for number in sorted(history.steps):
        row = history.steps[number]
        if row["version_out"] != row["version_in"]:
            total += int(metric_values(row).get("actor_steps", 1.0))
            found[row["version_out"]] = total
    return found


def run_trainer(
    lake: Lake,
    log: EventLog,
    job: TrainerJob,
    *,
    scorers: Mapping[str, Scorer] | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Run one trainer process to the end of its run; ``scorers`` are teachers by id, for ``opd_form`` full."""
    trainer = Trainer(lake, log, job, scorers=scorers)
    on_ready()
    trainer.run()
