"""Case D17: whatever is delivered again after a rebalance or a crash, each event is one row.

Reported elsewhere: a consumer gets 1, 2, 3 and then 1, 2, 3 again; two members of a group get one message. Here the
same events lie in the log three times, partitions change their owner, and one owner dies between its Delta commit and
the commit of its group offsets.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.cases.conftest import Place

from rolltape.ingest import Recorder
from rolltape.ingest.kafka.client import BrokerConsumer, connect
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.wire import from_message, to_message
from rolltape.schema.codec import Record, decode, make_record
from rolltape.schema.cursor import Partition
from rolltape.store.lake import Lake

NUM_GROUPS, GROUP_SIZE = 24, 5
QUICK = SinkOptions(linger_s=0.01, max_linger_s=0.05, status_s=0.01, maintenance=False)
ROLLOUT = [Partition("rollout", 0), Partition("rollout", 1)]


class Killed(BaseException):
    """What kill −9 is to a process."""


def record_all(place: Place) -> set[str]:
    """Record groups of actions; the ids of their events."""
    ids: set[str] = set()
    with place.open() as log, Recorder(log, producer_id="p", run_id="r") as recorder:
        for group in range(NUM_GROUPS):
            columns = {
                "trajectory_id": [f"t{group}-{member}" for member in range(GROUP_SIZE)],
                "attempt": 0,
                "group_id": f"g{group}",
                "token_ids": [[group, member] for member in range(GROUP_SIZE)],
            }
            ids.update(recorder.record_batch("action_sampled", columns).event_ids)
            recorder.flush("logged")
    return ids


def records_of(place: Place) -> list[Record]:
    """All records of the rollout topic as they lie in the log."""
    consumer = connect(place.config).consumer()
    consumer.assign(ROLLOUT)
    for partition in ROLLOUT:
        consumer.seek(partition, 0)
    ends = consumer.end_offsets(ROLLOUT)
    found: list[Record] = []
    while any(consumer.position(partition) < ends[partition] for partition in ROLLOUT):
        for messages in consumer.poll(1.0).values():
            records = [from_message(message, None) for message in messages]
            found += [record for record in records if isinstance(record, Record)]
    consumer.close()
    return found


def send_again(place: Place, records: list[Record]) -> None:
    """Put records into the log once more, as a producer does that lost its acknowledgements."""
    producer = connect(place.config).producer(max_record_bytes=16 << 20)
    pending = [producer.send(Partition(record.topic, record.partition), *to_message(record)) for record in records]
    producer.flush(30)
    assert [one.error() for one in pending] == [None] * len(records)
    producer.close()


def open_sink(place: Place, *, alone: bool = False) -> Sink:
    return Sink(place.config, Lake.open(place.lake.location), options=QUICK, alone=alone)


def archive_some(sink: Sink, num_commits: int) -> None:
    """Rounds until so many commits were made."""
    while sink.num_commits < num_commits:
        sink.run_once(0.2)


def event_ids(lake: Lake) -> list[str]:
    ids: list[str] = lake.read("action_sampled")["event_id"].to_pylist()
    return sorted(ids)


def test_case_d17_events_that_lie_in_the_log_three_times_are_rows_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = record_all(place)
    again = records_of(place)
    send_again(place, again)

    # The first owner of both partitions archives, and dies before the group hears of it.
    first, commit = open_sink(place), BrokerConsumer.commit

    def dies(*_: Any) -> None:
        if event_ids(place.lake):
            raise Killed

    monkeypatch.setattr(BrokerConsumer, "commit", dies)
    with pytest.raises(Killed):
        archive_some(first, 1000)
    monkeypatch.setattr(BrokerConsumer, "commit", commit)
    assert event_ids(place.lake)
    first.close()
    send_again(place, again)

    # Two owners share what follows, and one of them leaves in the middle.
    stops = [threading.Event(), threading.Event()]
    sinks = [open_sink(place) for _ in stops]
    threads = [threading.Thread(target=sink.run, args=(stop,)) for sink, stop in zip(sinks, stops, strict=True)]
    for thread in threads:
        thread.start()
    stops[0].wait(1.0)
    stops[0].set()
    threads[0].join()
    sinks[0].close()
    with place.open() as log:
        log.wait_until_archived(60)
    stops[1].set()
    threads[1].join()
    sinks[1].close()

    assert event_ids(place.lake) == sorted(expected)
    assert place.lake.read("dead_letter").num_rows == 0


def test_case_d17_other_bytes_under_a_known_id_are_a_conflict_and_change_nothing(place: Place) -> None:
    expected = record_all(place)
    with open_sink(place, alone=True) as sink:
        sink.drain()
        before = place.lake.read("action_sampled")
        (first, *_) = records_of(place)
        batch = decode(first.value, kind="action_sampled")
        other = pa.array([7] * len(batch), pa.int32())
        changed = batch.set_column(batch.schema.names.index("turn_index"), batch.schema.field("turn_index"), other)
        send_again(place, [replace(make_record(changed, partition=first.partition), headers=first.headers)])
        sink.drain()
    after = place.lake.read("action_sampled")
    assert event_ids(place.lake) == sorted(expected)
    assert sorted(map(str, after.to_pylist())) == sorted(map(str, before.to_pylist()))
    reasons = [row["dead_letter"]["reason"] for row in place.lake.read("dead_letter").to_pylist()]
    assert reasons == ["conflict"]
