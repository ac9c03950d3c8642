"""How far a worker may run ahead: bounded by what the trainer consumed of its groups, and never beyond."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.rollout.environment import Problem
from rolltape.rollout.pace import LockStep, Portion, RunAhead, Share
from rolltape.rollout.seeds import problem_slots, sampling_seed
from rolltape.rollout.step import group_id_of
from rolltape.rollout.tape import CompletedStep, RunTape
from rolltape.schema.build import build_batch

PROBLEMS = [Problem(problem_id=f"p{number}", prompt=str(number), answer="", split="train") for number in range(7)]


def portion(*, index: int = 0, num_workers: int = 2, groups_per_step: int = 5, group_size: int = 2) -> Portion:
    return Portion(
        run_id="run",
        seed=3,
        index=index,
        num_workers=num_workers,
        groups_per_step=groups_per_step,
        group_size=group_size,
        problems=PROBLEMS,
    )


def tape(*, epochs: dict[int, int] | None = None) -> RunTape:
    made = RunTape("run", "actor", follow_groups=True)
    made.epochs = {1: 0} if epochs is None else epochs
    return made


def ordinals(share: Share | None) -> list[int]:
    assert share is not None
    return list(dict.fromkeys(share.rows.group_ordinals))


def consume(run: RunTape, *groups: int, epoch: int = 1, step: int = 1) -> None:
    """A batch of ``step`` that holds these groups; every other one was dropped."""
    names = [group_id_of("run", "train", None, ordinal) for ordinal in groups]
    member = {"trajectory_id": "t", "attempt": 0, "is_padding": False}
    columns = {
        "event_id": [f"batch-{epoch}-{step}"],
        "run_id": "run",
        "run_epoch": epoch,
        "producer_id": "trainer",
        "producer_epoch": 1,
        "lane_seq": np.array([0]),
        "recorded_at": pa.array([0], pa.timestamp("us", "UTC")),
        "batch_id": [f"batch-{epoch}-{step}"],
        "trainer_id": "trainer",
        "algorithm": "grpo",
        "step": step,
        "members": [[{**member, "group_id": name} for name in names[::2] for _ in range(2)]],
        "dropped": [
            [{"trajectory_id": "t", "attempt": 0, "group_id": name, "reason": "stale"} for name in names[1::2]]
        ],
    }
    built = build_batch("batch_formed", columns, 1)
    assert not built.refused, built.refused
    run.apply("batch_formed", pa.Table.from_batches([built.batch]))


def test_a_worker_makes_its_share_of_each_round_and_stops_at_the_bound() -> None:
    pace, run = RunAhead(portion(), max_lead_steps=2), tape()
    made = [ordinals(pace.due(run, done)) for done in range(3)]
    assert made == [[0, 2, 4], [5, 7, 9], [10, 12, 14]]
    assert pace.due(run, 3) is None, "two rounds ahead of the one that is consumed next"
    consume(run, 0, 2, 5)
    assert ordinals(pace.due(run, 3)) == [15, 17, 19]
    assert pace.due(run, 4) is None


def test_groups_of_others_free_nobody() -> None:
    pace, run = RunAhead(portion(index=1), max_lead_steps=1), tape()
    assert [ordinals(pace.due(run, done)) for done in range(2)] == [[1, 3], [6, 8]]
    consume(run, 0, 2, 4, 5, 7, 9, 10, 12, 14)
    assert pace.due(run, 2) is None
    consume(run, 1, 3, step=2)
    assert ordinals(pace.due(run, 2)) == [11, 13]


def test_a_worker_that_comes_back_makes_what_is_not_consumed() -> None:
    run = tape()
    consume(run, 0, 2, 4, 7)
    pace = RunAhead(portion(), max_lead_steps=1)
    first = pace.due(run, 0)
    assert first is not None
    assert (first.number, ordinals(first)) == (2, [5, 9])
    assert ordinals(pace.due(run, first.number)) == [10, 12, 14]
    assert pace.due(run, 3) is None


def test_a_rewound_run_gives_groups_back() -> None:
    run = tape()
    consume(run, 0, 2, 4, step=1)
    consume(run, 5, 7, 9, step=2)
    pace = RunAhead(portion(), max_lead_steps=0)
    assert ordinals(pace.due(run, 2)) == [10, 12, 14]
    # From the beginning: what step 2 consumed is free again, the batch of step 1 stays pinned.
    run.apply("run_resumed", resumed(epoch=2, continues_from=0))
    again = pace.due(run, 0)
    assert again is not None
    assert (again.number, ordinals(again)) == (2, [5, 7, 9])


def resumed(*, epoch: int, continues_from: int) -> pa.Table:
    columns = {
        "event_id": ["resumed"],
        "run_id": "run",
        "run_epoch": epoch,
        "producer_id": "trainer",
        "producer_epoch": 2,
        "lane_seq": np.array([0]),
        "recorded_at": pa.array([0], pa.timestamp("us", "UTC")),
        "purpose": "train",
        "continues_from_step": continues_from,
        "reason": "divergence",
    }
    built = build_batch("run_resumed", columns, 1)
    assert not built.refused, built.refused
    return pa.Table.from_batches([built.batch])


def test_problems_and_seeds_are_those_of_lock_step() -> None:
    ahead, run = RunAhead(portion(), max_lead_steps=3), tape()
    run.steps = {(1, step): CompletedStep(epoch=1, step=step, version_out=step, is_final=False) for step in (1, 2)}
    lock = LockStep(portion(), max_steps=9).due(run, 0)
    third = ahead.due(run, 2)
    assert lock is not None
    assert third is not None
    assert lock.rows.seeds == third.rows.seeds == [sampling_seed(3, 3, at, m) for at in (0, 2, 4) for m in (0, 1)]
    slots = problem_slots(3, 3, 5, len(PROBLEMS))
    assert [p.problem_id for p in third.rows.problems] == [f"p{slots[at]}" for at in (0, 2, 4) for _ in range(2)]
    assert lock.rows.problems == third.rows.problems
    assert (lock.rows.step, third.rows.step) == (3, None)
    assert (lock.version, third.version) == (2, None)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_the_bound_holds_whatever_is_consumed_and_whoever_restarts(
    lead: int, num_workers: int, groups: int, seed: int
) -> None:
    rng = random.Random(seed)
    num_workers = min(num_workers, groups)
    own = portion(index=rng.randrange(num_workers), num_workers=num_workers, groups_per_step=groups)
    pace, run = RunAhead(own, max_lead_steps=lead), tape()
    size = len(own.ordinals)
    outstanding: set[int] = set()
    consumed: set[int] = set()
    done = step = 0
    for _ in range(60):
        share = pace.due(run, done)
        if share is not None and rng.random() < 0.7:
            new = set(share.rows.group_ordinals)
            assert not new & consumed, "a consumed group was made again"
            outstanding |= new
            done = share.number
        assert len(outstanding) <= (1 + lead) * size
        if share is None:
            assert len(outstanding) + size > (1 + lead) * size, "held back before the bound"
        chosen = {group for group in outstanding if rng.random() < 0.2}
        if chosen:
            step += 1
            consume(run, *chosen, step=step)
            outstanding -= chosen
            consumed |= chosen
        if rng.random() < 0.1:
            pace, done = RunAhead(own, max_lead_steps=lead), 0  # the worker restarts and knows the tape alone
    assert consumed or not step


def test_lock_step_waits_for_the_step_before() -> None:
    pace, run = LockStep(portion(), max_steps=2), tape()
    first = pace.due(run, 0)
    assert first is not None
    assert (first.number, first.version, first.rows.step) == (1, 0, 1)
    assert pace.due(run, 1) is None
    run.steps[1, 1] = CompletedStep(epoch=1, step=1, version_out=0, is_final=False)
    second = pace.due(run, 1)
    assert second is not None
    assert (second.number, second.version) == (2, 0)
    run.steps[1, 2] = CompletedStep(epoch=1, step=2, version_out=1, is_final=False)
    assert pace.due(run, 2) is None, "no step beyond the last"


@pytest.mark.parametrize("lead", [1, 2])
def test_past_places_are_those_of_complete_rounds(lead: int) -> None:
    pace = RunAhead(portion(), max_lead_steps=lead)
    assert pace.is_past(("train", None, 4, 0), 1)
    assert not pace.is_past(("train", None, 5, 0), 1)
    assert not pace.is_past(("evaluate", 3, 0, 0), 9)
