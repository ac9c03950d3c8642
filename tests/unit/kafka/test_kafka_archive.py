"""Gaps in a log that numbers its records itself: parked, admitted where the gap closes, within a bound of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rolltape.ingest.archive import Archive, Outcome
from rolltape.ingest.lanes import Lane, log_app_id
from rolltape.ingest.losses import loss_letter
from rolltape.ingest.memory import MemoryTarget
from rolltape.ingest.refused import dead_letter_batch
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Partition

PLACE = Partition("rollout", 0)
LANE = Lane("p", 1, *PLACE)


def record(number: int, producer_id: str = "p", **columns: Any) -> Record:
    """Record ``number`` of a lane, of one row."""
    flat: dict[str, Any] = {
        "event_id": f"{producer_id}-{number}",
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": producer_id,
        "producer_epoch": 1,
        "lane_seq": number,
        "recorded_at": pa.scalar(0, pa.timestamp("us", tz="UTC")),
        "trajectory_id": "t",
        "attempt": 0,
        "event_index": number,
        **columns,
    }
    return make_record(build_batch("rollout_started", flat, 1).batch)


def loss(first: int, last: int, lane: Lane = LANE) -> Record:
    """An operator's acceptance of a loss."""
    stamps = {"producer_id": f"operator-{first}-{last}", "producer_epoch": 1, "lane_seq": 0}
    made = make_record(dead_letter_batch([{**loss_letter(lane, first, last), **stamps}]))
    return Record(topic="rollout", partition=0, key="unknown", headers=made.headers, value=made.value)


def archive_to(target: MemoryTarget, max_parked_bytes: int = 1 << 20) -> Archive:
    return Archive(target, archiver_id="sink", max_parked_bytes=max_parked_bytes)


def offsets(target: MemoryTarget, kind: str = "rollout_started") -> dict[str, int]:
    """Where each event lies."""
    return {
        row["event_id"]: row["log_offset"]
        for commit in target.commits
        for part in commit
        if part.kind == kind
        for row in part.table.to_pylist()
    }


def letters(target: MemoryTarget) -> list[dict[str, Any]]:
    return [
        {**row, **row["dead_letter"]}
        for commit in target.commits
        for part in commit
        if part.kind == "dead_letter"
        for row in part.table.to_pylist()
    ]


def test_what_waited_is_placed_where_the_gap_closed() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    assert archive.offer(record(0), offset=0) is Outcome.ACCEPTED
    assert archive.offer(record(2), offset=1) is Outcome.PARKED
    assert archive.offer(record(0, "q"), offset=2) is Outcome.ACCEPTED
    archive.commit()
    assert target.transactions()[log_app_id(PLACE)] == 0
    assert archive.offer(record(1), offset=7) is Outcome.ACCEPTED
    archive.commit()
    assert offsets(target) == {"p-0": 0, "q-0": 2, "p-1": 7, "p-2": 7}
    assert target.transactions()[log_app_id(PLACE)] == 7


def test_nothing_is_committed_where_nothing_moved() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    archive.offer(record(1), offset=0)
    assert archive.commit() is None
    archive.offer(record(2), offset=1)
    assert archive.commit() is None
    assert target.transactions() == {}


def test_what_memory_had_no_room_for_is_read_again_and_placed_there_too() -> None:
    target = MemoryTarget()
    archive = archive_to(target, max_parked_bytes=0)
    for offset, number in ((0, 1), (1, 2), (2, 0)):
        archive.offer(record(number), offset=offset)
    assert archive.parked_bytes == 0
    assert archive.reread_from(PLACE) == 0
    archive.commit()
    assert target.transactions().get(log_app_id(PLACE)) is None
    for offset, number in ((0, 1), (1, 2)):
        assert archive.offer(record(number), offset=offset) is Outcome.ACCEPTED
        assert archive.reread_from(PLACE) == offset + 1
    assert archive.offer(record(0), offset=2) is Outcome.DUPLICATE
    assert archive.reread_from(PLACE) is None
    archive.commit()
    assert offsets(target) == {"p-0": 2, "p-1": 2, "p-2": 2}
    assert target.transactions()[log_app_id(PLACE)] == 2


@pytest.mark.parametrize("num_read_again", [0, 1])
def test_a_crash_while_it_is_read_again_changes_no_place(num_read_again: int) -> None:
    target = MemoryTarget()
    archive = archive_to(target, max_parked_bytes=0)
    log = [(0, record(1)), (1, record(2)), (2, record(0, "q")), (3, record(0)), (4, record(1, "q"))]
    for offset, item in log[:4]:
        archive.offer(item, offset=offset)
    for offset, item in log[:num_read_again]:
        archive.offer(item, offset=offset)
    archive.commit()
    restarted = archive_to(target, max_parked_bytes=0)
    start = target.transactions().get(log_app_id(PLACE), -1) + 1
    assert start == num_read_again
    for offset, item in log[start:]:
        restarted.offer(item, offset=offset)
    restarted.commit()
    assert offsets(target) == {"q-0": 2, "p-0": 3, "p-1": 3, "p-2": 3, "q-1": 4}


