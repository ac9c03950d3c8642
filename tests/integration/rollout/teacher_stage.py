"""A run on any log with rollouts that are made here, and the scoring service that scores them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.char_tokenizer import behaviour_digest
from rolltape.numerics.models import build_model, build_tokenizer
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.vocabulary import Vocabulary
from rolltape.numerics.weights import named_weights, tensor_digests
from rolltape.rollout.teacher_bench import TeacherBench
from rolltape.rollout.teacher_models import Teacher, TeacherRoute
from rolltape.rollout.teachers import TeacherConfig, TeacherService
from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import NotPublishedError
from rolltape.store.lake import Lake

from .conftest import TapeReader

MODEL = "char-64x2"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}
VERSION = {"policy_id": "actor", "run_epoch": 1, "version": 0, "weights_digest": "w"}
ROUTES = (
    TeacherRoute(domain="up", lake="elsewhere", run="up", teacher_id="teacher-up"),
    TeacherRoute(domain="down", lake="elsewhere", run="down", teacher_id="teacher-down"),
)
SEEDS = {"teacher-up": 11, "teacher-down": 12}
CONFIG = TeacherConfig(lake="memory://", run_id="run", routes=ROUTES, poll_s=0.02, retry_s=0.05, group_wait_s=60.0)

SERVICE = """
import sys
from rolltape.rollout.teacher_models import TeacherRoute
from rolltape.rollout.teachers import TeacherConfig, run_teachers
lake, log, up, down, shuffled = sys.argv[1:]
sys.exit(run_teachers(TeacherConfig(
    lake=lake, log=log, run_id="run", poll_s=0.02, token_budget=64, shuffle_scores=shuffled == "shuffled",
    groups_per_step=4, group_size=4, rollouts_per_unit=8,
    routes=(
        TeacherRoute(domain="up", lake=up, run="up"),
        TeacherRoute(domain="down", lake=down, run="down", version="1", teacher_id="down"),
    ),
)))
"""

Scores = dict[tuple[str, int, int], tuple[str, str, bytes]]
"""(trajectory, attempt, segment) → teacher, digest of its weights, bits of its log-probs."""


def made_teacher(seed: int, temperature: float = 1.0) -> Teacher:
    """A teacher with weights from a seed."""
    model = build_model(MODEL, seed).requires_grad_(requires_grad=False)
    return Teacher(
        scorer=ModelScorer(model, temperature=temperature, token_budget=4096),
        vocabulary=Vocabulary.of(build_tokenizer(MODEL)),
        max_length=64,
        model=model,
        digests=tensor_digests(named_weights(model)),
    )


class Rollouts:
    """Writes a run with its problems and rollouts, as workers do."""

    def __init__(self, log: EventLog, *, producer_id: str = "worker") -> None:
        self.recorder = Recorder(log, producer_id=producer_id, run_id="run")
        self.tape = TapeReader(log)
        self._generator = np.random.default_rng(3)

    def start_run(self, domains: Mapping[str, str | None]) -> None:
        """``run_started``, and a problem for each name with its domain."""
        tokenizer = build_tokenizer(MODEL)
        digests = {"file_digest": tokenizer.file_digest, "behaviour_digest": behaviour_digest(tokenizer)}
        self.recorder.record("run_started", purpose="train", seed=0, vocab_size=tokenizer.vocab_size, tokenizer=digests)
        self.register(domains)

    def register(self, domains: Mapping[str, str | None]) -> None:
        columns = {"problem_id": list(domains), "domain": list(domains.values())}
        self.recorder.record_batch("problem_registered", columns, len(domains))
        self.recorder.flush("logged")

    def dispatch(self, problem: str, *, step: int | None = 1, ordinal: int = 0, size: int = 2, attempt: int = 0) -> Any:
        """Hand out and start a group; gives its identity columns and contexts."""
        names = [f"{problem}.{step}.{ordinal}.{member}" for member in range(size)]
        identity = {
            "trajectory_id": names, "attempt": [attempt] * size, "problem_id": problem,
            "group_id": f"group {step} {ordinal}", "root_rollout_id": names,
        }  # fmt: skip
        self.recorder.record_batch(
            "rollout_dispatched",
            {**identity, "purpose": "train", "training_step": step, "group_ordinal": ordinal,
             "member": list(range(size)), "group_size": size},
            size,
        )  # fmt: skip
        context = [1, *self._generator.integers(3, 13, 3).tolist()]
        self.recorder.record_batch("rollout_started", {**identity, "prompt_token_ids": [context] * size}, size)
        return identity, context

    def act(self, handed: Any, members: list[int] | None = None, *, temperature: float = 1.0) -> None:
        """Actions of 2 to 4 ids, an observation between them for every second member, and the end."""
        identity, context = handed
        for member in range(len(identity["trajectory_id"])) if members is None else members:
            own = {name: value[member] if isinstance(value, list) else value for name, value in identity.items()}
            ids = list(context)
            num_observed = 0
            for turn in range(1 + member % 2):
                if turn:
                    seen = self._ids(2)
                    self.recorder.record("observation_received", **own, segment_index=0, source="tool", token_ids=seen)
                    ids += seen
                    num_observed = len(seen)
                sampled = self._ids(2 + (member + turn) % 3)
                self.recorder.record(
                    "action_sampled", **own, segment_index=0, turn_index=turn, token_ids=sampled,
                    rollout_log_probs=[-0.5] * len(sampled), action_kind="execution",
                    version_runs=[{"start": 0, "length": len(sampled), **VERSION}],
                    sampling={**SAMPLING, "temperature": temperature}, prefix_length=len(ids),
                    prefix_digest=prefix_digest(ids), prefix_source="engine",
                )  # fmt: skip
                ids += sampled
            self.recorder.record(
                "rollout_ended", **own, status="completed", num_observation_tokens=num_observed,
                num_action_tokens=len(ids) - len(context) - num_observed,
            )  # fmt: skip
        self.recorder.flush("logged")

    def group(self, problem: str, **options: Any) -> None:
        """A whole group."""
        self.act(self.dispatch(problem, **options))

    def rewritten(self, problem: str) -> tuple[list[list[int]], list[list[int]]]:
        """A lone rollout whose context is replaced after its first action; contexts and responses of its segments."""
        identity, context = self.dispatch(problem, size=1)
        own = {name: value[0] if isinstance(value, list) else value for name, value in identity.items()}
        contexts, responses = [context, [1, 4, 9]], [self._ids(3), self._ids(4)]
        for segment, (before, sampled) in enumerate(zip(contexts, responses, strict=True)):
            if segment:
                self.recorder.record(
                    "context_rewritten", **own, segment_index=segment, reason="compaction", context_token_ids=before
                )
            self.recorder.record(
                "action_sampled", **own, segment_index=segment, turn_index=segment, token_ids=sampled,
                rollout_log_probs=[-0.5] * len(sampled), action_kind="execution", sampling=SAMPLING,
                version_runs=[{"start": 0, "length": len(sampled), **VERSION}], prefix_length=len(before),
                prefix_digest=prefix_digest(before), prefix_source="engine",
            )  # fmt: skip
        num = sum(map(len, responses))
        self.recorder.record(
            "rollout_ended", **own, status="completed", num_action_tokens=num, num_observation_tokens=0
        )
        self.recorder.flush("logged")
        return contexts, responses

    def finish(self) -> None:
        """The run's last step: the service leaves."""
        metrics = [{"name": "final", "value": 1.0}]
        self.recorder.record(
            "train_step_completed", batch_id="b", trainer_id="t", step=9, version_out=9, skipped=False, metrics=metrics
        )
        self.recorder.flush("logged")

    def _ids(self, count: int) -> list[int]:
        return [int(value) for value in self._generator.integers(3, 16, count)]

    def scores(self) -> list[dict[str, Any]]:
        return self.tape.rows("teacher_scored")

    def scored(self) -> Scores:
        """What the tape has of each segment, none of which may be there twice."""
        found: Scores = {}
        for row in self.scores():
            key = (row["trajectory_id"], row["attempt"], row["segment_index"])
            assert key not in found, f"{key} was scored twice"
            bits = np.array(row["log_probs"], np.float32).tobytes()
            found[key] = (row["teacher_id"], row["weights_digest"], bits)
        return found

    def roll(self, ordinals: Iterable[int], size: int) -> None:
        """Groups of step 1, of both domains."""
        for ordinal in ordinals:
            self.group("p-up" if ordinal % 3 else "p-down", ordinal=ordinal, size=size)

    def alarms(self) -> list[tuple[str, str]]:
        return [(row["alarm"], row["detail"]) for row in self.tape.rows("alarm_raised")]

    def wait_for_scores(self, count: int) -> None:
        self.tape.wait_for(f"{count} scores", lambda: len(self.scores()) >= count)

    def close(self) -> None:
        self.recorder.close()


