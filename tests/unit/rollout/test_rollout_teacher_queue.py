"""Units of rollouts that wait for their scores: when one is complete, and what is let go."""

from __future__ import annotations

from typing import Any

import pytest

from rolltape.rollout.teacher_queue import KINDS, ScoringQueue

MEMBERS = 2


class Feeder:
    """Writes rollouts on a tape, and gives each table to the queue when told to."""

    def __init__(self, tape: Any, queue: ScoringQueue) -> None:
        self.tape = tape
        self.queue = queue
        tape.add("run_started", purpose="train")
        self.started = tape.tables()["run_started"]
        tape.batches.clear()

    def flush(self) -> None:
        """Give the queue what came since the last call."""
        tables = self.tape.tables()
        for kind in KINDS:
            if kind in tables:
                self.queue.add(kind, tables[kind])
        self.tape.batches.clear()

    def dispatch(self, group: int, *, step: int | None = 1, attempt: int = 0, purpose: str = "train") -> None:
        for member in range(MEMBERS):
            self.tape.add(
                "rollout_dispatched", purpose=purpose, training_step=step, group_ordinal=group, member=member,
                group_size=MEMBERS, worker_id="w", problem_id=f"p{group}", **self.who(group, member, attempt),
            )  # fmt: skip

    def end(self, group: int, *members: int, attempt: int = 0) -> None:
        for member in members or range(MEMBERS):
            who = self.who(group, member, attempt)
            self.tape.add("rollout_started", event_index=0, prompt_token_ids=[[1, 2]], **who)
            self.tape.add(
                "action_sampled", event_index=1, action_kind="execution", token_ids=[[5, 6]],
                rollout_log_probs=[[-0.5, -0.5]], prefix_length=2, **who,
            )  # fmt: skip
            self.tape.add(
                "rollout_ended", event_index=2, status="completed", num_action_tokens=2, num_observation_tokens=0,
                last_event_index=2, **who,
            )  # fmt: skip

    def abandon(self, group: int, member: int, attempt: int = 0) -> None:
        self.tape.add("attempt_abandoned", reason="worker_lost", **self.who(group, member, attempt))

    @staticmethod
    def who(group: int, member: int, attempt: int) -> dict[str, Any]:
        return {"trajectory_id": f"t{group}.{member}", "attempt": attempt, "group_id": f"g{group}"}


@pytest.fixture
def feeder(tape: Any) -> Feeder:
    return Feeder(tape, ScoringQueue("run", groups_per_step=3))


def test_a_group_is_complete_when_all_of_it_has_ended(feeder: Feeder) -> None:
    feeder.dispatch(0)
    feeder.end(0, 0)
    feeder.flush()
    assert (feeder.queue.complete(), feeder.queue.begun()) == ([], [(1, 0, 0)])
    feeder.end(0, 1)
    feeder.flush()
    assert (feeder.queue.complete(), feeder.queue.begun()) == ([(1, 0, 0)], [])
    assert feeder.queue.place("t0.1", 0) == ((1, 0, 0), 0, 1)
    assert feeder.queue.problems([(1, 0, 0)]) == {"p0"}


def test_an_abandoned_attempt_leaves_its_place_open(feeder: Feeder) -> None:
    feeder.dispatch(0)
    feeder.end(0)
    feeder.abandon(0, 1)
    feeder.flush()
    assert feeder.queue.complete() == []
    feeder.tape.add(
        "rollout_dispatched", purpose="train", training_step=1, group_ordinal=0, member=1, group_size=MEMBERS,
        worker_id="w", problem_id="p0", **Feeder.who(0, 1, 1),
    )  # fmt: skip
    feeder.flush()
    assert feeder.queue.complete() == []
    feeder.end(0, 1, attempt=1)
    feeder.flush()
    assert feeder.queue.complete() == [(1, 0, 0)]
    assert feeder.queue.place("t0.1", 0) is None
    assert feeder.queue.place("t0.1", 1) == ((1, 0, 0), 0, 1)
    table = feeder.queue.fold([(1, 0, 0)], {"run_started": feeder.started}).trajectories
    current = table.filter(table["is_current"])
    assert current.select(["trajectory_id", "attempt"]).to_pylist() == [
        {"trajectory_id": "t0.0", "attempt": 0},
        {"trajectory_id": "t0.1", "attempt": 1},
    ]


def test_a_dead_letter_is_an_end(feeder: Feeder) -> None:
    feeder.dispatch(0)
    feeder.end(0, 0)
    feeder.tape.add("dead_letter", reason="bad_value", **Feeder.who(0, 1, 0))
    feeder.flush()
    assert feeder.queue.complete() == [(1, 0, 0)]