def test_a_second_gap_keeps_what_lies_behind_it_waiting() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    for offset, number in ((0, 1), (1, 3), (2, 0), (5, 2)):
        archive.offer(record(number), offset=offset)
    archive.commit()
    assert offsets(target) == {"p-0": 2, "p-1": 2, "p-2": 5, "p-3": 5}


def test_an_operators_event_closes_the_gap_where_it_lies() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    for offset, number in ((0, 0), (1, 3), (2, 4)):
        archive.offer(record(number), offset=offset)
    assert [(gap.first, gap.last) for gap in archive.gaps()] == [(1, 2)]
    archive.offer(loss(1, 2), offset=9)
    assert archive.gaps() == []
    archive.commit()
    assert offsets(target) == {"p-0": 0, "p-3": 9, "p-4": 9}
    (letter,) = letters(target)
    assert (letter["reason"], letter["log_offset"], letter["producer_id"]) == ("lane_gap_accepted", 9, "operator-1-2")
    assert archive.offer(record(1), offset=10) is Outcome.DUPLICATE


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 2), (1, 3), (1, 5)])
def test_an_acceptance_that_names_another_range_is_refused(first: int, last: int) -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    for offset, number in ((0, 0), (1, 3)):
        archive.offer(record(number), offset=offset)
    archive.offer(loss(first, last), offset=2)
    archive.commit()
    (letter,) = letters(target)
    assert letter["reason"] == "bad_value"
    assert f"expected the loss of lane_seq 1 to 2 to be accepted, got {first} to {last}" in letter["detail"]
    assert [(gap.first, gap.last) for gap in archive.gaps()] == [(1, 2)]


def test_an_acceptance_speaks_for_its_own_partition_alone() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    archive.offer(loss(0, 2, Lane("p", 1, "rollout", 1)), offset=0)
    archive.commit()
    (letter,) = letters(target)
    assert letter["reason"] == "bad_value"
    assert "expected another producer's lane on rollout/0" in letter["detail"]


def test_other_bytes_for_a_record_that_waits_are_a_conflict_and_it_is_told_once() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    other = record(2, prompt_token_ids=[[9]])
    for item, offset in ((record(2), 0), (other, 1), (record(0), 2)):
        archive.offer(item, offset=offset)
    archive.commit()
    # The position stays before what waits, so the same is read again after a crash.
    restarted = archive_to(target)
    for item, offset in ((record(2), 0), (other, 1), (record(0), 2), (record(1), 3)):
        restarted.offer(item, offset=offset)
    restarted.commit()
    assert offsets(target) == {"p-0": 2, "p-1": 3, "p-2": 3}
    (letter,) = letters(target)
    assert (letter["reason"], letter["payload"]) == ("conflict", bytes(memoryview(other.value)))


def test_a_conflict_whose_commit_failed_is_told_by_the_next() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    other = record(0, prompt_token_ids=[[9]])
    archive.offer(record(0), offset=0)
    archive.commit()
    archive.offer(other, offset=1)
    archive.reload()
    archive.offer(other, offset=1)
    archive.commit()
    assert [letter["reason"] for letter in letters(target)] == ["conflict"]


def test_a_message_of_somebody_else_is_kept_once() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    archive.offer(record(1), offset=0)
    assert archive.offer_foreign(PLACE, 3, detail="no headers", payload=b"{}", time_us=5) is Outcome.ACCEPTED
    archive.commit()
    restarted = archive_to(target)
    restarted.offer(record(1), offset=0)
    assert restarted.offer_foreign(PLACE, 3, detail="no headers", payload=b"{}", time_us=5) is Outcome.DUPLICATE
    assert restarted.offer_foreign(PLACE, 4, detail="no headers", payload=b"!", time_us=6) is Outcome.ACCEPTED
    restarted.commit()
    first, second = letters(target)
    assert (first["reason"], first["payload"], first["source_offset"]) == ("foreign_message", b"{}", 3)
    assert (first["producer_id"], first["lane_seq"], second["lane_seq"]) == ("sink", 0, 1)
    assert first["recorded_at"] != second["recorded_at"]


def test_a_log_without_a_lake_begins_where_its_retention_left_it() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    archive.begin_lanes_late(PLACE)
    assert archive.offer(record(7), offset=100) is Outcome.ACCEPTED
    assert archive.offer(record(9), offset=101) is Outcome.PARKED
    archive.commit()
    assert offsets(target) == {"p-7": 100}


def test_what_is_parked_holds_nothing_but_its_own_bytes() -> None:
    target = MemoryTarget()
    archive = archive_to(target)
    late = record(1)
    fetched = bytearray(memoryview(late.value))
    assert archive.offer(replace(late, value=pa.py_buffer(memoryview(fetched))), offset=0) is Outcome.PARKED
    # A buffer that somebody still looks at cannot be emptied.
    fetched.clear()
    archive.offer(record(0), offset=1)
    archive.commit()
    assert offsets(target) == {"p-0": 1, "p-1": 1}
