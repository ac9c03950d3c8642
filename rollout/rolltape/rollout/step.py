"""One step's share of one worker: what the tape lacks is dispatched, generated, recorded and judged (design §7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rolltape.ingest.recorder import Recorder
from rolltape.rollout import recording
from rolltape.rollout.attempts import Attempt, AttemptBook, Place, Plan
from rolltape.rollout.engine import GenerationBatch, SamplingConfig
from rolltape.rollout.environment import Answer, Problem
from rolltape.rollout.recording import RolloutBatch, Rows
from rolltape.rollout.single_turn import SingleTurn
from rolltape.schema.identity import derived_id, uuid7_many
from rolltape.schema.reward import RewardComponent
from rolltape.schema.runline import RunLine


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


class StepRunner:
    """Completes steps. Calling it again for the same step adds nothing; after a crash it adds what is missing.

    An interrupted attempt is abandoned and made again as the next attempt of the same trajectory. The batch is
    generated again as a whole, since batch composition decides the last bits of log-probs, but what is complete is not
    recorded twice.
    """

    def __init__(
        self, harness: SingleTurn, recorder: Recorder, *, worker_id: str, lease_s: float, rows_per_batch: int
    ) -> None:
        self._harness = harness
        self._recorder = recorder
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._rows_per_batch = rows_per_batch

    def run(self, rows: StepRows, plan: Plan, book: AttemptBook, line: RunLine, sampling: SamplingConfig) -> None:
        """Carry out ``plan``, as :func:`rolltape.rollout.attempts.plan_step` made it for these rows."""
        self._abandon(rows, plan, book, line)
        batch = self._assign(rows, plan, book)
        self._score(rows, plan, book, batch)
        if len(plan.record):
            self._dispatch(rows, plan, book, batch)
            for chunk in self._chunks(rows):
                self._generate(rows, np.intersect1d(plan.record, chunk), chunk, book, batch, sampling)
        self._recorder.flush("spooled")

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
            answer = self._harness.answer(attempt.token_ids, ended=attempt.ended == "completed")
            components.append(self._harness.judge(rows.problems[row], answer))
            attempt.rewarded = True
        self._recorder.record_batch("reward_assigned", recording.rewarded(batch.select(plan.score), components))

    def _dispatch(self, rows: StepRows, plan: Plan, book: AttemptBook, batch: RolloutBatch) -> None:
        chosen = _some(batch, plan.record)
        environment = self._harness.environment
        prompts = [self._harness.prompt(rows.problems[row]) for row in plan.record.tolist()]
        self._recorder.record_batch(
            "rollout_dispatched", recording.dispatched(chosen, worker_id=self._worker_id, lease_s=self._lease_s)
        )
        self._recorder.record_batch(
            "rollout_started",
            recording.started(
                chosen, environment=environment.name, environment_version=environment.version, prompts=prompts
            ),
        )
        self._recorder.flush("spooled")
        places, epoch = rows.places, self._recorder.run_epoch
        for row in plan.record.tolist():
            trajectory_id, attempt = str(batch.trajectory_ids[row]), batch.attempts[row]
            book.enter(places[row], Attempt(trajectory_id=trajectory_id, attempt=attempt, epoch=epoch, step=rows.step))

    def _chunks(self, rows: StepRows) -> Iterator[Rows]:
        """Row indices of each batch: whole groups, the same cut every time."""
        ordinals = np.asarray(rows.group_ordinals)
        starts = np.flatnonzero(np.diff(ordinals, prepend=ordinals[0] - 1))
        groups_per_batch = max(1, self._rows_per_batch // max(1, rows.group_size))
        cuts = [*starts[::groups_per_batch].tolist(), len(ordinals)]
        return (np.arange(first, last) for first, last in pairwise(cuts))

    def _generate(
        self,
        rows: StepRows,
        wanted: Rows,
        chunk: Rows,
        book: AttemptBook,
        batch: RolloutBatch,
        sampling: SamplingConfig,
    ) -> None:
        """Generate the whole chunk; record its ``wanted`` rows."""
        if not len(wanted):
            return
        problems = [rows.problems[row] for row in chunk.tolist()]
        generations = self._harness.generate(problems, [rows.seeds[row] for row in chunk.tolist()], sampling)
        texts = self._harness.texts(generations)
        of_chunk = _some(batch, chunk)
        engine = self._harness.engine
        actions = recording.sampled(
            of_chunk, generations, sampling, engine_id=engine.engine_id, engine=engine.info, texts=texts
        )
        ends = recording.ended(of_chunk, generations)
        rewards = recording.rewarded(of_chunk, self._judge(problems, generations, texts))
        local = wanted - chunk[0]
        for kind, columns in (("action_sampled", actions), ("rollout_ended", ends), ("reward_assigned", rewards)):
            chosen = columns if len(local) == len(chunk) else recording.select_rows(columns, local)
            self._recorder.record_batch(kind, chosen, len(local))
        _note(rows, wanted, int(chunk[0]), book, generations)

    def _judge(
        self, problems: Sequence[Problem], generations: GenerationBatch, texts: Sequence[str]
    ) -> list[tuple[RewardComponent, ...]]:
        reasons = generations.finish_reasons
        return [
            self._harness.judge(problem, Answer(text=text, ended=reason == "stop"))
            for problem, text, reason in zip(problems, texts, reasons, strict=True)
        ]


def _note(rows: StepRows, wanted: Rows, first: int, book: AttemptBook, generations: GenerationBatch) -> None:
    """Enter what was recorded into the book, as a later start would read it from the tape."""
    places, offsets, token_ids = rows.places, generations.offsets.tolist(), generations.token_ids.tolist()
    for row in wanted.tolist():
        attempt = _known(book, places[row])
        attempt.token_ids = token_ids[offsets[row - first] : offsets[row - first + 1]]
        attempt.ended = "completed" if generations.finish_reasons[row - first] == "stop" else "truncated"
        attempt.rewarded = True


def _known(book: AttemptBook, place: Place) -> Attempt:
    attempt = book.newest(place)
    assert attempt is not None, f"no attempt at {place}: the plan was made for another book"
    return attempt


def _some(batch: RolloutBatch, rows: Rows) -> RolloutBatch:
    return batch if len(rows) == len(batch) else batch.select(rows)