def test_evaluations_and_other_runs_are_nothing_of_ours(feeder: Feeder) -> None:
    feeder.dispatch(0, purpose="evaluate", step=None)
    feeder.end(0)
    feeder.flush()
    assert (feeder.queue.complete(), feeder.queue.begun()) == ([], [])
    assert feeder.queue.place("t0.0", 0) is None
    other = ScoringQueue("another run")
    feeder.dispatch(1)
    feeder.end(1)
    for kind, table in feeder.tape.tables().items():
        if kind in KINDS:
            other.add(kind, table)
    assert other.complete() == []


def test_a_fold_is_of_the_units_asked_for_and_forgotten_ones_are_gone(feeder: Feeder) -> None:
    for group in range(3):
        feeder.dispatch(group)
        feeder.end(group)
    feeder.flush()
    units = feeder.queue.complete()
    folded = feeder.queue.fold(units[:2], {"run_started": feeder.started})
    assert folded.trajectories["trajectory_id"].to_pylist() == ["t0.0", "t0.1", "t1.0", "t1.1"]
    assert folded.segments["response_token_ids"].to_pylist() == [[5, 6]] * 4
    feeder.queue.forget(units[:2])
    assert feeder.queue.complete() == units[2:]
    assert feeder.queue.place("t0.0", 0) is None
    assert feeder.queue.fold(units, {"run_started": feeder.started}).trajectories["trajectory_id"].to_pylist() == [
        "t2.0",
        "t2.1",
    ]


def test_blocks_of_groups(tape: Any) -> None:
    """Of a step, or (rollouts meant for none) of ordinals in the run."""
    feeder = Feeder(tape, ScoringQueue("run", groups_per_step=2, groups_per_unit=2))
    for group in (0, 1, 2, 3):
        feeder.dispatch(group, step=None)
    feeder.end(0)
    feeder.end(2)
    feeder.flush()
    assert feeder.queue.complete() == []
    feeder.end(3)
    feeder.flush()
    assert feeder.queue.complete() == [(None, 1, 0)]
    feeder.end(1)
    feeder.flush()
    assert feeder.queue.complete() == [(None, 0, 0), (None, 1, 0)]


@pytest.mark.parametrize(("per_step", "per_unit"), [(5, 2), (5, 5), (5, 9), (4, 1), (1, 1), (6, 3)])
def test_units_lie_within_a_step_and_hold_every_group_once(tape: Any, per_step: int, per_unit: int) -> None:
    feeder = Feeder(tape, ScoringQueue("run", groups_per_step=per_step, groups_per_unit=per_unit))
    for group in range(2 * per_step):
        feeder.dispatch(group, step=None)
        feeder.end(group)
        feeder.flush()
        known = len(feeder.queue.complete())
        if (group + 1) % per_step == 0:
            assert known == (group + 1) // per_step * -(-per_step // min(per_unit, per_step))
            assert not feeder.queue.begun()
    groups: dict[Any, set[int]] = {}
    for group in range(2 * per_step):
        place = feeder.queue.place(f"t{group}.0", 0)
        assert place is not None
        groups.setdefault(place[0], set()).add(group)
    assert sum(len(found) for found in groups.values()) == 2 * per_step
    assert all(len({group // per_step for group in found}) == 1 and len(found) <= per_unit for found in groups.values())


def test_kinds_of_one_commit_may_come_in_any_order(feeder: Feeder) -> None:
    """A kind's rows come at once, those of a rollout that was handed out last before its dispatch."""
    feeder.dispatch(0)
    feeder.end(0)
    tables = feeder.tape.tables()
    for kind in reversed(KINDS):
        if kind in tables:
            feeder.queue.add(kind, tables[kind])
    feeder.queue.settle()
    assert feeder.queue.complete() == [(1, 0, 0)]
    folded = feeder.queue.fold([(1, 0, 0)], {"run_started": feeder.started})
    assert folded.trajectories["state"].to_pylist() == ["ended", "ended"]
    assert folded.segments["response_token_ids"].to_pylist() == [[5, 6]] * 2


def test_what_nobody_handed_out_for_training_is_let_go(feeder: Feeder) -> None:
    feeder.end(0)
    tables = feeder.tape.tables()
    feeder.flush()
    feeder.queue.settle()
    feeder.dispatch(0)
    feeder.flush()
    assert feeder.queue.complete() == []
    for kind, table in tables.items():
        feeder.queue.add(kind, table)
    assert feeder.queue.complete() == [(1, 0, 0)]
