"""Batches that wait for teachers: scores come by another way than rollouts do, before them, after them, or twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
import torch
from tests.group_streams import (
    PROMPT,
    SIZE,
    TIMEOUT_S,
    GroupWriter,
    NothingMore,
    StreamTrainer,
    drops,
    groups,
)

from rolltape.ingest.memory import MemoryLog
from rolltape.schema import reasons
from rolltape.schema.cursor import Cursor
from rolltape.schema.fold import Fold
from rolltape.schema.render import arrow_schema
from rolltape.schema.runline import RunLine
from rolltape.trainers.assembly import VersionRules
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.buffer import KINDS
from rolltape.trainers.collect import StepCollector
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.score_book import TEACHER_KINDS
from rolltape.trainers.source import Gathered, LockStepSource

OPD = BatchRules.of(TrainerConfig(algorithm="opd"))
TOPICS = ("rollout", "control", "teacher")


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(num_partitions=3)


def scores(found: Gathered) -> list[float]:
    """The last token's score of each member: the writer gives it its group's number."""
    batch = found.packed()
    assert batch.teacher is not None
    last = batch.cu_seqlens[1:] - 1
    return [-float(value) for value in batch.teacher.log_probs[last]]


def test_a_streamed_batch_waits_for_the_scores_of_whole_groups(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.whole(0)
    worker.whole(1)
    with pytest.raises(NothingMore):
        trainer.gather()
    worker.route()
    worker.score(1, members=[0, 1, 2])
    with pytest.raises(NothingMore):
        trainer.gather()
    worker.score(0)
    found = trainer.gather()
    assert (groups(found), scores(found), drops(found)) == (["g000"], [0.0] * SIZE, [])
    worker.score(1, members=[3])
    found = trainer.gather()
    assert (groups(found), scores(found)) == (["g001"], [1.0] * SIZE)
    structs, _ = found.member_columns()
    assert all(len(ids) == 1 for ids in structs.field("teacher_event_ids").to_pylist())


def test_scores_that_are_here_before_their_rollouts_are_kept(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.route()
    worker.score(7)
    worker.whole(0)
    worker.score(0)
    assert groups(trainer.gather()) == ["g000"]
    teacher = next(place for place in log.end() if place.topic == "teacher")
    assert trainer.cursor[teacher] < log.end()[teacher], "a score that waits lies behind the cursor"
    worker.whole(7)
    found = trainer.gather()
    assert (groups(found), scores(found)) == (["g007"], [7.0] * SIZE)
    assert trainer.cursor[teacher] == log.end()[teacher]


def test_a_trainer_that_comes_back_finds_the_scores_of_what_it_has_not_consumed(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.route()
    for ordinal in (1, 0):
        worker.whole(ordinal)
        worker.score(ordinal)
    assert groups(trainer.gather()) == ["g000"]
    # As the lake has them: the reader does not come by them again.
    trainer.known = {kind: trainer.stream._events.all_of(kind) for kind in TEACHER_KINDS[1:]}
    trainer.start()
    found = trainer.gather()
    assert (groups(found), scores(found)) == (["g001"], [1.0] * SIZE)
    with pytest.raises(NothingMore):
        trainer.gather()


def test_scores_of_consumed_groups_are_let_go_of(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.route()
    worker.whole(0)
    worker.score(0)
    trainer.gather()
    worker.score(0)
    with pytest.raises(NothingMore):
        trainer.gather()
    assert trainer.stream._events.num_rows("teacher_scored") == 0


def test_a_group_that_waits_for_its_teacher_alone_is_held_and_never_dropped(log: MemoryLog) -> None:
    """§4.9: an unavailable teacher holds the sample. What came of the group otherwise is there, and is not lost."""
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.whole(0)
    worker.whole(1)
    with pytest.raises(NothingMore):
        trainer.gather()  # no route yet
    worker.route()
    trainer.clock.now += 5 * TIMEOUT_S
    with pytest.raises(NothingMore):
        trainer.gather(events=[trainer.wait(TIMEOUT_S), trainer.wait(TIMEOUT_S)])
    worker.score(1)
    found = trainer.gather(events=[trainer.wait(TIMEOUT_S)])
    assert (groups(found), drops(found)) == (["g001"], [])
    worker.score(0)
    found = trainer.gather()
    assert (groups(found), drops(found)) == (["g000"], [])


def test_a_group_that_lacks_a_member_beside_its_scores_is_dropped_by_name(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.route()
    worker.dispatch(0)
    worker.finish(0, members=[0, 1, 2])
    worker.whole(1)
    worker.score(1)
    trainer.clock.now += TIMEOUT_S
    trainer.stream.poll(0.0)
    trainer.clock.now += TIMEOUT_S
    found = trainer.gather()
    assert groups(found) == ["g001"]
    assert drops(found) == [(f"g000-{member}", 0, reasons.GROUP_INCOMPLETE) for member in range(SIZE)]


def test_an_overdue_group_of_which_nothing_is_scored_is_held(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, train_overdue=True, batch=OPD)
    worker.route()
    worker.whole(0)
    with pytest.raises(NothingMore):
        trainer.gather(events=[trainer.wait(TIMEOUT_S), trainer.wait(TIMEOUT_S)])
    worker.score(0, members=[2])
    found = trainer.gather(events=[trainer.wait(TIMEOUT_S)])
    assert [m.trajectory_id for m in found.plan.members] == ["g000-2"]
    assert drops(found) == [(f"g000-{member}", 0, reasons.TEACHER_SCORE_MISSING) for member in (0, 1, 3)]


def test_an_overdue_group_is_trained_with_the_members_that_are_scored(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, train_overdue=True, batch=OPD)
    worker.route()
    worker.whole(0)
    worker.score(0, members=[1, 2])
    with pytest.raises(NothingMore):
        trainer.gather()
    trainer.clock.now += TIMEOUT_S
    found = trainer.gather()
    assert [m.trajectory_id for m in found.plan.members] == ["g000-1", "g000-2"], "no group statistics, so no padding"
    assert drops(found) == [(f"g000-{member}", 0, reasons.TEACHER_SCORE_MISSING) for member in (0, 3)]


def test_a_route_that_comes_late_lets_go_of_the_groups_that_wait_for_it(log: MemoryLog) -> None:
    """Where distributions are scored on demand no score follows the route: nothing else would wake the groups."""
    full = BatchRules.of(TrainerConfig(algorithm="opd", opd_form="full"))
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=full)
    worker.whole(0)
    with pytest.raises(NothingMore):
        trainer.gather()
    worker.route()
    found = trainer.gather()
    assert (groups(found), drops(found)) == (["g000"], [])


def test_a_refused_score_drops_its_rollout_and_nothing_waits_for_it(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=OPD)
    worker.route()
    worker.whole(0)
    worker.score(0, members=[0, 1, 2])
    worker.score(0, members=[3], temperature=0.0)
    found = trainer.gather()
    assert drops(found) == [("g000-3", 0, reasons.TEACHER_TEMPERATURE_DIFFERS)]
    assert len(found.plan.members) == 3


def test_single_rollouts_stream_without_groups(log: MemoryLog) -> None:
    sao = BatchRules.of(TrainerConfig(algorithm="sao", epsilon_low=0.3, epsilon_high=5.0))
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=3, batch=sao)
    for ordinal in range(4):
        worker.dispatch(ordinal, members=[0], group_size=1)
        worker.finish(ordinal, members=[0], version=2 * (ordinal != 1))
    found = trainer.gather(version=2, tau=1)
    assert groups(found) == ["g000", "g002", "g003"]
    assert drops(found) == [("g001-0", 0, reasons.STALE)]


def test_compaction_with_ppo_takes_no_older_version_whatever_the_staleness_allows(log: MemoryLog) -> None:
    """Its ratio is to the version that the step starts from; one to the version that sampled is DIS's alone."""
    config = TrainerConfig(algorithm="compaction")
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=BatchRules.of(config))
    for ordinal, version in enumerate((1, 2)):
        worker.dispatch(ordinal, members=[0], group_size=1)
        worker.finish(ordinal, members=[0], version=version)
    found = trainer.gather(version=2, tau=3, single=config.needs_one_version)
    assert (groups(found), drops(found)) == (["g001"], [("g000-0", 0, reasons.STALE)])


