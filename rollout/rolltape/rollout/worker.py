"""The rollout worker process, driven by the tape (design §7, §8).

In lock step it waits until the tape says that step s-1 is completed and its engine serves the version that came of it;
then it completes its share of the groups of step s. A worker that runs ahead takes new weights as they are committed
and goes on until it is too far ahead of what the trainer consumed.

It keeps no state of its own: after any crash it reads from the tape what is there, and adds what is missing with the
same seeds, hence (in lock step, where the version is the same too) the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.ingest.log import EventLog, LogReader
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.device import select_device, set_deterministic
from rolltape.numerics.models import ModelSpec, build_model, build_tokenizer, model_spec
from rolltape.rollout import attempts, tape
from rolltape.rollout.agent_config import AgentConfig
from rolltape.rollout.agent_environment import AgentEnvironment
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_step import AgentRunner
from rolltape.rollout.attempts import AttemptBook, plan_step
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.environments import make_environment
from rolltape.rollout.evaluation import evaluate
from rolltape.rollout.harness import Harness
from rolltape.rollout.pace import LockStep, Pace, Portion, RunAhead
from rolltape.rollout.process import DONE, TERMINATED, on_sigterm, open_run_log
from rolltape.rollout.single_turn import SingleTurn
from rolltape.rollout.step import RunnerOptions, SingleTurnRunner, StepRunner
from rolltape.rollout.tape import CompletedStep, RunTape, read_to
from rolltape.rollout.transformers_engine import TransformersEngine
from rolltape.rollout.weight_client import WeightClient, activation_hook
from rolltape.schema.errors import ConfigError
from rolltape.schema.validate import Limits
from rolltape.store.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What one worker is to do. All workers of a run differ in ``index`` alone."""

    lake: str  # path or URL
    run_id: str
    log: str = ""  # URL of the log; empty: the lake itself
    index: int = 0  # this worker, of num_workers
    num_workers: int = 1
    model: str | ModelSpec = "char-64x2"
    environment: str = "sort_digits"
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # the run's seed
    groups_per_step: int = 16  # of all workers together
    group_size: int = 16
    # without stop ids: the tokenizer's end is meant
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=4))
    num_threads: int = 1
    max_steps: int = 300
    max_lead_steps: int = 0  # 0: lock step; else so many steps ahead of the trainer at most
    agent: AgentConfig = field(default_factory=AgentConfig)  # of environments of several turns
    shuffle_rewards: bool = False  # a control: rewards of a batch in another order, marked so on the tape
    evaluate_initial: bool = False  # worker 0 evaluates version 0 too, before anything is trained
    evaluate_heldout: bool = True  # worker 0 evaluates the final version on the held-out problems
    policy_id: str = "actor"
    rows_per_batch: int = 1024  # most rollouts that are generated at once; whole groups, at least one
    lease_s: float = 600.0
    poll_s: float = 0.5  # longest wait for the tape before signals are looked at
    flush_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_workers:
            raise ConfigError(f"worker.index: expected 0 to {self.num_workers - 1}, got {self.index}")
        for name in ("groups_per_step", "group_size", "num_threads", "max_steps", "rows_per_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"worker.{name}: expected 1 or more, got {getattr(self, name)}")
        if self.groups_per_step < self.num_workers:
            raise ConfigError(
                f"worker.num_workers: expected at most one worker for each of {self.groups_per_step} groups, "
                f"got {self.num_workers}"
            )
        if self.max_lead_steps < 0:
            raise ConfigError(f"worker.max_lead_steps: expected 0 or more, got {self.max_lead_steps}")
        for name in ("lease_s", "poll_s", "flush_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"worker.{name}: expected more than 0, got {getattr(self, name)}")

    @property
    def worker_id(self) -> str:
        """Name of the worker and of its engine within the run."""
        return f"worker-{self.index}"

    @property
    def producer_id(self) -> str:
        """Name of the worker among all producers of the lake."""
        return f"{self.run_id}.{self.worker_id}"


class Worker:
    """One worker over parts that are made elsewhere; :func:`run_worker` makes the usual ones."""

    def __init__(
        self,
        config: WorkerConfig,
        log: EventLog,
        recorder: Recorder,
        harness: SingleTurn | AgentHarness,
        weights: WeightClient,
    ) -> None:
        self._config = config
        self._log = log
        self._recorder = recorder
        self._harness = harness
        self._weights = weights
        self._sampling = harness.sampling(config.sampling)
        self._runner = self._make_runner(harness)
        self._pace = pace_of(config, harness)
        self._tape = RunTape(config.run_id, config.policy_id, follow_groups=config.max_lead_steps > 0)
        self._book = AttemptBook(config.run_id, config.worker_id)
        self._done = 0  # number of the last complete share
        self._stop = threading.Event()
        self._reader: LogReader | None = None

    def _make_runner(self, harness: SingleTurn | AgentHarness) -> StepRunner[Any]:
        config = self._config
        options = RunnerOptions(
            worker_id=config.worker_id,
            lease_s=config.lease_s,
            rows_per_batch=config.rows_per_batch,
            shuffle_rewards=config.shuffle_rewards,
        )
        if isinstance(harness, AgentHarness):
            harness.check(self._sampling)
            return AgentRunner(harness, self._recorder, options, before_turn=self._take_new_weights)
        return SingleTurnRunner(harness, self._recorder, options)

    def _take_new_weights(self) -> None:
        """Between two turns: a worker that runs ahead goes on with what was committed meanwhile.

        In lock step nothing may change: the version that a step is sampled by follows from the step. A new run epoch
        is adopted between two shares, and its versions after that.
        """
        if not self._config.max_lead_steps or not self._config.agent.switch_between_turns or self._reader is None:
            return
        self._tape.read(self._reader, 0.0)
        if self._tape.line.epoch == self._recorder.run_epoch:
            self._weights.reconcile(self._tape)

    def stop(self) -> None:
        """Leave at the next opportunity."""
        self._stop.set()

    def run(self) -> int:
        """Work until the run's last version is in effect (and evaluated): :data:`DONE`, or :data:`TERMINATED`."""
        self._recorder.wait_for_older_epochs(self._config.flush_timeout_s)
        reader = self._log.reader(tape.start_of(self._log, self._tape), topics=tape.TOPICS, kinds=tape.KINDS)
        self._reader = reader
        try:
            read_to(reader, self._log.end(), tape.TOPICS, self._tape.apply)
            self._wait_for_run(reader)
            if not self._stop.is_set():
                self._join()
            return self._follow(reader)
        finally:
            self._reader = None
            reader.close()

    def _wait_for_run(self, reader: LogReader) -> None:
        while not self._tape.epochs and not self._stop.is_set():
            self._tape.read(reader, self._config.poll_s)

    def _follow(self, reader: LogReader) -> int:
        while not self._stop.is_set():
            self._adopt_epoch()
            self._weights.reconcile(self._tape)
            last = self._tape.last_step
            if last is not None and last.is_final:
                if self._weights.serves(self._tape, last.version_out):
                    self._finish(last)
                    return DONE
            elif self._advance():
                self._tape.read(reader, 0.0)
                continue
            self._tape.read(reader, self._config.poll_s)
        self._leave()
        return TERMINATED

    def _join(self) -> None:
        """Offer to serve. The recorder's producer epoch is the engine's incarnation."""
        engine, producer = self._harness.engine, self._recorder.producer
        self._recorder.set_run_epoch(self._tape.line.epoch)
        self._recorder.record(
            "engine_joined",
            engine_id=engine.engine_id,
            incarnation=f"{producer.producer_id}/{producer.epoch}",
            name=engine.info.name,
            version=engine.info.version,
            policy_id=self._config.policy_id,
            device=engine.info.device,
            dtype=engine.info.dtype,
            dp_size=1,
            capabilities=list(engine.info.capabilities),
        )
        self._recorder.flush("spooled")
        self._read_book()

    def _adopt_epoch(self) -> None:
        """A resumed run has a new line: look again at what of our work is on it."""
        if self._tape.line.epoch == self._recorder.run_epoch:
            return
        self._recorder.set_run_epoch(self._tape.line.epoch)
        self._recorder.flush("logged", self._config.flush_timeout_s)
        self._read_book()

    def _read_book(self) -> None:
        """Read this worker's attempts after the last completed step."""
        self._book = AttemptBook(self._config.run_id, self._config.worker_id)
        self._done = 0
        last = self._tape.last_step
        start = self._tape.cursor_before(1 if last is None else last.step + 1)
        reader = self._log.reader(start, topics=attempts.TOPICS, kinds=attempts.KINDS)
        try:
            self._book.read_all(reader, self._log.end())
        finally:
            reader.close()

    def _advance(self) -> bool:
        """Complete the next share, if it can be made now; whether anything was done."""
        share = self._pace.due(self._tape, self._done)
        if share is None:
            return False
        line = self._tape.line
        plan = plan_step(self._book, share.rows.places, line)
        if len(plan.record) and not self._weights.serves(self._tape, share.version):
            return False
        if self._config.evaluate_initial and self._tape.last_step is None and self._weights.serves(self._tape, 0):
            self._evaluate(step=0)
        if not plan.is_empty:
            self._runner.run(share.rows, plan, self._book, line, self._sampling)
        self._done = share.number
        self._book.forget(lambda place: self._pace.is_past(place, share.number))
        return True

    def _finish(self, last: CompletedStep) -> None:
        if self._config.evaluate_heldout:
            self._evaluate(step=last.step)
        self._leave()

    def _evaluate(self, *, step: int) -> None:
        """Evaluate the active version, if that is this worker's to do and it is not done yet."""
        if self._config.index == 0:
            evaluate(
                self._harness,
                self._runner,
                self._recorder,
                self._book,
                self._tape,
                step=step,
                sampling=self._sampling,
                seed=self._config.seed,
            )

    def _leave(self) -> None:
        self._recorder.record("engine_left", engine_id=self._harness.engine.engine_id, reason="left")
        self._recorder.flush("logged", self._config.flush_timeout_s)


def pace_of(config: WorkerConfig, harness: Harness) -> Pace:
    """Lock step, or ahead of the trainer."""
    portion = Portion(
        run_id=config.run_id,
        seed=config.seed,
        index=config.index,
        num_workers=config.num_workers,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        problems=harness.environment.problems("train"),
    )
    if config.max_lead_steps:
        return RunAhead(portion, max_lead_steps=config.max_lead_steps)
    return LockStep(portion, max_steps=config.max_steps)


def make_worker(config: WorkerConfig, log: EventLog, recorder: Recorder, root: Location) -> Worker:
    """A worker with a transformers engine over the configured model.

    Args:
        config: what it is to do.
        log: where it reads.
        recorder: what it writes with; made for ``config.producer_id`` and ``config.run_id``.
        root: the lake, under which the weights lie.
    """
    tokenizer = build_tokenizer(config.model)
    environment = make_environment(config.environment, config.environment_options, config.seed)
    model = build_model(config.model, config.seed).to(select_device())
    hook = activation_hook(recorder, config.worker_id)
    engine = TransformersEngine(model, engine_id=config.worker_id, on_activated=hook)
    max_length = model_spec(config.model).max_length
    harness: SingleTurn | AgentHarness
    if isinstance(environment, AgentEnvironment):
        harness = AgentHarness(engine, environment, tokenizer, max_length=max_length, config=config.agent)
    else:
        harness = SingleTurn(engine, environment, tokenizer, max_length=max_length)
    return Worker(config, log, recorder, harness, WeightClient(engine, recorder, root))


def run_worker(config: WorkerConfig) -> int:
    """Run one worker in this process; returns its exit status.

    Raises:
        ConfigError, LakeNotFoundError, ProducerFencedError: it cannot start.
        EngineError, DigestMismatchError: a version cannot be served; the engine has left the run.
        FlushTimeout, BackpressureTimeout: nothing archives what it spools; is a committer running?
    """
    set_deterministic(config.num_threads, config.seed)
    limits = Limits(vocab_size=build_tokenizer(config.model).vocab_size)
    with (
        open_run_log(config.log, config.lake) as log,
        Recorder(log, producer_id=config.producer_id, run_id=config.run_id, limits=limits) as recorder,
    ):
        worker = make_worker(config, log, recorder, Location.parse(config.lake))
        on_sigterm(worker.stop)
        return worker.run()
