"""Conservation: each begun attempt has one fate, on the live line; anything else shows as a balance."""

from __future__ import annotations

from typing import Any

import pytest

from rolltape.schema.cursor import Cursor
from rolltape.store.sources import TableSource
from rolltape.store.workspace import Workspace

COUNTS = ("dispatched", "undispatched", "trained", "dropped", "evaluated", "superseded", "in_flight", "balance")


def conservation(tape: Any, as_of: Cursor | None = None) -> list[dict[str, Any]]:
    workspace = Workspace(TableSource(tape.tables()), as_of=as_of)
    query = "SELECT * FROM conservation ORDER BY run_id, trainer_id"
    rows: list[dict[str, Any]] = workspace.table(query, ["conservation"]).to_pylist()
    return rows


def counts(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in COUNTS if row[name]}


def form(tape: Any, batch_id: str, members: list[Any], dropped: list[Any] = (), step: int = 1, **more: Any) -> None:  # type: ignore[assignment]
    tape.add(
        "batch_formed",
        batch_id=batch_id,
        trainer_id="trainer",
        algorithm="grpo",
        step=step,
        members=[[{"trajectory_id": t, "attempt": a, "is_padding": p} for t, a, p in members]],
        dropped=[[{"trajectory_id": t, "attempt": a, "reason": r} for t, a, r in dropped]],
        **more,
    )


def complete(tape: Any, batch_id: str, step: int = 1, **more: Any) -> None:
    tape.add("train_step_completed", trainer_id="trainer", step=step, batch_id=batch_id, skipped=False, **more)


def test_every_fate(tape: Any) -> None:
    for name in ("trained", "stale", "flying"):
        tape.rollout(name)
    tape.rollout("import", dispatched=False)
    tape.rollout("lost", attempt=0, ended=False)
    tape.add("attempt_abandoned", trajectory_id="lost", attempt=0, reason="worker_lost")
    tape.rollout("lost", attempt=1)
    tape.rollout("test", purpose="evaluate")
    form(tape, "b1", [("trained", 0, False), ("lost", 1, False), ("trained", 0, True)], [("stale", 0, "stale")])
    complete(tape, "b1")
    (row,) = conservation(tape)
    assert counts(row) == {
        "dispatched": 6,
        "undispatched": 1,
        "trained": 2,
        "dropped": 1,
        "evaluated": 1,
        "superseded": 1,
        "in_flight": 2,
    }
    assert row["num_unbalanced"] == 0
    assert row["drop_reasons"] == [{"reason": "stale", "num": 1}]


def test_a_batch_counts_only_when_a_step_names_it(tape: Any) -> None:
    tape.rollout("t")
    form(tape, "b1", [("t", 0, False)])
    assert counts(conservation(tape)[0]) == {"dispatched": 1, "in_flight": 1}
    complete(tape, "b1")
    assert counts(conservation(tape)[0]) == {"dispatched": 1, "trained": 1}


def test_trained_twice_breaks_the_balance(tape: Any) -> None:
    tape.rollout("t")
    form(tape, "b1", [("t", 0, False)])
    complete(tape, "b1")
    form(tape, "b2", [("t", 0, False)], step=2)
    complete(tape, "b2", step=2)
    (row,) = conservation(tape)
    assert (row["balance"], row["num_unbalanced"]) == (-1, 1)


def test_one_batch_completed_twice_breaks_the_balance(tape: Any) -> None:
    tape.rollout("t")
    form(tape, "b1", [("t", 0, False)])
    complete(tape, "b1")
    complete(tape, "b1", step=2)
    assert conservation(tape)[0]["balance"] == -1


def test_a_member_that_never_began_breaks_the_balance(tape: Any) -> None:
    tape.rollout("t")
    form(tape, "b1", [("t", 0, False), ("ghost", 0, False)])
    complete(tape, "b1")
    (row,) = conservation(tape)
    assert counts(row) == {"dispatched": 1, "trained": 2, "balance": -1}


def test_two_errors_do_not_hide_each_other(tape: Any) -> None:
    tape.rollout("t")
    form(tape, "b1", [("t", 0, False)], [("t", 0, "stale")])
    complete(tape, "b1")
    (row,) = conservation(tape)
    assert (row["balance"], row["num_unbalanced"]) == (-1, 1)


def test_a_superseded_attempt_that_was_trained_breaks_the_balance(tape: Any) -> None:
    tape.rollout("t", attempt=0)
    tape.rollout("t", attempt=1)
    form(tape, "b1", [("t", 0, False), ("t", 1, False)])
    complete(tape, "b1")
    assert conservation(tape)[0]["balance"] == -1


@pytest.mark.parametrize("reason", ["superseded", "abandoned", "open", "group_incomplete"])
def test_a_drop_that_restates_supersession_is_no_second_fate(tape: Any, reason: str) -> None:
    tape.rollout("t", attempt=0)
    tape.rollout("t", attempt=1)
    form(tape, "b1", [("t", 1, False)], [("t", 0, reason)])
    complete(tape, "b1")
    assert counts(conservation(tape)[0]) == {"dispatched": 2, "trained": 1, "superseded": 1}


def test_abandoned_attempts(tape: Any) -> None:
    for name, reason in (("owed", "worker_lost"), ("given_up", "cancelled")):
        tape.rollout(name, ended=False)
        tape.add("attempt_abandoned", trajectory_id=name, attempt=0, reason=reason)
    (row,) = conservation(tape)
    assert counts(row) == {"dispatched": 2, "dropped": 1, "in_flight": 1}
    assert row["drop_reasons"] == [{"reason": "cancelled", "num": 1}]


