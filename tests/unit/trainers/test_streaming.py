"""Asynchronous batches from the log: whole groups in any order, gates at consumption, nothing repeated or skipped."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.group_streams import SIZE, TIMEOUT_S, GroupWriter, NothingMore, StreamTrainer, drops, groups

from rolltape.ingest.memory import MemoryLog
from rolltape.schema import reasons
from rolltape.schema.cursor import Cursor


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(num_partitions=3)


def test_groups_are_taken_as_they_complete_and_ordered_by_ordinal_and_member(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    for ordinal in range(4):
        worker.dispatch(ordinal)
    worker.finish(3, members=[2, 0])
    worker.finish(1)
    worker.finish(3, members=[3, 1])
    found = trainer.gather()
    assert groups(found) == ["g001", "g003"]
    assert [m.member for m in found.plan.members] == [0, 1, 2, 3] * 2
    assert [m.group_ordinal for m in found.plan.members] == [1] * 4 + [3] * 4
    assert found.rewards.num_rows == 8
    worker.finish(2)
    found = trainer.gather(events=[lambda: worker.finish(0)])
    assert groups(found) == ["g000", "g002"]


def test_a_batch_waits_for_whole_groups(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    worker.whole(0)
    worker.dispatch(1)
    worker.finish(1, members=[0, 1, 2])
    with pytest.raises(NothingMore):
        trainer.gather()
    worker.finish(1, members=[3])
    assert groups(trainer.gather()) == ["g000", "g001"]


def test_what_is_not_consumed_waits_for_the_next_batch(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    for ordinal in range(4):
        worker.whole(ordinal)
    assert groups(trainer.gather()) == ["g000", "g001"]
    assert groups(trainer.gather()) == ["g002", "g003"]
    with pytest.raises(NothingMore):
        trainer.gather()


def test_the_cursor_is_the_low_watermark_of_open_groups(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    for ordinal in range(6):
        worker.dispatch(ordinal)
    first = {name: group.first_offset for name, group in seen(trainer).items()}
    places = {name: group.place for name, group in seen(trainer).items()}
    for ordinal in (4, 5):
        worker.finish(ordinal)
    found = trainer.gather()
    before, after = found.cursors
    assert before == Cursor()
    for name in ("g000", "g001", "g002", "g003"):
        assert after[places[name]] <= first[name], "an open group lies behind the cursor"
    for ordinal in range(4):
        worker.finish(ordinal)
    trainer.gather()
    assert trainer.pinned[-1].cursors[0] == after
    found = trainer.gather()
    assert all(found.cursors[1][place] == log.end()[place] for place in log.end() if place.topic == "rollout")


def seen(trainer: StreamTrainer) -> dict[str, Any]:
    with pytest.raises(NothingMore):
        trainer.gather()
    return trainer.stream.groups


def test_rollouts_that_are_too_old_are_dropped_by_name_where_they_are_consumed(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    for ordinal, version in enumerate((2, 4, 3, 5)):
        worker.whole(ordinal, version=version)
    found = trainer.gather(version=5, tau=1)
    assert groups(found) == ["g001", "g003"]
    assert drops(found) == [(f"g00{group}-{member}", 0, reasons.STALE) for group in (0, 2) for member in range(SIZE)]


def test_icepop_takes_no_other_version_than_the_one_it_starts_from(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    worker.whole(0, version=4)
    worker.whole(1, version=5)
    found = trainer.gather(version=5, tau=3, single=True)
    assert groups(found) == ["g001"]
    assert {reason for *_, reason in drops(found)} == {reasons.STALE}


def test_workers_that_wait_for_stale_groups_to_be_consumed_are_released(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    worker.whole(0, version=1)
    worker.whole(1, version=9)
    with pytest.raises(NothingMore):
        trainer.gather(version=9, tau=2)
    found = trainer.gather(version=9, tau=2, events=[trainer.wait(TIMEOUT_S)])
    assert groups(found) == ["g001"]
    assert {t[:4] for t, *_ in drops(found)} == {"g000"}
    worker.whole(2, version=1)
    empty = trainer.gather(version=9, tau=2, events=[trainer.wait(TIMEOUT_S)])
    assert empty.plan.members == ()
    assert len(empty.plan.dropped) == SIZE


def test_an_overdue_group_is_dropped_whole(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log)
    worker.dispatch(0)
    worker.finish(0, members=[0, 1, 2])
    with pytest.raises(NothingMore):
        trainer.gather()
    trainer.clock.now += TIMEOUT_S
    worker.whole(1)
    worker.whole(2)
    found = trainer.gather()
    assert groups(found) == ["g001", "g002"]
    assert drops(found) == [(f"g000-{member}", 0, reasons.GROUP_INCOMPLETE) for member in range(SIZE)]


def test_an_overdue_group_is_trained_with_what_it_has_where_the_run_says_so(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, train_overdue=True)
    worker.dispatch(0)
    worker.finish(0, members=[0, 1, 2])
    with pytest.raises(NothingMore):
        trainer.gather()
    trainer.clock.now += TIMEOUT_S
    worker.whole(1)
    found = trainer.gather()
    assert groups(found) == ["g000", "g001"]
    assert [(m.member, m.is_padding) for m in found.plan.members[:SIZE]] == [
        (0, False), (1, False), (2, False), (0, True)
    ]  # fmt: skip
    assert drops(found) == [("g000-3", 0, reasons.OPEN)]


def test_what_comes_late_for_a_group_that_was_given_up_is_dropped_by_name_once(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    worker.dispatch(0)
    with pytest.raises(NothingMore):
        trainer.gather()
    trainer.clock.now += TIMEOUT_S
    worker.whole(1)
    trainer.gather()
    worker.finish(0, members=[0])  # only an end: the batch has named this attempt
    worker.abandon(0, [1])
    worker.dispatch(0, attempt=1, members=[1])
    worker.whole(2)
    found = trainer.gather()
    assert groups(found) == ["g002"]
    assert drops(found) == [("g000-1", 1, reasons.GROUP_INCOMPLETE)]
    trainer.start()
    worker.whole(3)
    assert drops(trainer.gather()) == []


def test_a_lost_attempt_is_waited_for_until_its_successor_ends(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    worker.dispatch(0)
    worker.finish(0, members=[0, 1, 2])
    worker.abandon(0, [3])
    with pytest.raises(NothingMore):
        trainer.gather()
    worker.dispatch(0, attempt=1, members=[3])
    worker.finish(0, attempt=1, members=[3])
    found = trainer.gather()
    assert [(m.member, m.attempt) for m in found.plan.members] == [(0, 0), (1, 0), (2, 0), (3, 1)]


def test_a_cancelled_member_is_waited_for_no_longer(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    worker.dispatch(0)
    worker.finish(0, members=[0, 1, 2])
    worker.abandon(0, [3], reason="cancelled")
    found = trainer.gather()
    assert sum(m.is_padding for m in found.plan.members) == 1
    assert not drops(found)  # the orchestrator dropped it


def test_tokens_of_versions_off_the_live_line_are_refused(log: MemoryLog) -> None:
    """After a rewind to version 3 there is another version 4; the old one's tokens are no tokens of it."""
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    trainer.live_versions -= {(1, version) for version in range(4, 20)}
    trainer.live_versions |= {(2, 4)}
    worker.whole(0, version=4, epoch=1)
    worker.whole(1, version=4, epoch=2)
    found = trainer.gather(version=4)
    assert groups(found) == ["g001"]
    assert {reason for *_, reason in drops(found)} == {reasons.ABORTED_VERSION}


