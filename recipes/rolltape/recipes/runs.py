"""Starting and resuming runs: the lake, the ``run_started`` event, the processes, live progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rolltape.ingest.log import EventLog, open_log
from rolltape.ingest.recorder import Recorder
from rolltape.recipes.config import RunConfig
from rolltape.recipes.forked import ForkServer
from rolltape.recipes.supervisor import Supervisor, children_of, stopped_by_sigterm
from rolltape.schema.errors import ConfigError, FlushTimeout, ReplayError
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.trainers.history import RunHistory
from rolltape.trainers.job import InitialWeights, TrainerJob
from rolltape.trainers.records import metric_values

if TYPE_CHECKING:
    from rolltape.rollout.worker import WorkerConfig


_ARCHIVE_LOOK_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """A completed step, as the tape tells it while the run goes on."""

    step: int
    version: int
    skipped: bool
    metrics: Mapping[str, float]


def open_or_create(url: str) -> Lake:
    """The lake at ``url``, made if there is none."""
    return Lake.create(Location.parse(url), exist_ok=True)


def open_run_log(lake: Lake, log_url: str = "") -> EventLog:
    """The log of a run's processes: a Kafka log that a sink archives in ``lake``, or (empty URL) the lake itself."""
    if log_url:
        return open_log(log_url, lake=lake.location.url)
    return open_log(lake.location.url, committer="external")


def make_topics(log_url: str) -> None:
    """Make the topics of a Kafka log that are missing, as ``rolltape topics --create`` does."""
    from rolltape.ingest.kafka.client import connect
    from rolltape.ingest.kafka.config import KafkaConfig
    from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics

    admin = connect(KafkaConfig.from_url(log_url)).admin()
    try:
        ensure_topics(admin, TopicPlan.of(), create=True)
    finally:
        admin.close()


def config_of(lake: Lake, run_id: str) -> RunConfig:
    """The configuration that a run was started with, from the tape."""
    return RunConfig.from_json(RunHistory.read(lake, run_id).started["config_json"])


def start_run(lake: Lake, config: RunConfig, log: EventLog, *, archived: Callable[[], None] | None = None) -> bool:
    """Record ``run_started`` and the problems of the run, unless the run exists; whether it is new.

    Args:
        lake: where the run is looked for.
        config: what the run is to do.
        log: where it is recorded.
        archived: returns once the lake has everything that is logged (default: waits as long as the log does).

    Raises:
        ConfigError: the run exists with another configuration.
    """
    archived = archived or log.wait_until_archived
    archived()
    try:
        recorded = RunHistory.read(lake, config.run_id).started
    except ReplayError:
        recorded = None
    if recorded is not None:
        # Read again, so that what a later release added counts as its default.
        was = RunConfig.from_json(recorded["config_json"]).digest
        if was != config.digest:
            raise ConfigError(
                f"run {config.run_id!r} was started with another configuration (digest {was[:12]}, now "
                f"{config.digest[:12]}); choose another run_id or another lake"
            )
        return False
    from rolltape.numerics.char_tokenizer import behaviour_digest
    from rolltape.numerics.models import build_tokenizer
    from rolltape.rollout.environments import make_environment
    from rolltape.trainers.environment import describe_environment

    tokenizer = build_tokenizer(config.model.name)
    environment = make_environment(config.environment.name, config.environment.resolved_options(), config.seed)
    with Recorder(log, producer_id=f"starter-{config.run_id}", run_id=config.run_id) as recorder:
        recorder.record(
            "run_started",
            purpose="train",
            config_json=config.to_json(),
            config_digest=config.digest,
            model_name=config.model.name,
            seed=config.seed,
            vocab_size=tokenizer.vocab_size,
            tokenizer={
                "name": tokenizer.name,
                "revision": tokenizer.revision,
                "file_digest": tokenizer.file_digest,
                "behaviour_digest": behaviour_digest(tokenizer),
            },
            chat_template_digest=tokenizer.chat_template_digest,
            precision={"state": "float32", "gemm": "float32", "rollout_weights": "float32", "kv": "float32"},
            **describe_environment(config.trainer.num_threads),
        )
        recorder.record_batch("problem_registered", environment.problem_columns())
        recorder.flush("logged")
    archived()
    return True