def test_groups_without_spread_are_dropped_and_others_take_their_place(log: MemoryLog) -> None:
    rules = BatchRules.of(TrainerConfig(zero_std_groups="drop"))
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1, batch=rules)
    worker.dispatch(0)
    worker.finish(0, scalars=[1.0] * SIZE)
    worker.whole(1)
    found = trainer.gather()
    assert groups(found) == ["g001"]
    assert drops(found) == [(f"g000-{member}", 0, reasons.ZERO_STD_GROUP) for member in range(SIZE)]


class LockStep:
    """A lock-step source over a log, and what happens while it waits."""

    def __init__(self, log: MemoryLog) -> None:
        reader = log.reader(Cursor(), topics=TOPICS, kinds=(*KINDS, *TEACHER_KINDS))
        started = arrow_schema("run_started").empty_table()
        self.collector = StepCollector(reader, run_id="run", run_started=started)
        self.source = LockStepSource(self.collector, RunLine(((1, 0),)), num_members=SIZE, rules=OPD)

    def gather(self, step: int) -> Gathered:
        return self.source.gather(step, VersionRules(current=0, newest=0))


def test_a_step_waits_for_its_scores_and_folds_once(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, trainer = GroupWriter(log), LockStep(log)
    worker.route()
    worker.dispatch(0, training_step=1)
    worker.finish(0)
    waits: Iterator[Callable[[], None]] = iter(
        [lambda: worker.score(0, members=[0, 2]), lambda: None, lambda: worker.score(0, members=[1, 3])]
    )
    poll = trainer.collector.poll
    folds: list[pa.Array] = []
    fold = trainer.collector._events.fold

    def polled(timeout_s: float) -> bool:
        if trainer.collector._folded is not None:
            next(waits)()
        return poll(0.0)

    monkeypatch.setattr(trainer.collector, "poll", polled)

    def counted(ids: pa.Array, dispatched: pa.Table | None = None) -> Fold:
        folds.append(ids)
        return fold(ids, dispatched)

    monkeypatch.setattr(trainer.collector._events, "fold", counted)
    found = trainer.gather(1)
    assert len(found.plan.members) == SIZE
    assert torch.equal(found.packed().token_ids[: len(PROMPT)], torch.tensor(PROMPT, dtype=torch.int32))
    assert len(folds) == 1, "only teachers' events came while it waited"
    trainer.source.consumed()
    worker.dispatch(1, training_step=2)
    worker.finish(1)
    worker.score(1)
    monkeypatch.setattr(trainer.collector, "poll", poll)
    assert scores(trainer.gather(2)) == [1.0] * SIZE, "problems and routes are known to the next step"