def test_evaluations_and_rollouts_of_a_step_are_left_alone(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    worker.dispatch(0, purpose="evaluate", training_step=3)
    worker.dispatch(1, training_step=3)
    for ordinal in (0, 1):
        worker.finish(ordinal)
    worker.whole(2)
    found = trainer.gather()
    assert groups(found) == ["g002"]
    assert not drops(found)


def test_a_dead_letter_closes_its_member(log: MemoryLog) -> None:
    worker, trainer = GroupWriter(log), StreamTrainer(log, num_groups=1)
    worker.dispatch(0)
    worker.finish(0, members=[0, 1, 2])
    receipt = worker.recorder.record_batch(
        "action_sampled",
        {
            "trajectory_id": ["g000-3"],
            "attempt": 0,
            "group_id": "g000",
            "token_ids": [[-7]],
            "rollout_log_probs": [[-0.5]],
        },
    )
    assert receipt.refused
    found = trainer.gather()
    assert [m.member for m in found.plan.members if not m.is_padding] == [0, 1, 2]
    assert drops(found) == [("g000-3", 0, reasons.DROPPED)]


@pytest.mark.parametrize("seed", range(12))
def test_a_trainer_that_dies_anywhere_neither_repeats_nor_skips_a_group(seed: int) -> None:
    """Random interleaving of three workers' groups over three partitions; the trainer is killed between two acts."""
    rng = random.Random(seed)
    log = MemoryLog(num_partitions=3)
    workers = [GroupWriter(log, f"worker-{index}") for index in range(3)]
    trainer = StreamTrainer(log, num_groups=rng.choice([1, 2, 3]))
    acts: list[Callable[[], None]] = []
    for ordinal in range(24):
        worker = workers[ordinal % 3]
        first = [m for m in range(SIZE) if rng.random() < 0.5]
        rest = [m for m in range(SIZE) if m not in first]
        of_group: list[Callable[[], None]] = [partial(worker.dispatch, ordinal)]
        of_group += [partial(worker.finish, ordinal, members=part) for part in (first, rest) if part]
        # Into the sequence at random places, the group's own acts in their order.
        places = sorted(rng.randrange(len(acts) + 1) for _ in of_group)
        for shift, (place, act) in enumerate(zip(places, of_group, strict=True)):
            acts.insert(place + shift, act)
    for act in acts:
        act()
        if rng.random() < 0.3:
            with contextlib.suppress(NothingMore):
                trainer.gather()
        if rng.random() < 0.2:
            trainer.start()
    while True:
        try:
            trainer.gather()
        except NothingMore:
            break
    trained = [group for found in trainer.pinned for group in groups(found)]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    left = set(trainer.stream.groups)
    assert len(left) < trainer.num_groups, "complete groups were skipped"
    assert set(trained) | left == {f"g{ordinal:03d}" for ordinal in range(24)}
    assert not any(found.plan.dropped for found in trainer.pinned)
    befores = [found.cursors for found in trainer.pinned]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(befores))