def test_the_live_line(tape: Any) -> None:
    """Steps 2 and 3 were completed in epoch 1; epoch 2 continues from step 1 and makes step 2 anew."""
    tape.add("run_started", purpose="train")
    for step in (1, 2, 3):
        tape.rollout(f"old{step}", step=step)
        form(tape, f"old{step}", [(f"old{step}", 0, False)], step=step)
        complete(tape, f"old{step}", step=step)
    tape.rollout("old4", step=4)
    assert counts(conservation(tape)[0]) == {"dispatched": 4, "trained": 3, "in_flight": 1}
    tape.add("run_resumed", run_epoch=2, purpose="train", continues_from_step=1)
    assert counts(conservation(tape)[0]) == {"dispatched": 2, "trained": 1, "in_flight": 1}
    form(tape, "new2", [("old2", 0, False)], step=2, run_epoch=2)
    complete(tape, "new2", step=2, run_epoch=2)
    tape.rollout("new3", step=3, run_epoch=2)
    (row,) = conservation(tape)
    assert counts(row) == {"dispatched": 3, "trained": 2, "in_flight": 1}
    assert (row["off_line"], row["num_unbalanced"]) == (2, 0)


def test_a_dead_dispatch_that_is_trained_all_the_same_breaks_the_balance(tape: Any) -> None:
    tape.add("run_started", purpose="train")
    tape.rollout("old3", step=3)
    tape.add("run_resumed", run_epoch=2, purpose="train", continues_from_step=1)
    form(tape, "b", [("old3", 0, False)], step=3, run_epoch=2)
    complete(tape, "b", step=3, run_epoch=2)
    assert conservation(tape)[0]["balance"] == -1


def test_the_line_of_three_epochs_is_the_lowest_point_of_resumption(tape: Any) -> None:
    tape.add("run_started", purpose="train")
    tape.add("run_resumed", run_epoch=2, purpose="train", continues_from_step=5)
    tape.add("run_resumed", run_epoch=3, purpose="train", continues_from_step=20)
    rows = Workspace(TableSource(tape.tables())).table(
        "SELECT run_epoch, last_live_step, is_newest FROM run_epochs ORDER BY 1", ["run_epochs"]
    )
    assert rows.to_pylist() == [
        {"run_epoch": 1, "last_live_step": 5, "is_newest": False},
        {"run_epoch": 2, "last_live_step": 20, "is_newest": False},
        {"run_epoch": 3, "last_live_step": None, "is_newest": True},
    ]


def test_imports_named_as_source_belong_to_the_trainer(tape: Any) -> None:
    tape.add("run_started", purpose="train")
    tape.add("run_started", run_id="import-1", purpose="import")
    tape.rollout("own")
    tape.add("rollout_started", run_id="import-1", trajectory_id="i", attempt=0, event_index=0)
    form(tape, "b1", [("own", 0, False), ("i", 0, False)], source_run_ids=[["import-1"]])
    complete(tape, "b1")
    rows = {row["trainer_id"]: row for row in conservation(tape)}
    assert counts(rows["trainer"]) == {"dispatched": 1, "undispatched": 1, "trained": 2}
    assert counts(rows[None]) == {"undispatched": 1, "in_flight": 1}


def test_evaluation_needs_an_end(tape: Any) -> None:
    tape.rollout("done", purpose="evaluate")
    tape.rollout("open", purpose="evaluate", ended=False)
    assert counts(conservation(tape)[0]) == {"dispatched": 2, "evaluated": 1, "in_flight": 1}


def test_as_of_a_cursor(tape: Any) -> None:
    tape.rollout("a")
    middle = Cursor.parse("rollout/0:5,training/0:0")
    tape.rollout("b")
    form(tape, "b1", [("a", 0, False), ("b", 0, False)])
    complete(tape, "b1")
    assert counts(conservation(tape, middle)[0]) == {"dispatched": 1, "in_flight": 1}
    assert counts(conservation(tape)[0]) == {"dispatched": 2, "trained": 2}
    assert conservation(tape, Cursor()) == []


def test_a_group_that_was_given_up_is_one_fate_of_each_of_its_attempts(tape: Any) -> None:
    """The trainer names what it saw; an attempt that a worker made again at the same moment is named by the next."""
    tape.rollout("a", step=None)
    tape.rollout("b", step=None, ended=False)
    tape.rollout("b", attempt=1, step=None)
    given_up = [("a", 0, "group_incomplete"), ("b", 0, "group_incomplete")]
    form(tape, "b1", [], given_up)
    complete(tape, "b1")
    assert counts(conservation(tape)[0]) == {"dispatched": 3, "dropped": 1, "superseded": 1, "in_flight": 1}
    form(tape, "b2", [], [("b", 1, "group_incomplete")], step=2)
    complete(tape, "b2", step=2)
    assert counts(conservation(tape)[0]) == {"dispatched": 3, "dropped": 2, "superseded": 1}


def test_a_dispatch_for_no_step_outlives_a_resumption(tape: Any) -> None:
    """Workers that run ahead are not bound to a step, so what they handed out counts in every run epoch."""
    tape.add("run_started", purpose="train")
    tape.rollout("ahead", step=None)
    tape.add("run_resumed", purpose="train", run_epoch=2, continues_from_step=0, reason="restart")
    form(tape, "b1", [("ahead", 0, False)], run_epoch=2)
    complete(tape, "b1", run_epoch=2)
    assert counts(conservation(tape)[0]) == {"dispatched": 1, "trained": 1}
