"""The live tail: every row once, in offset order, whatever maintenance does meanwhile."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import VacuumedError
from rolltape.store import Delivery, Lake, Tail
from rolltape.store import tail as tail_module
from rolltape.store.maintenance import checkpoint, clean_logs, compact, vacuum


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def drain(tail: Tail, timeout_s: float = 0.0) -> list[Delivery]:
    found: list[Delivery] = []
    while deliveries := tail.poll(timeout_s):
        found += deliveries
    return found


def rows_of(deliveries: list[Delivery], kind: str) -> pa.Table:
    return pa.concat_tables([delivery.table for delivery in deliveries if delivery.kind == kind])


def test_follows_commits_as_they_come(lake: Lake, feed: Any) -> None:
    tail = Tail(lake)
    assert tail.poll() == []
    for number in range(3):
        tables, transactions = feed.commit()
        lake.append(tables, transactions)
        deliveries = tail.poll()
        assert [(d.kind, d.first_offset, d.last_offset) for d in deliveries] == [
            ("action_sampled", 2 * number, 2 * number),
            ("reward_assigned", 2 * number + 1, 2 * number + 1),
        ]
        assert deliveries[0].table.equals(tables["action_sampled"])
        assert deliveries[0].lake_version == lake.snapshot().version == tail.version
        assert tail.cursor == Cursor.parse(f"rollout/0:{2 * number + 2}")
        assert tail.lane_marks == {"lane/p/1/rollout/0": 2 * number + 1}


def test_starts_from_a_cursor(lake: Lake, feed: Any) -> None:
    for _ in range(4):
        lake.append(*feed.commit())
    tail = Tail(lake, Cursor.parse("rollout/0:5"))
    assert tail.lane_marks == {"lane/p/1/rollout/0": 7}
    found = [(d.kind, d.first_offset, d.last_offset) for d in drain(tail)]
    assert found == [("reward_assigned", 5, 7), ("action_sampled", 6, 6)]


def test_kinds_and_topics_are_chosen(lake: Lake, feed: Any, tape: Any) -> None:
    lake.append(*feed.commit())
    tape.add("alarm_raised", alarm="entropy")
    lake.append(tape.tables(), {"log/control/0": 0})
    assert {d.kind for d in drain(Tail(lake, kinds=["reward_assigned"]))} == {"reward_assigned"}
    control = Tail(lake, topics=["control"])
    assert {d.kind for d in drain(control)} == {"alarm_raised"}
    lake.append(*feed.commit())
    assert control.poll() == []
    assert control.cursor == Cursor.parse("control/0:1,rollout/0:4")


def test_compaction_is_invisible(lake: Lake, feed: Any) -> None:
    tail = Tail(lake)
    for _ in range(3):
        lake.append(*feed.commit())
    first = drain(tail)
    compact(lake)
    assert drain(tail) == []
    lake.append(*feed.commit())
    every = first + drain(tail)
    assert rows_of(every, "action_sampled").equals(lake.read("action_sampled"))


def test_goes_on_where_the_log_was_cleaned(lake: Lake, feed: Any) -> None:
    tail = Tail(lake)
    lake.append(*feed.commit())
    first = drain(tail)
    for _ in range(3):
        lake.append(*feed.commit())
    compact(lake)
    checkpoint(lake)
    assert clean_logs(lake, safe_age_s=0) > 4
    lake.append(*feed.commit())
    # Whether the log was cleaned past it, a tail asks every now and then.
    second = drain(tail, 0.5)
    for kind in ("action_sampled", "reward_assigned"):
        assert rows_of(first + second, kind)["event_id"].to_pylist() == lake.read(kind)["event_id"].to_pylist()
    assert tail.lane_marks == {"lane/p/1/rollout/0": 9}


def test_goes_on_where_a_vacuum_took_the_files(lake: Lake, feed: Any) -> None:
    tail = Tail(lake)
    for _ in range(3):
        lake.append(*feed.commit())
    compact(lake)
    assert vacuum(lake, safe_age_s=-1)
    found = drain(tail)
    for kind in ("action_sampled", "reward_assigned"):
        assert rows_of(found, kind)["event_id"].to_pylist() == lake.read(kind)["event_id"].to_pylist()


def test_file_that_is_lost_is_an_error(lake: Lake, feed: Any) -> None:
    tail = Tail(lake)
    for file in lake.append(*feed.commit()).files:
        lake.table.child(file.path).delete()
    with pytest.raises(VacuumedError, match="is gone"):
        tail.poll()


def test_catches_up_in_portions_without_loss(lake: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_CATCH_UP_ROWS", 8)
    for _ in range(9):
        lake.append(*feed.commit())
    compact(lake, kinds=["action_sampled"])
    for _ in range(2):
        lake.append(*feed.commit())
    tail = Tail(lake, Cursor.parse("rollout/0:3"))
    portions = []
    while deliveries := tail.poll():
        portions.append(deliveries)
    assert len(portions) > 2
    for kind in ("action_sampled", "reward_assigned"):
        expected = lake.read(kind, min_offset=3)["event_id"].to_pylist()
        assert rows_of([d for portion in portions for d in portion], kind)["event_id"].to_pylist() == expected
    ends = [max(d.last_offset for d in portion) for portion in portions]
    starts = [min(d.first_offset for d in portion) for portion in portions]
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))


def test_commit_with_two_partitions_is_split(lake: Lake, tape: Any) -> None:
    tail = Tail(lake)
    tape.add("dead_letter", log_topic="rollout", log_offset=3, reason="unknown_kind")
    tape.add("dead_letter", log_topic="control", log_offset=0, reason="unknown_kind")
    lake.append(tape.tables(), {"log/rollout/0": 3, "log/control/0": 0})
    assert [(str(d.partition), d.first_offset) for d in tail.poll()] == [("control/0", 0), ("rollout/0", 3)]


def test_poll_waits_until_there_is_something(lake: Lake, feed: Any) -> None:
    tail = Tail(lake)
    tables, transactions = feed.commit()
    writer = Lake.open(lake.location)
    thread = threading.Timer(0.05, writer.append, (tables, transactions))
    thread.start()
    began = time.monotonic()
    assert len(tail.poll(timeout_s=20)) == 2
    assert time.monotonic() - began < 10
    thread.join()
    assert tail.poll(timeout_s=0.01) == []
