"""Records that are decoded together come out as they would one by one, whatever lies among them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.ingest import staging
from rolltape.ingest.archive import Archive
from rolltape.ingest.memory import MemoryTarget
from rolltape.ingest.stamping import Place, by_partition
from rolltape.ingest.together import decode_together
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Partition

TIME_US = 1_700_000_000_000_000
NUM_RECORDS = 120


class Lanes:
    """Records of three producers, their lanes numbered without gaps."""

    def __init__(self, rng: random.Random) -> None:
        """Nothing is recorded yet."""
        self._rng = rng
        self._next: dict[tuple[str, int], int] = {}
        self._events = 0

    def record(self, **columns: Any) -> Record:
        """The next record of some lane: one to four rows of some kind, with some columns or others."""
        rng = self._rng
        num_rows = rng.randint(1, 4)
        producer, partition = rng.choice("pqr"), rng.randrange(3)
        first = self._next.get((producer, partition), 0)
        self._next[producer, partition] = first + num_rows
        self._events += num_rows
        flat: dict[str, Any] = {
            "event_id": [f"e{self._events - row}" for row in range(num_rows)],
            "run_id": "run",
            "run_epoch": 1,
            "producer_id": producer,
            "producer_epoch": 1,
            "lane_seq": list(range(first, first + num_rows)),
            "recorded_at": pa.scalar(TIME_US, pa.timestamp("us", tz="UTC")),
            "trajectory_id": f"t{self._events}",
            "attempt": 0,
            "event_index": list(range(num_rows)),
            **({"group_id": "g"} if rng.random() < 0.5 else {}),
            **columns,
        }
        kind = rng.choice(("action_sampled", "rollout_ended", "rollout_started"))
        own: dict[str, Any] = {"status": "completed", "last_event_index": list(range(num_rows))}
        if kind == "action_sampled":
            own = {"token_ids": [[1, 2]] * num_rows, "rollout_log_probs": [[-0.5, -1.0]] * num_rows}
        elif kind == "rollout_started":
            own = {"prompt_token_ids": [[3]] * num_rows}
        return make_record(build_batch(kind, {**flat, **own}, num_rows).batch, partition=partition)


def damaged(lanes: Lanes, rng: random.Random) -> Record:
    """A record with something wrong."""
    match rng.randrange(4):
        case 0:
            return lanes.record(run_id=None)
        case 1:
            record = lanes.record()
            value = bytes(memoryview(record.value))[:-9]
            return Record(
                topic=record.topic, partition=record.partition, key=record.key, headers=record.headers, value=value
            )
        case 2:
            # A row that was sent before, with other content: its id is known.
            return lanes.record(event_id="e1")
        case _:
            return lanes.record(producer_epoch=2)


def taped(records: list[Record], *, together: int, numbered: bool, commit_every: int) -> dict[str, Any]:
    """What is committed of the records, and where the marks stand."""
    target = MemoryTarget()
    archive = Archive(target, archiver_id="sink")
    offsets: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_MAX_WAITING", together)
        for number, record in enumerate(records):
            offset = offsets[record.partition] = offsets.get(record.partition, -1) + 1
            if number % 31 == 30:
                place = Partition("rollout", record.partition)
                offset = offsets[record.partition] = offset + 1
                if numbered:
                    archive.offer_foreign(place, offset - 1, detail="?", payload=b"?", time_us=TIME_US)
            archive.offer(record, offset=offset if numbered else None, time_us=TIME_US)
            if number % commit_every == commit_every - 1:
                archive.commit()
    archive.commit()
    rows: dict[str, list[Any]] = {}
    for commit in target.commits:
        for part in commit:
            rows.setdefault(f"{part.kind} of {part.partition}", []).extend(part.table.to_pylist())
    return {**rows, "transactions": dict(target.transactions())}


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("faults", [0, 1, 15])
def test_records_together_come_out_as_one_by_one(seed: int, faults: int, numbered: bool) -> None:
    rng = random.Random(seed)
    lanes = Lanes(rng)
    at_fault = set(rng.sample(range(NUM_RECORDS), faults))
    records = [damaged(lanes, rng) if number in at_fault else lanes.record() for number in range(NUM_RECORDS)]
    expected = taped(records, together=1, numbered=numbered, commit_every=40)
    assert len(expected["transactions"]) > 3
    for together in (5, 64, 10_000):
        found = taped(records, together=together, numbered=numbered, commit_every=40)
        assert found == expected, f"seed {seed}, {together} together"


def test_a_sound_batch_is_decoded_once_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(random.Random(1))
    records = [lanes.record() for _ in range(60)]
    calls: list[int] = []

    def counted(waiting: Any, limits: Any) -> Any:
        calls.append(len(waiting))
        return decode_together(waiting, limits)

    monkeypatch.setattr(staging, "decode_together", counted)
    monkeypatch.setattr(staging.Staging, "_admit_alone", lambda *_: pytest.fail("one was looked at alone"))
    archive = Archive(MemoryTarget(), archiver_id="sink")
    for number, record in enumerate(records):
        archive.offer(record, offset=number)
    assert archive.staged_bytes > 0
    archive.commit()
    assert calls == [60]
    assert archive.staged_bytes == 0


def test_rows_of_each_partition_lie_together() -> None:
    rng = np.random.default_rng(3)
    places = [Place(int(rng.integers(1, 4)), Partition("rollout", int(rng.integers(0, 3))), at) for at in range(40)]
    rows = [(place.partition.partition, place.offset, row) for place in places for row in range(place.num_rows)]
    whole = pa.RecordBatch.from_pylist([{"p": p, "o": offset, "row": row} for p, offset, row in rows])
    cut = sum(place.num_rows for place in places[:17])
    batches, order = by_partition([whole.slice(0, cut), whole.slice(cut)], places)
    found = [tuple(row.values()) for row in pa.Table.from_batches(batches).to_pylist()]
    assert found == sorted(rows)
    assert [place.offset for place in order] == [place.offset for place in sorted(places, key=lambda p: p[1:])]
    assert sum(batch.num_rows for batch in batches) == len(rows)
