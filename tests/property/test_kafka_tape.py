"""The tape of a Kafka log is a function of the log's content: not of who archives it, in how many commits, after how
many crashes, and with how much memory for records that wait. What a reader delivers is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.ingest.archive import Archive
from rolltape.ingest.kafka.client import Message, TopicInfo
from rolltape.ingest.kafka.positions import LogIdentity
from rolltape.ingest.kafka.seam import Seam
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.lanes import Lane, log_app_id
from rolltape.ingest.losses import loss_letter
from rolltape.ingest.memory import MemoryTarget
from rolltape.ingest.refused import dead_letter_batch
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Partition

PLACE = Partition("rollout", 0)
PRODUCERS = ("p", "q", "r")
NUM_RECORDS = 6
ROWS = 2
TIME_US = 1_700_000_000_000_000
UNBOUNDED = 1 << 40


def rows_of(producer_id: str, number: int) -> Record:
    first = number * ROWS
    columns: dict[str, Any] = {
        "event_id": [f"{producer_id}-{first + row}" for row in range(ROWS)],
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": producer_id,
        "producer_epoch": 1,
        "lane_seq": [first + row for row in range(ROWS)],
        "recorded_at": pa.scalar(TIME_US, pa.timestamp("us", tz="UTC")),
        "trajectory_id": f"t-{producer_id}",
        "attempt": 0,
        "event_index": [first + row for row in range(ROWS)],
    }
    return make_record(build_batch("rollout_started", columns, ROWS).batch)


def poisoned(record: Record) -> Record:
    return Record(topic=record.topic, partition=0, key=record.key, headers=record.headers, value=b"these are no events")


RECORDS: dict[str, list[Record]] = {
    producer_id: [rows_of(producer_id, number) for number in range(NUM_RECORDS)] for producer_id in PRODUCERS
}
# One record of one lane cannot be read, wherever it comes.
RECORDS["r"][2] = poisoned(RECORDS["r"][2])


def acceptance(number: int, producer_id: str, first: int, last: int) -> Record:
    lane = Lane(producer_id, 1, *PLACE)
    letter = loss_letter(lane, first, last, time_us=TIME_US)
    stamps = {"producer_id": f"operator-{number}", "producer_epoch": 1, "lane_seq": 0}
    record = make_record(dead_letter_batch([{**letter, **stamps, "event_id": f"accepts-{number}"}]))
    return Record(topic="rollout", partition=0, key="unknown", headers=record.headers, value=record.value)


@dataclass(frozen=True)
class Item:
    """One message of the log; None stands for a message of somebody else."""

    offset: int
    record: Record | None


SENT = st.tuples(st.sampled_from(PRODUCERS), st.integers(0, NUM_RECORDS - 1))
LOSS = st.tuples(st.sampled_from(PRODUCERS), st.integers(0, NUM_RECORDS - 1), st.integers(1, 2))
ODD = st.one_of(SENT, SENT, LOSS, st.just("foreign"))
EVERYTHING = [(producer_id, number) for producer_id in PRODUCERS for number in range(NUM_RECORDS)]


@st.composite
def logs(draw: st.DrawFn) -> list[Item]:
    """Any order, repeats and omissions; losses that fit or not; foreign messages; offsets without a message."""
    messages: list[Any] = list(draw(st.permutations(EVERYTHING)))[draw(st.integers(0, 3)) :]
    for place, odd in draw(st.lists(st.tuples(st.integers(0, len(messages)), ODD), max_size=8)):
        messages.insert(place, odd)
    items = []
    offset = draw(st.integers(0, 3))
    for number, message in enumerate(messages):
        items.append(Item(offset, _record_of(number, message)))
        offset += draw(st.sampled_from((1, 1, 1, 2, 5)))
    return items


def _record_of(number: int, message: Any) -> Record | None:
    if message == "foreign":
        return None
    producer_id, which, *length = message
    if not length:
        known: Record = RECORDS[producer_id][which]
        return known
    return acceptance(number, producer_id, which * ROWS, (which + length[0]) * ROWS - 1)


def offer(archive: Archive, item: Item) -> None:
    if item.record is None:
        archive.offer_foreign(PLACE, item.offset, detail="no headers", payload=b"?", time_us=TIME_US)
    else:
        archive.offer(item.record, offset=item.offset, time_us=TIME_US)


def read(archive: Archive, log: Sequence[Item], start: int) -> list[int]:
    """Offer everything from ``start`` on, and again what is asked for; returns the offsets in the order offered."""
    offered = []
    position = start
    while (item := next((item for item in log if item.offset >= position), None)) is not None:
        offer(archive, item)
        offered.append(item.offset)
        again = archive.reread_from(PLACE)
        position = item.offset + 1 if again is None else again
    return offered


def content(target: MemoryTarget, since: int = 0, commits: slice = slice(None)) -> list[tuple[Any, ...]]:
    """Every row: where it lies, what it is, and of a dead letter what it accounts for."""
    found = []
    for commit in target.commits[commits]:
        for part in commit:
            for row in part.table.to_pylist():
                letter = row.get("dead_letter") or {}
                found.append(
                    (
                        row["log_offset"],
                        row["producer_id"],
                        row["lane_seq"],
                        row["event_id"],
                        row["recorded_at"],
                        letter.get("reason"),
                        letter.get("source_offset"),
                        letter.get("first_lane_seq"),
                        letter.get("last_lane_seq"),
                    )
                )
    return sorted(row for row in found if row[0] >= since)


def reference(log: Sequence[Item]) -> MemoryTarget:
    target = MemoryTarget()
    archive = Archive(target, archiver_id="sink", max_parked_bytes=UNBOUNDED)
    for item in log:
        offer(archive, item)
    archive.commit()
    return target


@dataclass
class History(MemoryTarget):
    """Remembers the transactions of each version."""

    versions: list[Mapping[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        MemoryTarget.__init__(self)

    def append(
        self, tables: Mapping[str, pa.Table], transactions: Mapping[str, int], expected: Mapping[str, int | None]
    ) -> int:
        version = super().append(tables, transactions, expected)
        self.versions.append(self.transactions())
        return version


def archive_with_crashes(log: Sequence[Item], steps: Sequence[str], max_parked_bytes: int) -> History:
    """Archive the log with a commit or a crash between its messages as ``steps`` says, then to its end."""
    target = History()
    archive = Archive(target, archiver_id="sink", max_parked_bytes=max_parked_bytes)
    position, step = 0, 0
    while (item := next((item for item in log if item.offset >= position), None)) is not None:
        offer(archive, item)
        again = archive.reread_from(PLACE)
        position = item.offset + 1 if again is None else again
        action = steps[step] if step < len(steps) else "go on"
        step += 1
        if action == "commit":
            archive.commit()
        elif action in ("crash", "crash after commit"):
            if action == "crash after commit":
                archive.commit()
            archive = Archive(target, archiver_id="sink", max_parked_bytes=max_parked_bytes)
            position = target.transactions().get(log_app_id(PLACE), -1) + 1
    archive.commit()
    return target


STEPS = st.lists(st.sampled_from(("go on", "go on", "commit", "crash", "crash after commit")), max_size=60)


@settings(max_examples=80, deadline=None)
@given(log=logs(), steps=STEPS, max_parked_bytes=st.sampled_from((0, 3_000, UNBOUNDED)))
def test_the_tape_is_a_function_of_the_log(log: list[Item], steps: list[str], max_parked_bytes: int) -> None:
    expected = reference(log)
    archived = archive_with_crashes(log, steps, max_parked_bytes)
    assert content(archived) == content(expected)
    lanes = {app: mark for app, mark in archived.transactions().items() if app.startswith("lane/")}
    assert lanes == {app: mark for app, mark in expected.transactions().items() if app.startswith("lane/")}
    assert archived.transactions().get(log_app_id(PLACE)) == expected.transactions().get(log_app_id(PLACE))


class Delivered(MemoryTarget):
    """What a reader's archive commits to: it starts from a snapshot's transactions and keeps what is delivered."""

    def __init__(self, transactions: Mapping[str, int]) -> None:
        super().__init__()
        self._transactions.update(transactions)


@settings(max_examples=60, deadline=None)
@given(
    log=logs(),
    steps=STEPS,
    max_parked_bytes=st.sampled_from((0, 3_000, UNBOUNDED)),
    version=st.integers(0, 60),
    cursor=st.integers(0, 60),
)
def test_a_reader_delivers_what_the_lake_holds(
    log: list[Item], steps: list[str], max_parked_bytes: int, version: int, cursor: int
) -> None:
    """From a snapshot of any version and from any cursor: the rows of the snapshot, then the log from its positions."""
    lake = archive_with_crashes(log, steps, UNBOUNDED)
    version = min(version, len(lake.versions))
    transactions = lake.versions[version - 1] if version else {}
    target = Delivered(transactions)
    archive = Archive(target, archiver_id="sink", max_parked_bytes=max_parked_bytes)
    read(archive, log, transactions.get(log_app_id(PLACE), -1) + 1)
    archive.commit()
    delivered = content(lake, cursor, slice(0, version)) + content(target, cursor)
    assert sorted(delivered) == content(lake, cursor)


IDENTITY = LogIdentity("kafka://broker:9092/runs", "cluster", {"rollout": TopicInfo("rollout", "topic", 1, 1, {})})


def message_of(item: Item) -> Message:
    key, value, headers = (b"key", b"?", []) if item.record is None else to_message(item.record)
    return Message(PLACE, item.offset, key, value, headers, 0)


@settings(max_examples=60, deadline=None)
@given(log=logs(), steps=STEPS, max_parked_bytes=st.sampled_from((0, 3_000, UNBOUNDED)))
def test_all_that_lies_before_a_position_of_the_lake_is_accounted_for(
    log: list[Item], steps: list[str], max_parked_bytes: int
) -> None:
    """In every version, so whoever goes on at it meets no stranger: poison, repeats, gaps and losses are none."""
    for transactions in archive_with_crashes(log, steps, max_parked_bytes).versions:
        seam = Seam(IDENTITY, transactions)
        for item in log:
            if item.offset <= transactions.get(log_app_id(PLACE), -1):
                assert seam.read_from(PLACE, 0, item.offset + 1) == item.offset
                assert seam.passed(PLACE, [message_of(item)]) == []


@settings(max_examples=20, deadline=None)
@given(log=logs(), max_parked_bytes=st.sampled_from((0, 3_000)))
def test_memory_for_waiting_records_is_bounded(log: list[Item], max_parked_bytes: int) -> None:
    archive = Archive(MemoryTarget(), archiver_id="sink", max_parked_bytes=max_parked_bytes)
    for item in log:
        offer(archive, item)
        assert archive.parked_bytes <= max_parked_bytes
