"""One step's share of one worker: what the tape lacks is dispatched, generated, recorded and judged (design §7)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from rolltape.ingest.recorder import Recorder
from rolltape.rollout import recording
from rolltape.rollout.attempts import Attempt, AttemptBook, Place, Plan
from rolltape.rollout.engine import GenerationBatch, SamplingConfig
from rolltape.rollout.environment import Answer, Problem
from rolltape.rollout.harness import Harness
from rolltape.rollout.recording import RolloutBatch, Rows
from rolltape.rollout.rewards import shuffled_components
from rolltape.rollout.single_turn import SingleTurn
from rolltape.schema.identity import derived_id, uuid7_many
from rolltape.schema.reward import RewardComponent
from rolltape.schema.runline import RunLine

H = TypeVar("H", bound=Harness)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rollouts that a worker owes a step, in the fixed order in which they are generated."""

    purpose: str  # train or evaluate
    step: int | None  # that they are meant for; None: for none, and group ordinals count in the run
    group_size: int
    problems: Sequence[Problem]  # [B]
    group_ordinals: Sequence[int]  # [B]
    members: Sequence[int]  # [B]
    seeds: Sequence[int]  # [B]

    @property
    def places(self) -> list[Place]:
        """Where each rollout stands in its step."""
        pairs = zip(self.group_ordinals, self.members, strict=True)
        return [(self.purpose, self.step, ordinal, member) for ordinal, member in pairs]


def group_id_of(run_id: str, purpose: str, step: int | None, ordinal: int) -> str:
    """Name of a group: a function of its place in the run."""
    return derived_id(run_id, "group", purpose, "run" if step is None else step, ordinal)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """How a worker makes its rollouts."""

    worker_id: str
    lease_s: float
    rows_per_batch: int  # most rollouts that are generated together
    shuffle_rewards: bool = False  # a control: rewards that mean nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rollouts that are generated together. All of them are generated, the wanted ones are recorded."""

    rows: StepRows
    first: int  # row of the step that comes first here
    wanted: Rows  # rows of the chunk, ascending
    batch: RolloutBatch  # of the whole chunk
    starts: Mapping[int, str]  # event ids of rollout_started by row of the chunk, of the wanted ones

    @property
    def problems(self) -> list[Problem]:
        """One for each rollout."""
        return list(self.rows.problems[self.first : self.first + len(self.batch)])

    @property
    def places(self) -> list[Place]:
        """Where each rollout stands in its step."""
        return self.rows.places[self.first : self.first + len(self.batch)]


