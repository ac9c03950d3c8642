"""Groups written as workers that run ahead write them, and a trainer's stream of batches from any log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.schema import reasons
from rolltape.schema.cursor import Cursor
from rolltape.schema.digest import prefix_digest
from rolltape.schema.render import arrow_schema
from rolltape.trainers.assembly import VersionRules
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.buffer import KINDS
from rolltape.trainers.members import GRPO_RULES
from rolltape.trainers.score_book import TEACHER_KINDS
from rolltape.trainers.source import Gathered
from rolltape.trainers.stream import Consumed, GroupStream
from rolltape.trainers.streaming import StreamRules, StreamSource

SIZE: Final = 4
PROMPT: Final = [1, 2]
TIMEOUT_S: Final = 10.0
TOKENIZER: Final = "tokenizer"


class NothingMore(Exception):
    """The test has no more events, and the source still waits."""


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class GroupWriter:
    """Writes groups as a worker that runs ahead does."""

    def __init__(self, log: EventLog, producer_id: str = "worker") -> None:
        self.recorder = Recorder(log, producer_id=producer_id, run_id="run")

    def dispatch(self, ordinal: int, *, attempt: int = 0, members: Sequence[int] = range(SIZE), **fields: Any) -> None:
        self._record(
            "rollout_dispatched",
            ordinal,
            attempt,
            members,
            **{
                "purpose": "train",
                "training_step": None,
                "group_ordinal": ordinal,
                "member": pa.array(members, pa.int32()),
                "group_size": SIZE,
                "worker_id": "w",
                **fields,
            },
        )
        self._record("rollout_started", ordinal, attempt, members, prompt_token_ids=[PROMPT] * len(members))

    def finish(
        self,
        ordinal: int,
        *,
        attempt: int = 0,
        members: Sequence[int] = range(SIZE),
        version: int = 0,
        epoch: int = 1,
        scalars: Sequence[float] | None = None,
    ) -> None:
        count = len(members)
        run = {"start": 0, "length": 2, "policy_id": "actor", "run_epoch": epoch, "version": version}
        self._record(
            "action_sampled",
            ordinal,
            attempt,
            members,
            turn_index=0,
            action_kind="execution",
            token_ids=[[5, 6]] * count,
            rollout_log_probs=[[-0.5, -0.25]] * count,
            version_runs=[[run]] * count,
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed_logprobs"},
            prefix_length=len(PROMPT),
            prefix_digest=prefix_digest(PROMPT),
            prefix_source="engine",
        )
        self._record(
            "rollout_ended",
            ordinal,
            attempt,
            members,
            status="completed",
            num_action_tokens=2,
            num_observation_tokens=0,
        )
        scalars = [float(member) for member in members] if scalars is None else list(scalars)
        self._record(
            "reward_assigned", ordinal, attempt, members, state="earned", scalar=scalars, scalariser_version="1"
        )

    def whole(self, ordinal: int, **fields: Any) -> None:
        self.dispatch(ordinal)
        self.finish(ordinal, **fields)

    def abandon(self, ordinal: int, members: Sequence[int], reason: str = "worker_lost") -> None:
        self._record("attempt_abandoned", ordinal, 0, members, reason=reason)

    def route(self, domain: str = "math") -> None:
        """The problem of all groups, and the teacher of its domain."""
        self.recorder.record("problem_registered", problem_id="p", domain=domain)
        told = {"weights_digest": "w", "tokenizer_digest": TOKENIZER, "student_tokenizer_digest": TOKENIZER}
        self.recorder.record("teacher_routed", domain=domain, teacher_id=f"teacher-{domain}", **told)

    def score(self, ordinal: int, *, members: Sequence[int] = range(SIZE), **fields: Any) -> None:
        """What the teacher says of their actions."""
        count = len(members)
        columns: dict[str, Any] = {
            "segment_index": 0,
            "teacher_id": "teacher-math",
            "weights_digest": "w",
            "tokenizer_digest": TOKENIZER,
            "logprobs_mode": "processed_logprobs",
            "temperature": 1.0,
            "prefix_digest": prefix_digest(PROMPT),
            "start_position": len(PROMPT),
            "scored_token_ids": [[5, 6]] * count,
            "log_probs": [[-0.75, -ordinal]] * count,
        }
        self._record("teacher_scored", ordinal, 0, members, **{**columns, **fields})

    def _record(self, kind: str, ordinal: int, attempt: int, members: Sequence[int], **columns: Any) -> None:
        identity = {
            "trajectory_id": [f"g{ordinal:03d}-{member}" for member in members],
            "attempt": attempt,
            "group_id": f"g{ordinal:03d}",
            "problem_id": "p",
        }
        receipt = self.recorder.record_batch(kind, {**identity, **columns}, len(members))
        assert not receipt.refused, receipt.refused


class StreamTrainer:
    """A stream source over a log, and the tape of what it pinned: enough to start again from."""

    def __init__(
        self,
        log: EventLog,
        *,
        num_groups: int = 2,
        train_overdue: bool = False,
        patience: int = 0,
        batch: BatchRules = GRPO_RULES,
    ) -> None:
        """``patience``: looks in vain for which nothing has to happen; a broker takes its time."""
        self.batch = batch
        self.known: dict[str, pa.Table] = {}
        self.log, self.num_groups, self.train_overdue, self.patience = log, num_groups, train_overdue, patience
        self.clock = Clock()
        self.live_versions = {(1, version) for version in range(20)}
        self.cursor = Cursor()
        self.pinned: list[Gathered] = []
        self.events: Iterator[Callable[[], None]] = iter(())
        self.start()

    def start(self) -> None:
        """Come up, knowing what was pinned and nothing else."""
        consumed = Consumed()
        for found in self.pinned:
            consumed.groups.update(m.group_id for m in found.plan.members)
            for item in found.plan.dropped:
                assert item.group_id is not None
                consumed.groups.add(item.group_id)
                if item.reason == reasons.GROUP_INCOMPLETE:
                    consumed.given_up.setdefault(item.group_id, set()).add((item.trajectory_id, item.attempt))
        topics: tuple[str, ...] = ("rollout", "control")
        kinds: tuple[str, ...] = KINDS
        if self.batch.uses_teacher:
            topics, kinds = (*topics, "teacher"), (*kinds, *TEACHER_KINDS)
        reader = self.log.reader(self.cursor, topics=topics, kinds=kinds)
        started = arrow_schema("run_started").empty_table()
        self.stream = GroupStream(
            reader, run_id="run", run_started=started, consumed=consumed, clock=self.clock, known=self.known
        )
        self.source = StreamSource(
            self.stream,
            StreamRules(
                num_groups=self.num_groups,
                group_timeout_s=TIMEOUT_S,
                train_overdue=self.train_overdue,
                batch=self.batch,
            ),
            live_versions=self.live_versions,
            meanwhile=self._meanwhile,
            clock=self.clock,
        )

    def _meanwhile(self) -> None:
        event = next(self.events, None)
        if event is not None:
            event()
        elif self.looks_left <= 0:
            raise NothingMore
        else:
            self.looks_left -= 1

    def gather(self, version: int = 0, *, tau: int = 0, single: bool = False, events: Any = ()) -> Gathered:
        """Gather and pin. ``events`` happen one by one while it waits."""
        self.events, self.looks_left = iter(events), self.patience
        rules = VersionRules(current=version, newest=version, staleness_tau=tau, single_version=single)
        found = self.source.gather(len(self.pinned) + 1, rules)
        self.pinned.append(found)
        self.cursor = found.cursors[1]
        self.source.consumed()
        return found

    def wait(self, seconds: float) -> Callable[[], None]:
        def later() -> None:
            self.clock.now += seconds

        return later


def groups(found: Gathered) -> list[str]:
    return list(dict.fromkeys(m.group_id for m in found.plan.members))


def drops(found: Gathered) -> list[tuple[str, int, str]]:
    return [(d.trajectory_id, d.attempt, d.reason) for d in found.plan.dropped]
