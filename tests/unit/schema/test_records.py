"""Records and their headers: what a log can say of a record without reading it."""

from __future__ import annotations

import pytest
from tests.arrow_bits import same_bits
from tests.schema_events import action_batch, batch_of, stamps

from rolltape.schema.codec import EventRange, Headers, decode, event_ranges, make_headers, make_record
from rolltape.schema.errors import CodecError, ValidationError


def test_a_record_accounts_for_itself() -> None:
    batch = action_batch(2, lane_seq=[4, 5], event_index=[1, 7])
    record = make_record(batch, partition=3)
    assert (record.topic, record.partition, record.key) == ("rollout", 3, "g")
    assert record.headers == Headers(
        kind="action_sampled",
        schema_version="1.1",
        codec="arrow-ipc-stream",
        num_rows=2,
        producer_id="p",
        producer_epoch=1,
        first_lane_seq=4,
        last_lane_seq=5,
        event_ranges=(EventRange("t0", 0, 1, 1), EventRange("t1", 0, 7, 7)),
    )
    assert record.num_bytes == len(record.value)
    assert same_bits(decode(record.value, kind=record.headers.kind), batch)


def test_a_batch_without_all_columns_is_conformed_first() -> None:
    batch = action_batch(2)
    short = batch.select([name for name in batch.schema.names if batch.column(name).null_count < 2])
    assert make_record(short).headers == make_record(batch).headers
    assert make_record(short).key == "g"


def test_headers_come_back_from_their_bytes() -> None:
    headers = make_headers(action_batch(2, trajectory_id=["a/b:c", "ü"]))
    pairs = headers.to_pairs()
    assert all(isinstance(name, str) and isinstance(value, bytes) for name, value in pairs)
    assert Headers.from_pairs([*pairs, ("traceparent", b"other")]) == headers


@pytest.mark.parametrize("name", ["rt-kind", "rt-rows", "rt-last-seq"])
def test_a_missing_header_is_named(name: str) -> None:
    pairs = [pair for pair in make_headers(action_batch(1)).to_pairs() if pair[0] != name]
    with pytest.raises(CodecError, match=name):
        Headers.from_pairs(pairs)


def test_unreadable_headers_are_refused() -> None:
    pairs = dict(make_headers(action_batch(1)).to_pairs())
    for name, value in (("rt-rows", b"many"), ("rt-kind", b"\xff"), ("rt-events", b"{"), ("rt-events", b"[[1]]")):
        with pytest.raises(CodecError, match="readable"):
            Headers.from_pairs({**pairs, name: value}.items())


def test_event_indexes_are_ranges_of_consecutive_numbers() -> None:
    batch = action_batch(5, trajectory_id=["a", "b", "a", "a", "a"], event_index=[2, 9, 1, 5, 3])
    assert event_ranges(batch) == (
        EventRange("a", 0, 1, 3),
        EventRange("a", 0, 5, 5),
        EventRange("b", 0, 9, 9),
    )


def test_only_the_rollout_plane_has_event_ranges() -> None:
    batch = batch_of("attempt_abandoned", {**stamps(1), "trajectory_id": "t", "attempt": 0, "reason": "worker_lost"})
    record = make_record(batch)
    assert record.headers.event_ranges == ()
    assert "rt-events" not in dict(record.headers.to_pairs())
    assert record.key == "t"


def test_control_planes_are_keyed_by_run() -> None:
    batch = batch_of("engine_joined", {**stamps(1), "group_id": "g", "engine_id": "e"})
    assert (make_record(batch).topic, make_record(batch).key) == ("control", "run")


@pytest.mark.parametrize(
    "stamp",
    [
        {"lane_seq": [1, 3]},
        {"lane_seq": [2, 1]},
        {"lane_seq": [None, 1]},
        {"producer_id": ["p", "q"]},
        {"producer_epoch": [None, None]},
    ],
)
def test_stamps_must_be_those_of_one_lane(stamp: dict[str, list[object]]) -> None:
    with pytest.raises(ValidationError, match=r"stamp the batch first|consecutive"):
        make_record(action_batch(2, **stamp))


def test_a_record_without_any_id_has_no_key() -> None:
    batch = action_batch(1, group_id=None, trajectory_id=[None], run_id=None)
    with pytest.raises(ValidationError, match="group_id, trajectory_id, run_id"):
        make_record(batch)
