"""Whatever a network does to a lane's records, the archive has each event once and in order."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.ingest.archive import Archive, Outcome
from rolltape.ingest.lanes import Lane
from rolltape.ingest.memory import MemoryTarget
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record

NUM_EVENTS = 12
LANES = ("p", "q")


def batch_of(producer_id: str) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "event_id": [f"{producer_id}-{number}" for number in range(NUM_EVENTS)],
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": producer_id,
        "producer_epoch": 1,
        "lane_seq": list(range(NUM_EVENTS)),
        "recorded_at": pa.scalar(0, pa.timestamp("us", tz="UTC")),
        "trajectory_id": "t",
        "attempt": 0,
        "event_index": list(range(NUM_EVENTS)),
    }
    return build_batch("rollout_started", columns, NUM_EVENTS).batch


BATCHES = {producer_id: batch_of(producer_id) for producer_id in LANES}


def record(producer_id: str, first: int, num_rows: int) -> Record:
    return make_record(BATCHES[producer_id].slice(first, num_rows))


PIECES = st.tuples(st.sampled_from(LANES), st.integers(0, NUM_EVENTS - 1), st.integers(1, 4))
STEPS = st.lists(st.one_of(PIECES, st.just("commit"), st.just("crash")), max_size=40)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_each_event_is_archived_once_in_lane_order(steps: list[Any]) -> None:
    target = MemoryTarget()
    archive = Archive(target)
    for step in steps:
        if step == "commit":
            archive.commit()
        elif step == "crash":
            archive = Archive(target)
        else:
            producer_id, first, num_rows = step
            item = record(producer_id, first, min(num_rows, NUM_EVENTS - first))
            lane = Lane(producer_id, 1, "rollout", 0)
            mark = archive.mark(lane)
            outcome = archive.offer(item)
            assert (outcome is Outcome.PARKED) == (first > mark + 1)
            assert archive.mark(lane) == (mark if outcome is Outcome.PARKED else max(mark, item.headers.last_lane_seq))
    # The producers send everything again, as they do after a restart.
    for producer_id in LANES:
        assert archive.offer(record(producer_id, 0, NUM_EVENTS)) is not Outcome.PARKED
    archive.commit()
    rows = [row for commit in target.commits for part in commit for row in part.table.to_pylist()]
    for producer_id in LANES:
        own = [row for row in rows if row["producer_id"] == producer_id]
        assert [row["lane_seq"] for row in own] == list(range(NUM_EVENTS))
        assert [row["event_id"] for row in own] == [f"{producer_id}-{number}" for number in range(NUM_EVENTS)]
    for commit in target.commits:
        for part in commit:
            within = part.table["log_offset"].to_pylist()
            assert within == sorted(within)
    offsets = [row["log_offset"] for row in rows]
    assert set(offsets) == set(range(max(offsets) + 1))
