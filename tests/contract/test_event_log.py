"""What every event log promises (design §5, §6). Runs against each harness of conftest.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.ingest.lanes import Lane
from rolltape.ingest.log import EventLog, LogProducer, LogReader
from rolltape.ingest.recorder import Recorder
from rolltape.schema.codec import Record, encode, make_record
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import ProducerFencedError
from rolltape.schema.validate import Limits

ROLLOUT = Partition("rollout", 0)


def action(tools: Any, lanes: Any, trajectory: str, index: int = 0, **columns: Any) -> Record:
    """One action of three tokens as a record."""
    fields = {"token_ids": [[1, 2, 3]], "rollout_log_probs": [[-0.1, -0.2, -0.3]], "action_kind": "execution"}
    record: Record = lanes.record(
        "action_sampled", trajectory_id=trajectory, attempt=0, event_index=index, **{**fields, **columns}
    )
    return record


# Protocols, order, cursors.


def test_it_keeps_the_protocols(log: EventLog) -> None:
    producer = log.producer("p")
    reader = log.reader(Cursor())
    assert isinstance(log, EventLog)
    assert isinstance(producer, LogProducer)
    assert isinstance(reader, LogReader)
    reader.close()
    producer.close()


def test_a_partition_keeps_the_order_and_its_offsets_have_no_gap(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    for number in range(20):
        lanes.producer.send(action(tools, lanes, f"t{number % 3}", number))
    lanes.producer.flush("logged", 10)
    back = tools.read_back(log)
    assert [row["event_index"] for row in back.of("action_sampled")] == list(range(20))
    assert back.offsets[ROLLOUT] == list(range(20))
    assert log.end()[ROLLOUT] == 20
    assert lanes.producer.acknowledged(ROLLOUT) == 19
    assert lanes.producer.unacknowledged_bytes == 0


def test_rows_of_one_record_share_its_offset(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    ids = {"trajectory_id": ["a", "b", "c"], "attempt": 0, "problem_id": "q", "purpose": "train"}
    lanes.producer.send(lanes.record("rollout_dispatched", 3, **ids))
    lanes.producer.send(lanes.record("rollout_dispatched", 3, **ids))
    lanes.producer.flush("logged", 10)
    rows = tools.read_back(log).of("rollout_dispatched")
    assert [(row["log_topic"], row["log_partition"], row["log_offset"]) for row in rows] == [("rollout", 0, 0)] * 3 + [
        ("rollout", 0, 1)
    ] * 3


def test_a_reader_goes_on_exactly_where_another_stopped(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    for number in range(6):
        lanes.producer.send(action(tools, lanes, "t", number))
        lanes.producer.flush("logged", 10)
    for start in range(7):
        back = tools.read_back(log, Cursor({ROLLOUT: start}))
        assert [row["event_index"] for row in back.of("action_sampled")] == list(range(start, 6))
        assert back.cursor[ROLLOUT] == 6


def test_a_live_reader_gets_each_event_once(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    reader = log.reader(Cursor())
    assert reader.poll(0.0) == []
    got: list[int] = []
    for number in range(5):
        lanes.producer.send(action(tools, lanes, "t", number))
        lanes.producer.flush("logged", 10)
        deliveries = tools.wait_for(lambda: reader.poll(1.0))
        got += [index for delivery in deliveries for index in delivery.table["event_index"].to_pylist()]
    assert got == [0, 1, 2, 3, 4]
    assert reader.poll(0.0) == []


def test_topics_and_kinds_choose(log: EventLog) -> None:
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        recorder.record("run_started", purpose="train")
        recorder.record("problem_registered", problem_id="q", prompt="?")
        recorder.record("rollout_started", trajectory_id="t", attempt=0)
        recorder.flush()
    by_topic = [delivery.kind for delivery in log.reader(Cursor(), topics=["control"]).poll(1.0)]
    by_kind = [delivery.kind for delivery in log.reader(Cursor(), kinds=["rollout_started"]).poll(1.0)]
    assert by_topic == ["run_started"]
    assert by_kind == ["rollout_started"]


# Lanes: exactly once.


def test_a_resent_record_adds_nothing(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    records = [action(tools, lanes, "t", number) for number in range(3)]
    for record in [*records, records[1], records[0], *records]:
        lanes.inject(record)
    lanes.inject(action(tools, lanes, "t", 3))
    lanes.settle()
    back = tools.read_back(log)
    assert [row["lane_seq"] for row in back.of("action_sampled")] == [0, 1, 2, 3]
    assert back.of("dead_letter") == []


def test_of_a_record_that_is_known_in_part_the_rest_is_taken(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    ids = {"trajectory_id": ["a", "b", "c", "d"], "attempt": 0, "problem_id": "q", "purpose": "train"}
    whole = lanes.batch("rollout_dispatched", 4, **ids)
    lanes.inject(make_record(whole.slice(0, 2)))
    lanes.inject(make_record(whole))
    lanes.settle()
    rows = tools.read_back(log).of("rollout_dispatched")
    assert [row["trajectory_id"] for row in rows] == ["a", "b", "c", "d"]
    assert len({row["event_id"] for row in rows}) == 4


def test_a_gap_stops_its_lane_alone_and_an_alarm_names_the_range(harness: Any, log: EventLog, tools: Any) -> None:
    harness.watch()
    lanes, other = tools.lanes(log.producer("p")), tools.lanes(log.producer("q"))
    records = [action(tools, lanes, "t", number) for number in range(6)]
    for record in (records[0], records[4], records[5]):
        lanes.inject(record)
    other.inject(action(tools, other, "u"))
    other.settle()
    alarm = tools.wait_for(lambda: tools.read_back(log).of("alarm_raised"))[0]
    assert alarm["alarm"] == "lane_gap"
    assert "p epoch 1 on rollout/0" in alarm["detail"]
    assert "1 to 3 are missing" in alarm["detail"]
    assert {row["trajectory_id"] for row in tools.read_back(log).of("action_sampled")} == {"t", "u"}


def test_a_lane_goes_on_in_order_once_the_missing_records_come(harness: Any, log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    records = [action(tools, lanes, "t", number) for number in range(6)]
    for number in (3, 4, 5, 0, 1, 2, 1):
        lanes.inject(records[number])
    lanes.settle()
    back = tools.read_back(log)
    assert [row["lane_seq"] for row in back.of("action_sampled")] == [0, 1, 2, 3, 4, 5]
    # Where every message has an offset, a record lies where it became admissible: here, where the missing ones came.
    assert back.offsets[ROLLOUT] == ([3, 4, 5, 5, 5, 5] if harness.numbers_what_comes else list(range(6)))


def test_an_accepted_loss_is_a_dead_letter_and_the_lane_goes_on(harness: Any, log: EventLog, tools: Any) -> None:
    harness.watch()
    lanes = tools.lanes(log.producer("p"))
    records = [action(tools, lanes, "t", number) for number in range(5)]
    for record in (records[0], records[3], records[4]):
        lanes.inject(record)
    tools.wait_for(lambda: tools.read_back(log).of("alarm_raised"))
    harness.accept_loss(Lane("p", lanes.producer.epoch, "rollout", 0), 1, 2)
    lanes.settle()
    back = tools.read_back(log)
    letter = back.of("dead_letter")[0]
    assert (letter["reason"], letter["first_lane_seq"], letter["last_lane_seq"]) == ("lane_gap_accepted", 1, 2)
    assert letter["source_producer_id"] == "p"
    assert [row["lane_seq"] for row in back.of("action_sampled")] == [0, 3, 4]
    lanes.inject(records[1])
    lanes.settle()
    assert len(tools.read_back(log).of("action_sampled")) == 3


def test_two_writers_of_one_producer_id_are_one_too_many(log: EventLog) -> None:
    first = log.producer("p")
    with pytest.raises(ProducerFencedError, match="only writer of producer 'p'"):
        log.producer("p")
    first.close()
    first.close()
    second = log.producer("p")
    assert second.epoch > first.epoch
    second.close()


def test_a_new_epoch_numbers_from_0_and_comes_after_the_old_one(log: EventLog, tools: Any) -> None:
    for _ in range(3):
        lanes = tools.lanes(log.producer("p"))
        for number in range(2):
            lanes.producer.send(action(tools, lanes, "t", number))
        lanes.producer.close()
    last = log.producer("p")
    last.wait_for_older_epochs(10)
    rows = tools.read_back(log).of("action_sampled")
    assert [row["lane_seq"] for row in rows] == [0, 1] * 3
    assert [row["producer_epoch"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert last.epoch == 4
    last.close()


# Conflicts.


def test_other_bytes_at_a_known_place_of_a_lane_are_kept_as_a_conflict(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    first = action(tools, lanes, "t", 0)
    other = action(tools, lanes, "t", 0, first_seq=0, token_ids=[[9, 9, 9]])
    for record in (first, other, other, first):
        lanes.inject(record)
    lanes.inject(action(tools, lanes, "t", 1))
    lanes.settle()
    back = tools.read_back(log)
    assert [row["token_ids"] for row in back.of("action_sampled")] == [[1, 2, 3]] * 2
    letters = back.of("dead_letter")
    assert [letter["reason"] for letter in letters] == ["conflict"]
    assert letters[0]["payload"] == bytes(memoryview(other.value))


def test_one_event_id_with_two_contents_is_a_conflict_on_any_lane(log: EventLog, tools: Any) -> None:
    lanes, other = tools.lanes(log.producer("p")), tools.lanes(log.producer("q"))
    lanes.inject(action(tools, lanes, "t", 0, event_id="same"))
    lanes.settle()
    other.inject(action(tools, other, "t", 0, event_id="same", rollout_log_probs=[[-0.1, -0.2, -0.4]]))
    other.inject(action(tools, other, "t", 1))
    other.settle()
    back = tools.read_back(log)
    assert [row["event_index"] for row in back.of("action_sampled")] == [0, 1]
    letter = back.of("dead_letter")[0]
    assert (letter["reason"], letter["source_event_id"]) == ("conflict", "same")
    assert "expected the content that event same came with before" in letter["detail"]


def test_the_same_event_again_on_another_lane_adds_nothing(harness: Any, log: EventLog, tools: Any) -> None:
    lanes, other = tools.lanes(log.producer("p")), tools.lanes(log.producer("q"))
    content = {"event_id": "same", "rollout_log_probs": [[math.nan, -0.0, -0.3]]}
    lanes.inject(action(tools, lanes, "t", 0, **content))
    lanes.settle()
    other.inject(action(tools, other, "t", 0, **content))
    other.inject(action(tools, other, "t", 1))
    other.settle()
    back = tools.read_back(log)
    assert [row["event_index"] for row in back.of("action_sampled")] == [0, 1]
    assert back.of("dead_letter") == []
    assert back.offsets[ROLLOUT] == ([0, 2] if harness.numbers_what_comes else [0, 1])


def test_one_event_id_twice_in_a_record_is_taken_once(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    ids = {"trajectory_id": ["a", "a", "b"], "attempt": 0, "problem_id": "q", "purpose": "train"}
    lanes.inject(lanes.record("rollout_dispatched", 3, event_id=["x", "x", "x"], **ids))
    lanes.settle()
    back = tools.read_back(log)
    assert [row["trajectory_id"] for row in back.of("rollout_dispatched")] == ["a"]
    assert [letter["reason"] for letter in back.of("dead_letter")] == ["conflict"]


# Bad input: a dead letter with reason and bytes, the rest goes on.


def unknown_kind(record: Record) -> Record:
    return replace(record, headers=replace(record.headers, kind="action_dreamt"))


def newer_major(record: Record) -> Record:
    batch = pa.ipc.open_stream(record.value).read_all().to_batches()[0]
    position = batch.schema.get_field_index("schema_version")
    batch = batch.set_column(position, "schema_version", pa.array(["9.0"] * batch.num_rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return replace(record, headers=replace(record.headers, schema_version="9.0"), value=sink.getvalue())


def truncated(record: Record) -> Record:
    return replace(record, value=bytes(memoryview(record.value))[:-200])


def no_arrow_at_all(record: Record) -> Record:
    return replace(record, value=b"these are no events")


def headers_that_lie(record: Record) -> Record:
    return replace(record, headers=replace(record.headers, num_rows=7, last_lane_seq=record.headers.first_lane_seq + 6))


@pytest.mark.parametrize(
    ("spoil", "reason", "num_lost"),
    [
        (unknown_kind, "unknown_kind", 1),
        (newer_major, "schema_version", 1),
        (truncated, "truncated_payload", 1),
        (no_arrow_at_all, "truncated_payload", 1),
        (headers_that_lie, "header_mismatch", 7),
    ],
)
def test_a_record_that_cannot_be_read_is_accounted_for(
    log: EventLog, tools: Any, spoil: Any, reason: str, num_lost: int
) -> None:
    lanes = tools.lanes(log.producer("p"))
    lanes.inject(action(tools, lanes, "t", 0))
    bad = spoil(action(tools, lanes, "t", 1))
    lanes.inject(bad)
    lanes.inject(action(tools, lanes, "u", 0, first_seq=1 + num_lost))
    lanes.settle()
    back = tools.read_back(log)
    assert [row["trajectory_id"] for row in back.of("action_sampled")] == ["t", "u"]
    (letter,) = back.of("dead_letter")
    assert letter["reason"] == reason
    assert letter["payload"] == bytes(memoryview(bad.value))
    assert (letter["first_lane_seq"], letter["last_lane_seq"]) == (1, num_lost)
    assert (letter["trajectory_id"], letter["attempt"]) == ("t", 0)
    assert (letter["first_event_index"], letter["last_event_index"]) == (1, 1)
    assert (letter["log_topic"], letter["log_partition"], letter["log_offset"]) == ("rollout", 0, 1)
    assert (letter["source_topic"], letter["source_offset"], letter["source_producer_id"]) == ("rollout", 1, "p")
    assert letter["detail"]


def test_text_that_is_no_utf8_is_refused_by_row(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    batch = lanes.batch("problem_registered", 3, problem_id=["a", "b", "c"], prompt=["one", "t", "three"])
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 3, 4, 9], pa.int32()).buffers()[1], pa.py_buffer(b"one\xffthree")]
    )
    struct = batch.column("problem_registered")
    names = [item.name for item in struct.type.fields]
    children = [broken if name == "prompt" else struct.field(name) for name in names]
    spoiled = batch.set_column(
        batch.num_columns - 1,
        batch.schema.field("problem_registered"),
        pa.StructArray.from_arrays(children, fields=list(struct.type.fields)),
    )
    good = lanes.record("problem_registered", first_seq=0, problem_id="x")
    headers = replace(good.headers, num_rows=3, last_lane_seq=2)
    lanes.inject(replace(good, headers=headers, value=encode(spoiled)))
    lanes.settle()
    back = tools.read_back(log)
    assert [row["problem_id"] for row in back.of("problem_registered")] == ["a", "c"]
    (letter,) = back.of("dead_letter")
    assert (letter["reason"], letter["first_lane_seq"], letter["last_lane_seq"]) == ("broken_utf8", 1, 1)
    assert b"\xff" in letter["payload"]


@pytest.mark.parametrize(
    ("token_ids", "num_log_probs", "reason"),
    [
        (list(range(207)), 208, "length_mismatch"),
        (list(range(208)), 207, "length_mismatch"),
        ([1, -1, 2], 3, "negative_id"),
        ([1, 1000, 2], 3, "out_of_vocabulary"),
    ],
)
def test_a_row_that_breaks_its_spec_is_refused_alone(
    log: EventLog, tools: Any, token_ids: list[int], num_log_probs: int, reason: str
) -> None:
    lanes = tools.lanes(log.producer("p"))
    record = lanes.record(
        "action_sampled",
        3,
        trajectory_id=["a", "b", "c"],
        attempt=0,
        event_index=[4, 5, 6],
        token_ids=[[1], token_ids, [3]],
        rollout_log_probs=[[-1.0], [-0.5] * num_log_probs, [-3.0]],
        action_kind="execution",
    )
    lanes.inject(record)
    lanes.settle()
    back = tools.read_back(log)
    assert [row["trajectory_id"] for row in back.of("action_sampled")] == ["a", "c"]
    (letter,) = back.of("dead_letter")
    assert (letter["reason"], letter["trajectory_id"], letter["first_event_index"]) == (reason, "b", 5)
    assert (letter["first_lane_seq"], letter["last_lane_seq"]) == (1, 1)
    assert letter["source_event_id"]
    if reason == "length_mismatch":
        assert "207" in letter["detail"]
        assert "208" in letter["detail"]


def test_strange_log_probs_are_stored_as_they_are(log: EventLog, tools: Any) -> None:
    lanes = tools.lanes(log.producer("p"))
    values = [-0.1, None, math.nan, math.inf, -math.inf, 0.5, -9999.0, 0.0, -0.0]
    lanes.inject(action(tools, lanes, "t", 0, token_ids=[list(range(9))], rollout_log_probs=[values]))
    lanes.settle()
    back = tools.read_back(log)
    assert back.of("dead_letter") == []
    (row,) = back.of("action_sampled")
    assert repr([None if v is None else round(v, 6) for v in row["rollout_log_probs"]]) == repr(values)


# Size and number.


def test_an_action_of_a_million_tokens_arrives_whole(log: EventLog, tools: Any) -> None:
    count = 1_200_000
    rng = np.random.default_rng(5)
    ids, log_probs = rng.integers(0, 1000, count, dtype=np.int32), -rng.exponential(size=count).astype(np.float32)
    lanes = tools.lanes(log.producer("p"))
    ends = pa.array([0, count], pa.int32())

    def one(values: np.ndarray) -> pa.ListArray:
        type_ = pa.list_(pa.field("element", pa.from_numpy_dtype(values.dtype)))
        return pa.ListArray.from_arrays(ends, pa.array(values), type=type_)

    record = action(tools, lanes, "t", 0, token_ids=one(ids), rollout_log_probs=one(log_probs))
    assert record.num_bytes > 8 << 20
    lanes.producer.send(record)
    lanes.producer.send(action(tools, lanes, "t", 1))
    lanes.producer.flush("logged", 60)
    reader = log.reader(Cursor(), kinds=["action_sampled"])
    tables = tools.wait_for(lambda: reader.poll(1.0))
    while sum(delivery.table.num_rows for delivery in tables) < 2:
        tables += reader.poll(1.0)
    whole = pa.concat_tables([delivery.table for delivery in tables])
    assert whole["event_index"].to_pylist() == [0, 1]
    first = whole.slice(0, 1)
    assert np.array_equal(first["token_ids"].combine_chunks().flatten().to_numpy(), ids)
    assert np.array_equal(first["rollout_log_probs"].combine_chunks().flatten().to_numpy(), log_probs)


def test_many_small_events_keep_their_order(log: EventLog, tools: Any) -> None:
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        sent = [
            recorder.record("observation_received", trajectory_id="t", attempt=0, token_ids=[number])
            if number % 7
            else recorder.record("rollout_started", trajectory_id="t", attempt=0)
            for number in range(300)
        ]
        recorder.flush()
    back = tools.read_back(log)
    rows = [row for kind in ("rollout_started", "observation_received") for row in back.of(kind)]
    rows.sort(key=lambda row: row["lane_seq"])
    assert [row["event_id"] for row in rows] == sent
    assert [row["event_index"] for row in rows] == list(range(300))
    offsets = [row["log_offset"] for row in rows]
    assert offsets == sorted(offsets)


def test_what_was_logged_can_be_waited_for_in_the_archive(harness: Any, log: EventLog, tools: Any) -> None:
    harness.watch()
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        for number in range(3):
            sent = [recorder.record("rollout_started", trajectory_id=f"t{number}", attempt=0) for _ in range(5)]
            recorder.flush()
            log.wait_until_archived(30)
            assert set(sent) <= set(harness.archived("rollout_started")["event_id"].to_pylist())
    assert harness.archived("rollout_started").num_rows == 15


# Through the recorder.


def test_the_recorder_stamps_and_numbers(log: EventLog, tools: Any) -> None:
    with Recorder(log, producer_id="p", run_id="r", run_epoch=3, tenant="me") as recorder:
        first = recorder.record("rollout_started", trajectory_id="t", attempt=0, prompt_token_ids=[1, 2])
        receipt = recorder.record_batch(
            "action_sampled",
            {
                "trajectory_id": ["t", "u", "t"],
                "attempt": 0,
                "token_ids": [[1], [2], [3]],
                "parent_event_id": first,
                "rollout_log_probs": [[-1.0], [-2.0], [-3.0]],
            },
        )
        recorder.record("rollout_ended", trajectory_id="t", attempt=0, status="completed")
        recorder.set_run_epoch(4)
        recorder.record("reward_assigned", trajectory_id="t", attempt=0, state="missing")
        recorder.flush()
    back = tools.read_back(log)
    actions, (ended,), (reward,) = back.of("action_sampled"), back.of("rollout_ended"), back.of("reward_assigned")
    assert [row["event_id"] for row in actions] == receipt.event_ids
    assert [(row["trajectory_id"], row["event_index"]) for row in actions] == [("t", 1), ("u", 0), ("t", 2)]
    assert (ended["event_index"], ended["last_event_index"]) == (3, 3)
    assert (reward["event_index"], reward["run_epoch"], ended["run_epoch"]) == (None, 4, 3)
    assert {row["parent_event_id"] for row in actions} == {first}
    everything = [row for kind in back.rows for row in back.of(kind)]
    assert sorted(row["lane_seq"] for row in everything) == list(range(6))
    assert {(row["run_id"], row["tenant"], row["producer_id"]) for row in everything} == {("r", "me", "p")}


def test_refused_rows_of_a_recorder_keep_their_place_in_the_attempt(log: EventLog, tools: Any) -> None:
    with Recorder(log, producer_id="p", run_id="r", limits=Limits(vocab_size=100)) as recorder:
        receipt = recorder.record_batch(
            "action_sampled",
            {
                "trajectory_id": ["t"] * 5,
                "attempt": 0,
                "token_ids": [[1], [2**31], [3, 4], [100], [5]],
                "rollout_log_probs": [[-1.0], [-2.0], [-3.0], [-4.0], [-5.0]],
            },
        )
        recorder.flush()
    back = tools.read_back(log)
    assert [(refused.row, refused.reason) for refused in receipt.refused] == [
        (1, "id_overflow"),
        (2, "length_mismatch"),
        (3, "out_of_vocabulary"),
    ]
    assert [row["event_index"] for row in back.of("action_sampled")] == [0, 4]
    letters = sorted(back.of("dead_letter"), key=lambda letter: letter["first_event_index"])
    assert [(letter["reason"], letter["first_event_index"], letter["last_event_index"]) for letter in letters] == [
        ("id_overflow", 1, 1),
        ("length_mismatch", 2, 2),
        ("out_of_vocabulary", 3, 3),
    ]
    assert [letter["source_event_id"] for letter in letters] == receipt.event_ids[1:4]
    assert {(letter["trajectory_id"], letter["log_topic"]) for letter in letters} == {("t", "rollout")}
    assert b"2147483648" in letters[0]["payload"]
    lane = [row["lane_seq"] for kind in ("action_sampled", "dead_letter") for row in back.of(kind)]
    assert sorted(lane) == list(range(5))
    assert (recorder.num_recorded, recorder.num_refused) == (2, 3)
