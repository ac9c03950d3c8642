"""Conservation over random histories: every fate is counted as it happened, and every double fate shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape.store.sources import TableSource
from rolltape.store.workspace import Workspace

FATES = ("trained", "dropped", "in_flight", "evaluated", "retried", "cancelled", "imported", "off_line")
ERRORS = ("trained_twice", "trained_and_dropped", "old_attempt_trained", "ghost", "off_line_trained")
# What each history adds to the counts.
EXPECTED = {
    "trained": {"dispatched": 1, "trained": 1},
    "dropped": {"dispatched": 1, "dropped": 1},
    "in_flight": {"dispatched": 1, "in_flight": 1},
    "evaluated": {"dispatched": 1, "evaluated": 1},
    "retried": {"dispatched": 2, "superseded": 1, "trained": 1},
    "cancelled": {"dispatched": 1, "dropped": 1},
    "imported": {"undispatched": 1, "in_flight": 1},
    "off_line": {"off_line": 1},
    "trained_twice": {"dispatched": 1, "trained": 2},
    "trained_and_dropped": {"dispatched": 1, "trained": 1, "dropped": 1},
    "old_attempt_trained": {"dispatched": 2, "superseded": 1, "trained": 2},
    "ghost": {"trained": 1},
    "off_line_trained": {"off_line": 1, "trained": 1},
}


def play(tape: Any, name: str, fate: str, batches: dict[str, tuple[list[Any], list[Any]]]) -> None:
    """Record one rollout that meets ``fate``; batches name → (members, dropped)."""
    member = {"trajectory_id": name, "attempt": 0}
    off_line = fate.startswith("off_line")
    if fate != "ghost":
        tape.rollout(
            name,
            purpose="evaluate" if fate == "evaluated" else "train",
            dispatched=fate != "imported",
            ended=fate not in ("retried", "cancelled"),
            step=9 if off_line else 1,
        )
    if fate in ("retried", "old_attempt_trained"):
        tape.add("attempt_abandoned", reason="worker_lost", **member)
        tape.rollout(name, attempt=1)
        batches["one"][0].append({**member, "attempt": 1})
    if fate == "cancelled":
        tape.add("attempt_abandoned", reason="cancelled", **member)
    if fate.startswith("trained") or fate in ("old_attempt_trained", "ghost", "off_line_trained"):
        batches["one"][0].append(member)
    if fate == "trained_twice":
        batches["two"][0].append(member)
    if fate in ("dropped", "trained_and_dropped"):
        batches["one"][1].append({**member, "reason": "stale"})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fates=st.lists(st.sampled_from(FATES), max_size=6),
    errors=st.lists(st.sampled_from(ERRORS), max_size=2),
    order=st.randoms(use_true_random=False),
)
def test_counts_and_balance(tape: Any, fates: list[str], errors: list[str], order: Any) -> None:
    new = type(tape)()
    new.add("run_started", purpose="train")
    new.add("run_resumed", run_epoch=2, purpose="train", continues_from_step=2)
    histories = [*fates, *errors]
    order.shuffle(histories)
    batches: dict[str, tuple[list[Any], list[Any]]] = {"one": ([], []), "two": ([], []), "never": ([], [])}
    for number, fate in enumerate(histories):
        play(new, f"t{number}", fate, batches)
        batches["never"][0].append({"trajectory_id": f"t{number}", "attempt": 0})
    for step, (name, (members, dropped)) in enumerate(batches.items(), start=1):
        new.add(
            "batch_formed", batch_id=name, trainer_id="trainer", algorithm="grpo", step=step, members=[members],
            dropped=[dropped], run_epoch=2,
        )  # fmt: skip
        if name != "never":  # no step names the third batch: it counts for nothing
            new.add("train_step_completed", trainer_id="trainer", step=step, batch_id=name, skipped=False, run_epoch=2)
    expected: Counter[str] = Counter()
    for fate in histories:
        expected.update(EXPECTED[fate])
    rows = Workspace(TableSource(new.tables())).table("SELECT * FROM conservation", ["conservation"]).to_pylist()
    if all(fate == "off_line" for fate in histories):
        assert rows == []
        return
    (row,) = rows
    names = ("dispatched", "undispatched", "trained", "dropped", "evaluated", "superseded", "in_flight", "off_line")
    assert {name: row[name] for name in names} == {name: expected[name] for name in names}
    assert row["num_unbalanced"] == len(errors)
    assert row["balance"] == -len(errors)