class Serving:
    """A scoring service in a thread."""

    def __init__(
        self, log: EventLog, absent: set[str] | None = None, *, lake: Lake | None = None, **changes: Any
    ) -> None:
        self.config = dataclasses.replace(CONFIG, **changes)
        build_model(MODEL, 0)  # what is slow to import is imported before anybody waits
        self.absent = absent or set()
        self.recorder = Recorder(log, producer_id=self.config.producer_id, run_id="run")
        student = Vocabulary.of(build_tokenizer(MODEL))
        self.service = TeacherService(self.config, log, self.recorder, self._bench(student), lake)
        self.teachers: dict[str, Teacher] = {}
        self.status: int | None = None
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _bench(self, student: Vocabulary) -> TeacherBench:
        return TeacherBench(self.config, student, self.recorder, self._load)

    def _load(self, route: TeacherRoute) -> Teacher:
        if route.name in self.absent:
            raise NotPublishedError(f"no weights of {route.name}")
        self.teachers[route.name] = made_teacher(SEEDS[route.name], self.config.temperature)
        return self.teachers[route.name]

    def _run(self) -> None:
        try:
            self.status = self.service.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.recorder.close()

    def join(self) -> Serving:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the service did not end"
        return self

    def stop(self) -> None:
        self.service.stop()
        self.join()


class ServiceProcess:
    """A scoring service with teachers out of two lakes, as a process that may be killed."""

    def __init__(
        self, folder: Path, lake: str, teachers: tuple[str, str], kind: str = "straight", *, log: str = ""
    ) -> None:
        self._output = folder / "service.log"
        self._arguments = [lake, log, *teachers, kind]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._output.open("ab") as output:
            command = [sys.executable, "-c", SERVICE, *self._arguments]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def kill(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        assert self._process.wait(30) == -signal.SIGKILL

    def wait_for_end(self) -> None:
        assert self._process is not None
        assert self._process.wait(60) == 0, self._output.read_text()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