class Progress:
    """Follows a run's completed steps on the tape."""

    def __init__(self, log: EventLog, run_id: str, on_step: Callable[[StepSeen], None]) -> None:
        self._reader = log.reader(log.end(), topics=("training",), kinds=("train_step_completed",))
        self._run_id = run_id
        self._on_step = on_step

    def poll(self) -> None:
        """Report what came since the last call."""
        for delivery in self._reader.poll(0.0):
            rows: list[dict[str, Any]] = delivery.table["train_step_completed"].to_pylist()
            for run_id, row in zip(delivery.table["run_id"].to_pylist(), rows, strict=True):
                if run_id == self._run_id:
                    self._on_step(
                        StepSeen(
                            step=row["step"],
                            version=row["version_out"],
                            skipped=row["skipped"],
                            metrics=metric_values(row),
                        )
                    )


def run(
    url: str,
    config: RunConfig,
    *,
    log_url: str = "",
    on_step: Callable[[StepSeen], None] = lambda _: None,
    max_restarts: int = 3,
) -> Supervisor:
    """Start or resume a run and return when it has ended and the lake has all of it.

    Args:
        url: path or URL of the lake.
        config: what the run is to do.
        log_url: a Kafka log that the run goes through; empty: the lake itself is the log. How a run is started does not
            change what it computes, so this is no part of its configuration.
        on_step: told of every completed step.
        max_restarts: how often each process may die.

    Raises:
        ChildFailedError: a process failed more often than ``max_restarts``.
        LogError: the log cannot be reached, or is not what the lake holds.
        FlushTimeout: the lake does not have everything: a lane waits for what is missing, say.
    """
    lake, server = open_or_create(url), ForkServer()
    services, workers = children_of(
        lake.location.url,
        config.run_id,
        config.rollout.num_workers,
        log_folder(lake),
        log_url=log_url,
        teachers=bool(config.teachers.routes),
        server=server,
    )
    supervisor = Supervisor(services, workers, max_restarts=max_restarts)
    with stopped_by_sigterm(), server:
        try:
            for child in services:
                child.start()
            with open_run_log(lake, log_url) as log:

                def archived() -> None:
                    wait_until_archived(log, supervisor)

                start_run(lake, config, log, archived=archived)
                progress = Progress(log, config.run_id, on_step)
                supervisor.run(on_tick=progress.poll, at_end=archived)
        finally:
            supervisor.stop()
    return supervisor


def wait_until_archived(log: EventLog, supervisor: Supervisor, timeout_s: float = 60.0) -> None:
    """Wait for the lake to have what is logged, while the services that see to it are kept running.

    Raises:
        ChildFailedError: a service died too often; the message has the end of its log.
        FlushTimeout: not in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return log.wait_until_archived(_ARCHIVE_LOOK_S)
        except FlushTimeout:
            if time.monotonic() >= deadline:
                raise
        supervisor.look_after()


def log_folder(lake: Lake) -> Path:
    """Where the run's processes write their logs."""
    return lake.spool_path / "logs"


def trainer_job(config: RunConfig) -> TrainerJob:
    """What the trainer process of a run is told."""
    initial = config.model.initial
    return TrainerJob(
        run_id=config.run_id,
        seed=config.seed,
        model_name=config.model.name,
        groups_per_step=config.rollout.groups_per_step,
        group_size=config.rollout.group_size,
        num_workers=config.rollout.num_workers,
        trainer=config.trainer,
        max_lead_steps=config.rollout.max_lead_steps,
        initial=None
        if initial is None
        else InitialWeights(lake_url=initial.lake, run_id=initial.run, version=initial.version),
    )


def worker_config(config: RunConfig, lake_url: str, index: int, *, log_url: str = "") -> WorkerConfig:
    """What one rollout worker of a run is told."""
    from rolltape.rollout.engine import SamplingConfig
    from rolltape.rollout.worker import WorkerConfig

    section = config.rollout
    return WorkerConfig(
        lake=lake_url,
        log=log_url,
        run_id=config.run_id,
        index=index,
        num_workers=section.num_workers,
        model=config.model.name,
        environment=config.environment.name,
        environment_options=config.environment.resolved_options(),
        seed=config.seed,
        groups_per_step=section.groups_per_step,
        group_size=section.group_size,
        sampling=SamplingConfig(
            temperature=section.temperature, top_p=section.top_p, top_k=section.top_k, max_tokens=section.max_tokens
        ),
        num_threads=section.num_threads,
        max_steps=config.trainer.max_steps,
        max_lead_steps=section.max_lead_steps,
        agent=config.agent,
        shuffle_rewards=section.shuffle_rewards,
        evaluate_heldout=section.evaluate_heldout,
        evaluate_initial=section.evaluate_initial,
    )
