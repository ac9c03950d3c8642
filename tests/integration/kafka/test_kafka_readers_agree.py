"""Whoever reads, from wherever, with a lake or without, before, while and after it is archived: the same events.

Messages come twice, in another order, poisoned, of strangers, or not at all until an operator accepts that; events come
again on another lane, as they were or with other content. Sinks stop and start anywhere between. The seed is in the
test's name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from tests.contract.harnesses import assert_same_events, in_order, make_topics
from tests.servers.noida_db import NoidaDb

from rolltape.ingest.kafka.client import BrokerProducer
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.lanes import Lane
from rolltape.ingest.log import LogReader
from rolltape.ingest.losses import loss_letter
from rolltape.ingest.refused import dead_letter_batch
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.kinds import KINDS
from rolltape.store.lake import Lake

PLACES = (Partition("rollout", 0), Partition("rollout", 1))
RECORDS_PER_LANE = 12
ENVELOPE = ["log_topic", "log_partition", "log_offset", "producer_id", "producer_epoch", "lane_seq", "event_id"]


class Sent(NamedTuple):
    """One message: a record of ours, or None for one of somebody else."""

    place: Partition
    record: Record | None


def lane_of(rng: Random, producer_id: str, place: Partition) -> list[Record]:
    """Records of one to three rows; some cannot be read."""
    records, first = [], 0
    for number in range(RECORDS_PER_LANE):
        num_rows = rng.randint(1, 3)
        # Some of r's events are p's of the same index: a repetition where the rest is equal, else a conflict.
        owner, subject = producer_id, producer_id
        if producer_id == "r" and rng.random() < 0.5:
            owner, subject = "p", rng.choice("pr")
        columns: dict[str, Any] = {
            "event_id": [f"{owner}-{place.partition}-{first + row}" for row in range(num_rows)],
            "run_id": "run",
            "run_epoch": 1,
            "producer_id": producer_id,
            "producer_epoch": 1,
            "lane_seq": list(range(first, first + num_rows)),
            "recorded_at": pa.scalar(1_700_000_000_000_000, pa.timestamp("us", tz="UTC")),
            "trajectory_id": f"t-{subject}",
            "attempt": 0,
            "event_index": list(range(first, first + num_rows)),
        }
        kind = "rollout_started" if number % 3 else "rollout_resumed"
        record = make_record(build_batch(kind, columns, num_rows).batch, partition=place.partition)
        records.append(replace(record, value=b"no events") if rng.random() < 0.1 else record)
        first += num_rows
    return records


def acceptance(record: Record, number: int) -> Record:
    """An operator accepts that a record is lost."""
    headers = record.headers
    lane = Lane(headers.producer_id, headers.producer_epoch, record.topic, record.partition)
    letter = loss_letter(lane, headers.first_lane_seq, headers.last_lane_seq, time_us=1_700_000_000_000_000)
    stamps = {"producer_id": f"operator-{number}", "producer_epoch": 1, "lane_seq": 0, "event_id": f"accepts-{number}"}
    sent = make_record(dead_letter_batch([{**letter, **stamps}]), partition=record.partition)
    return replace(sent, topic=record.topic)


def messages_of(rng: Random) -> list[Sent]:
    """All lanes, mixed as bad networks would; every gap is closed in the end."""
    lanes = [(place, lane_of(rng, producer_id, place)) for producer_id in ("p", "q", "r") for place in PLACES]
    weighted = []
    for number, (place, records) in enumerate(lanes):
        lost = rng.randrange(RECORDS_PER_LANE - 1) if rng.random() < 0.5 else None
        for position, record in enumerate(records):
            at = position + rng.random() * 4
            if position == lost:
                weighted.append((RECORDS_PER_LANE + 5.0, Sent(place, acceptance(record, number))))
                continue
            weighted.append((at, Sent(place, record)))
            if rng.random() < 0.3:
                weighted.append((at + rng.random() * 6, Sent(place, record)))
        if rng.random() < 0.5:
            weighted.append((rng.random() * RECORDS_PER_LANE, Sent(place, None)))
    return [sent for _, sent in sorted(weighted, key=lambda item: item[0])]


@dataclass
class Live:
    """A reader that is there from a moment on, and what it got."""

    reader: LogReader
    start: Cursor
    tables: dict[str, list[pa.Table]] = field(default_factory=dict)

    def poll(self) -> None:
        for delivery in self.reader.poll(0.02):
            self.tables.setdefault(delivery.kind, []).append(delivery.table)

    def read_to(self, end: Cursor) -> Mapping[str, pa.RecordBatch]:
        for _ in range(500):
            if all(self.reader.cursor[place] >= end[place] for place in end):
                break
            self.poll()
        else:
            pytest.fail(f"{self.reader.cursor} does not reach {end}")
        return {kind: in_order(pa.concat_tables(tables)) for kind, tables in self.tables.items()}


class Scene:
    """A log, its lake, sinks that come and go, and readers of all sorts."""

    def __init__(self, rng: Random, config: KafkaConfig, folder: Path, stack: contextlib.ExitStack) -> None:
        self.rng, self.config, self.stack = rng, config, stack
        self.lake = Lake.create(folder / "lake")
        self.logs = [
            stack.enter_context(KafkaLog(config, lake, spool=folder)) for lake in (Lake.open(self.lake.location), None)
        ]
        self.readers: list[Live] = []

    def read_from(self, start: Cursor) -> None:
        for log in self.logs:
            reader = self.stack.enter_context(contextlib.closing(log.reader(start)))
            self.readers.append(Live(reader, start))

    def archive(self) -> None:
        """A sink that stops in the middle of things, or comes to the present end."""
        options = SinkOptions(linger_s=0.001, maintenance=False, max_parked_bytes=self.rng.choice([1, 1 << 20]))
        with Sink(self.config, self.lake, options=options, alone=True) as sink:
            if self.rng.random() < 0.5:
                sink.drain(30)
            else:
                for _ in range(self.rng.randint(1, 5)):
                    sink.run_once(0.02)


def send(raw: BrokerProducer, sent: Sent) -> None:
    if sent.record is None:
        raw.send(sent.place, b"stranger", b"hello", [])
    else:
        raw.send(sent.place, *to_message(sent.record))
    raw.flush(10)


def since(start: Cursor, archived: Mapping[str, pa.Table]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """What lies at or behind a cursor."""
    for kind, table in archived.items():
        kept = [
            row.as_py() >= start[Partition(topic.as_py(), number.as_py())]
            for topic, number, row in zip(table["log_topic"], table["log_partition"], table["log_offset"], strict=True)
        ]
        rows = table.filter(pa.array(kept, pa.bool_()))
        if rows.num_rows:
            yield kind, in_order(rows)


def lanes_in(events: pa.RecordBatch) -> list[list[int]]:
    """The numbers of each lane, in the order of the log."""
    lanes: dict[tuple[str, int], list[int]] = {}
    for row in events.to_pylist():
        lanes.setdefault((row["producer_id"], row["log_partition"]), []).append(row["lane_seq"])
    return list(lanes.values())


@pytest.mark.parametrize("seed", range(6))
def test_all_readers_agree_with_the_lake(noida_broker: NoidaDb, topic_prefix: str, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    config = KafkaConfig.from_url(f"kafka://{noida_broker.bootstrap}/{topic_prefix}", {})
    client = make_topics(config, {"rollout": len(PLACES)})
    messages = messages_of(rng)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(contextlib.closing(client.producer()))
        scene = Scene(rng, config, tmp_path, stack)
        scene.read_from(Cursor())
        for number, sent in enumerate(messages):
            send(raw, sent)
            if rng.random() < 0.06:
                scene.archive()
            if rng.random() < 0.04:
                scene.read_from(Cursor({place: rng.randint(0, number // 2) for place in PLACES}))
            if rng.random() < 0.2:
                rng.choice(scene.readers).poll()
        with Sink(config, scene.lake, options=SinkOptions(maintenance=False), alone=True) as sink:
            sink.drain(30)
        scene.read_from(Cursor())
        end = scene.logs[0].end()
        archived = {kind: table for kind in KINDS if (table := scene.lake.read(kind)).num_rows}
        total = sum(table.num_rows for table in archived.values())
        for live in scene.readers:
            assert_same_events(live.read_to(end), dict(since(live.start, archived)))
    distinct = {event_id for table in archived.values() for event_id in table["event_id"].to_pylist()}
    assert len(distinct) == total
    events = in_order(pa.concat_tables([table.select(ENVELOPE) for table in archived.values()]))
    for lane_seqs in lanes_in(events):
        assert lane_seqs == sorted(lane_seqs)
