"""The record before a lake's position tells whether the log goes on from there, or lost its end and grew again."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from tests.schema_events import action, batch_of

from rolltape.ingest.kafka.client import Message, TopicInfo
from rolltape.ingest.kafka.positions import LogIdentity, base_app_id
from rolltape.ingest.kafka.seam import Seam
from rolltape.ingest.kafka.wire import DAMAGED, to_claim, to_message
from rolltape.ingest.lanes import Lane, foreign_app_id, log_app_id
from rolltape.schema.codec import make_record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import LakeAheadError, LogMismatchError

PLACE = Partition("rollout", 0)
IDENTITY = LogIdentity(
    "kafka://broker:9092/runs", "cluster-a", {"rollout": TopicInfo("rollout", "topic-1", 1, 1, MappingProxyType({}))}
)
START = 40
RECORD = make_record(batch_of("action_sampled", action(3)))
HEADERS = RECORD.headers
LANE = Lane(HEADERS.producer_id, HEADERS.producer_epoch, *PLACE)
LAST = HEADERS.last_lane_seq
MINE = to_message(RECORD)
FED = {log_app_id(PLACE): START - 1}
LATER = Message(PLACE, START, b"key", b"{}", [], 0)


def at(offset: int, outgoing: Any = MINE) -> Message:
    return Message(PLACE, offset, outgoing[0], outgoing[1], outgoing[2], 0)


def met(transactions: dict[str, int], *messages: Message, begin: int = 0) -> list[Message]:
    """What is to be archived of messages that a log gives from where it is read."""
    seam = Seam(IDENTITY, {**FED, **transactions})
    read_from = seam.read_from(PLACE, begin, START)
    return list(seam.passed(PLACE, [message for message in messages if message.offset >= read_from]))


@pytest.mark.parametrize("mark", [LAST, LAST + 100])
def test_a_record_that_is_archived_is_passed_and_what_comes_behind_it_is_not(mark: int) -> None:
    assert met({LANE.app_id: mark}, at(START - 1), LATER) == [LATER]


def test_only_the_first_message_of_a_partition_is_looked_at() -> None:
    seam = Seam(IDENTITY, {**FED, LANE.app_id: LAST})
    assert seam.read_from(PLACE, 0, START) == START - 1
    assert seam.passed(PLACE, []) == []
    assert seam.passed(PLACE, [at(START - 1)]) == []
    assert seam.passed(PLACE, [LATER]) == [LATER]


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param((MINE.key, b"no events", MINE.headers), id="poisoned"),
        pytest.param((MINE.key, None, MINE.headers), id="emptied"),
        pytest.param((MINE.key, MINE.value, [*MINE.headers, (DAMAGED, b"1")]), id="damaged"),
        pytest.param(to_claim(RECORD, HEADERS.to_pairs(), "0" * 64, 10), id="claimed and gone"),
    ],
)
def test_a_record_is_known_by_its_lane_whatever_became_of_its_payload(odd: Any) -> None:
    assert met({LANE.app_id: LAST}, at(START - 1, odd)) == []
    with pytest.raises(LakeAheadError):
        met({LANE.app_id: LAST - 1}, at(START - 1, odd))


def test_another_record_names_what_would_be_passed_and_the_way_out() -> None:
    first = HEADERS.first_lane_seq
    with pytest.raises(LakeAheadError) as caught:
        met({LANE.app_id: first}, at(START - 1), LATER, begin=7)
    text = str(caught.value)
    assert isinstance(caught.value, LogMismatchError)
    assert text.startswith("rollout/0: expected offset 39")
    assert f"lane_seq {first} to {LAST} of lane {LANE}, of which the lake has up to {first}" in text
    assert "Of offsets 7 to 39" in text
    assert "rolltape sink --log kafka://broker:9092/runs --lake LAKE --adopt rollout" in text


def test_a_record_of_a_lane_that_the_lake_never_saw_is_another_one() -> None:
    other = replace(RECORD, headers=replace(HEADERS, producer_epoch=HEADERS.producer_epoch + 1))
    with pytest.raises(LakeAheadError, match="of which the lake has nothing"):
        met({LANE.app_id: LAST}, at(START - 1, to_message(other)))


def test_a_message_of_somebody_else_is_known_by_its_dead_letter() -> None:
    stranger = at(START - 1, (b"key", b"{}", []))
    assert met({foreign_app_id(PLACE): START - 1}, stranger) == []
    with pytest.raises(LakeAheadError, match="no record of ours and no dead letter"):
        met({foreign_app_id(PLACE): START - 2}, stranger)
    with pytest.raises(LakeAheadError, match="no record of ours and no dead letter"):
        met({}, stranger)


def test_a_record_whose_headers_an_earlier_release_could_not_read_is_no_other_one() -> None:
    assert met({foreign_app_id(PLACE): START - 1}, at(START - 1)) == []
    with pytest.raises(LakeAheadError):
        met({foreign_app_id(PLACE): START - 2}, at(START - 1))


def test_the_offsets_of_a_later_generation_are_the_lakes() -> None:
    base = {base_app_id(PLACE, "topic-1"): 1000}
    stranger = at(START - 1, (b"key", b"{}", []))
    assert met({**base, foreign_app_id(PLACE): START - 1 + 1000}, stranger) == []
    with pytest.raises(LakeAheadError):
        met({**base, foreign_app_id(PLACE): START - 1 + 999}, stranger)


@pytest.mark.parametrize("begin", [START, START + 5])
def test_where_retention_took_the_record_nothing_is_said(begin: int) -> None:
    seam = Seam(IDENTITY, FED)
    assert seam.read_from(PLACE, begin, START) == START
    assert seam.passed(PLACE, [at(begin)]) == [at(begin)]


def test_where_no_record_lies_there_nothing_is_said() -> None:
    assert met({}, LATER) == [LATER]


def test_a_partition_that_was_never_read_has_nothing_before_it() -> None:
    seam = Seam(IDENTITY, {})
    assert seam.read_from(PLACE, 0, 0) == 0
    assert seam.passed(PLACE, [at(0)]) == [at(0)]


def test_a_partition_that_is_taken_again_is_looked_at_again() -> None:
    seam = Seam(IDENTITY, FED)
    seam.read_from(PLACE, 0, START)
    seam.read_from(PLACE, START, START)
    assert seam.passed(PLACE, [at(START)]) == [at(START)]