class StepRunner(ABC, Generic[H]):
    """Completes steps. Calling it again for the same step adds nothing; after a crash it adds what is missing.

    An interrupted attempt is abandoned and made again as the next attempt of the same trajectory. The batch is
    generated again as a whole, since batch composition decides the last bits of log-probs, but what is complete is not
    recorded twice.
    """

    def __init__(self, harness: H, recorder: Recorder, options: RunnerOptions) -> None:
        self._harness = harness
        self._recorder = recorder
        self._options = options

    def run(self, rows: StepRows, plan: Plan, book: AttemptBook, line: RunLine, sampling: SamplingConfig) -> None:
        """Carry out ``plan``, as :func:`rolltape.rollout.attempts.plan_step` made it for these rows."""
        self._abandon(rows, plan, book, line)
        batch = self._assign(rows, plan, book)
        self._score(rows, plan, book, batch)
        if len(plan.record):
            starts = self._dispatch(rows, plan, book, batch)
            for members in self._chunks(rows):
                wanted = np.intersect1d(plan.record, members)
                if len(wanted):
                    first = int(members[0])
                    chunk = Chunk(
                        rows=rows,
                        first=first,
                        wanted=wanted - first,
                        batch=_some(batch, members),
                        starts={row - first: starts[row] for row in wanted.tolist()},
                    )
                    self._generate(chunk, book, sampling)
        self._recorder.flush("spooled")

    @abstractmethod
    def _generate(self, chunk: Chunk, book: AttemptBook, sampling: SamplingConfig) -> None:
        """Generate the whole chunk; record its wanted rows and enter them into the book."""

    @abstractmethod
    def _judge_again(self, problem: Problem, attempt: Attempt) -> tuple[RewardComponent, ...]:
        """Judge an attempt that ended without a judgement, from what the tape has of it."""

    def _shuffled(
        self, rows: StepRows, components: Sequence[tuple[RewardComponent, ...]]
    ) -> Sequence[tuple[RewardComponent, ...]]:
        """A control's judgements: those of the same rollouts, in another order; others stay as they are."""
        if not self._options.shuffle_rewards or rows.purpose != "train":
            return components
        return shuffled_components(components, rows.seeds[0])

    def _abandon(self, rows: StepRows, plan: Plan, book: AttemptBook, line: RunLine) -> None:
        lost: dict[str, list[int]] = {"worker_lost": [], "superseded": []}
        places = rows.places
        for row in plan.abandon.tolist():
            attempt = _known(book, places[row])
            attempt.abandoned = True
            lost["worker_lost" if attempt.is_live(line) else "superseded"].append(row)
        details = {
            "worker_lost": "its worker ended before it did; generated again from its first token",
            "superseded": "dispatched in an older run epoch for a step that is not on the live line",
        }
        for reason, chosen in lost.items():
            if chosen:
                old = self._batch(rows, [book.newest(place) for place in places], np.array(chosen))
                self._recorder.record_batch("attempt_abandoned", recording.abandoned(old, reason, details[reason]))

    def _assign(self, rows: StepRows, plan: Plan, book: AttemptBook) -> RolloutBatch:
        """Trajectory and attempt of every row: known ones stay, abandoned ones get their next, new ones an id."""
        fresh = iter(uuid7_many(len(plan.record)))
        attempts: list[Attempt] = []
        recorded = set(plan.record.tolist())
        for row, place in enumerate(rows.places):
            known = book.newest(place)
            if row not in recorded:
                attempts.append(_known(book, place))
            elif known is None:
                attempts.append(Attempt(trajectory_id=next(fresh), attempt=0, epoch=0, step=rows.step))
            else:
                attempts.append(
                    Attempt(trajectory_id=known.trajectory_id, attempt=known.attempt + 1, epoch=0, step=rows.step)
                )
        return self._batch(rows, attempts, None)

    def _batch(self, rows: StepRows, attempts: Sequence[Attempt | None], chosen: Rows | None) -> RolloutBatch:
        run_id = self._recorder.run_id
        groups = {
            ordinal: group_id_of(run_id, rows.purpose, rows.step, ordinal)
            for ordinal in dict.fromkeys(rows.group_ordinals)
        }
        batch = RolloutBatch(
            purpose=rows.purpose,
            step=rows.step,
            group_size=rows.group_size,
            trajectory_ids=[attempt.trajectory_id if attempt else "" for attempt in attempts],
            attempts=[attempt.attempt if attempt else 0 for attempt in attempts],
            group_ids=[groups[ordinal] for ordinal in rows.group_ordinals],
            problem_ids=[problem.problem_id for problem in rows.problems],
            group_ordinals=rows.group_ordinals,
            members=rows.members,
            seeds=rows.seeds,
        )
        return batch if chosen is None else batch.select(chosen)

    def _score(self, rows: StepRows, plan: Plan, book: AttemptBook, batch: RolloutBatch) -> None:
        """Judge what ended without a judgement, from the ids on the tape."""
        if not len(plan.score):
            return
        components, places = [], rows.places
        for row in plan.score.tolist():
            attempt = _known(book, places[row])
            attempt.components = self._judge_again(rows.problems[row], attempt)
            attempt.rewarded = True
            components.append(attempt.components)
        self._recorder.record_batch("reward_assigned", recording.rewarded(batch.select(plan.score), components))

    def _dispatch(self, rows: StepRows, plan: Plan, book: AttemptBook, batch: RolloutBatch) -> dict[int, str]:
        """Say what is made before it is; the event id of each row's start."""
        chosen = _some(batch, plan.record)
        environment = self._harness.environment
        prompts = [self._harness.prompt(rows.problems[row]) for row in plan.record.tolist()]
        self._recorder.record_batch(
            "rollout_dispatched",
            recording.dispatched(chosen, worker_id=self._options.worker_id, lease_s=self._options.lease_s),
        )
        started = self._recorder.record_batch(
            "rollout_started",
            recording.started(
                chosen,
                environment=environment.name,
                environment_version=environment.version,
                prompts=prompts,
                stage=self._harness.stage,
                harness=self._harness.name,
            ),
        )
        self._recorder.flush("spooled")
        places, epoch = rows.places, self._recorder.run_epoch
        for row in plan.record.tolist():
            trajectory_id, attempt = str(batch.trajectory_ids[row]), batch.attempts[row]
            book.enter(places[row], Attempt(trajectory_id=trajectory_id, attempt=attempt, epoch=epoch, step=rows.step))
        return dict(zip(plan.record.tolist(), started.event_ids, strict=True))

    def _chunks(self, rows: StepRows) -> Iterator[Rows]:
        """Row indices of each batch: whole groups, the same cut every time."""
        ordinals = np.asarray(rows.group_ordinals)
        starts = np.flatnonzero(np.diff(ordinals, prepend=ordinals[0] - 1))
        groups_per_batch = max(1, self._options.rows_per_batch // max(1, rows.group_size))
        cuts = [*starts[::groups_per_batch].tolist(), len(ordinals)]
        return (np.arange(first, last) for first, last in pairwise(cuts))


class SingleTurnRunner(StepRunner[SingleTurn]):
    """Steps of rollouts of one action."""

    def _generate(self, chunk: Chunk, book: AttemptBook, sampling: SamplingConfig) -> None:
        """One action each, as one batch."""
        seeds = chunk.rows.seeds[chunk.first : chunk.first + len(chunk.batch)]
        generations = self._harness.generate(chunk.problems, seeds, sampling)
        texts = self._harness.texts(generations)
        engine = self._harness.engine
        actions = recording.sampled(
            chunk.batch, generations, sampling, engine_id=engine.engine_id, engine=engine.info, texts=texts
        )
        ends = recording.ended(chunk.batch, generations)
        judged = self._shuffled(chunk.rows, self._judge(chunk.problems, generations, texts))
        rewards = recording.rewarded(chunk.batch, judged)
        events = [("action_sampled", actions), ("rollout_ended", ends), ("reward_assigned", rewards)]
        if self._options.shuffle_rewards:
            # An attempt that ended could not be judged again: its reward is another one's.
            events[1:] = reversed(events[1:])
        for kind, columns in events:
            chosen = columns if len(chunk.wanted) == len(chunk.batch) else recording.select_rows(columns, chunk.wanted)
            self._recorder.record_batch(kind, chosen, len(chunk.wanted))
        _note(chunk, book, generations)

    def _judge(
        self, problems: Sequence[Problem], generations: GenerationBatch, texts: Sequence[str]
    ) -> list[tuple[RewardComponent, ...]]:
        reasons = generations.finish_reasons
        return [
            self._harness.judge(problem, Answer(text=text, ended=reason == "stop"))
            for problem, text, reason in zip(problems, texts, reasons, strict=True)
        ]

    def _judge_again(self, problem: Problem, attempt: Attempt) -> tuple[RewardComponent, ...]:
        answer = self._harness.answer(attempt.token_ids, ended=attempt.ended == "completed")
        return self._harness.judge(problem, answer)


def _note(chunk: Chunk, book: AttemptBook, generations: GenerationBatch) -> None:
    """Enter what was recorded into the book, as a later start would read it from the tape."""
    places, offsets, token_ids = chunk.places, generations.offsets.tolist(), generations.token_ids.tolist()
    for row in chunk.wanted.tolist():
        attempt = _known(book, places[row])
        attempt.token_ids = token_ids[offsets[row] : offsets[row + 1]]
        attempt.ended, _ = recording.ENDS[generations.finish_reasons[row]]
        attempt.rewarded = True


def _known(book: AttemptBook, place: Place) -> Attempt:
    attempt = book.newest(place)
    assert attempt is not None, f"no attempt at {place}: the plan was made for another book"
    return attempt


def _some(batch: RolloutBatch, rows: Rows) -> RolloutBatch:
    return batch if len(rows) == len(batch) else batch.select(rows)
