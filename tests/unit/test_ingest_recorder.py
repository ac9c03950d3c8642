"""The recorder: back-pressure, full disks, partitions, what may be given and what may not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.ingest.encoder import MAX_RECORD_BYTES
from rolltape.ingest.event_index import AttemptCounters, attempts_of
from rolltape.ingest.memory import MemoryLog, MemoryProducer
from rolltape.ingest.recorder import Recorder
from rolltape.ingest.routing import partition_of
from rolltape.schema.codec import Record, record_of_lane
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import (
    BackpressureTimeout,
    ConfigError,
    ProducerFencedError,
    RecordTooLargeError,
    StorageFullError,
    UnknownKindError,
    ValidationError,
)
from rolltape.schema.validate import Limits


def rows(log: MemoryLog, kind: str) -> list[dict[str, Any]]:
    return [row for part in log.reader(Cursor()).poll(0) if part.kind == kind for row in part.table.to_pylist()]


def test_an_event_is_one_row_with_minted_id() -> None:
    log = MemoryLog()
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        before = time.time()
        event_id = recorder.record("problem_registered", problem_id="q", prompt="2 + 2?", answer="4")
        after = time.time()
    (row,) = rows(log, "problem_registered")
    assert row["event_id"] == event_id
    assert row["problem_registered"]["answer"] == "4"
    assert before - 0.001 <= row["recorded_at"].timestamp() <= after


def test_ids_and_indexes_may_be_given() -> None:
    log = MemoryLog()
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        given = {"trajectory_id": "t", "attempt": 0, "event_id": ["x", "y"], "event_index": [4, 5]}
        receipt = recorder.record_batch("rollout_started", given, 2)
        recorder.record("rollout_started", trajectory_id="t", attempt=0)
    assert receipt.event_ids == ["x", "y"]
    assert [row["event_index"] for row in rows(log, "rollout_started")] == [4, 5, 6]


@pytest.mark.parametrize("name", ["lane_seq", "producer_id", "run_id", "schema_version"])
def test_stamps_may_not_be_given(name: str) -> None:
    with Recorder(MemoryLog(), producer_id="p", run_id="r") as recorder, pytest.raises(ValidationError, match=name):
        recorder.record("run_started", purpose="train", **{name: "x"})


def test_what_cannot_be_an_event_raises_and_records_nothing() -> None:
    log = MemoryLog()
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        with pytest.raises(UnknownKindError, match="did you mean"):
            recorder.record("run_startd", purpose="train")
        with pytest.raises(ValidationError, match="purpos"):
            recorder.record("run_started", purpos="train")
        with pytest.raises(ValidationError, match="expected 2 values"):
            recorder.record_batch("problem_registered", {"problem_id": ["a", "b"], "prompt": ["c"]})
        recorder.record("run_started", purpose="train")
    assert [row["lane_seq"] for row in rows(log, "run_started")] == [0]


def test_a_refused_event_is_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    log = MemoryLog()
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        event_id = recorder.record("rollout_ended", trajectory_id="t", attempt=0, status="exploded")
    (letter,) = rows(log, "dead_letter")
    assert letter["dead_letter"]["source_event_id"] == event_id
    assert (recorder.num_recorded, recorder.num_refused) == (0, 1)
    assert "1 of 1 rollout_ended events became dead letters" in caplog.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trajectory_id": "t\udcff"}, "broken_utf8"),
        ({"group_id": b"\xff"}, "broken_utf8"),
        ({"trajectory_id": 5}, "bad_value"),
        ({"trajectory_id": None}, "missing_field"),
        ({"attempt": "first"}, "bad_value"),
        ({"attempt": 2**40}, "bad_value"),
        ({"event_index": 2**40}, "bad_value"),
        ({"event_id": 7}, "bad_value"),
        ({"prompt_token_ids": [1, "x"]}, "bad_value"),
        ({"prompt_token_ids": [1, 2**31]}, "id_overflow"),
        ({"prompt_token_ids": [1, -1]}, "negative_id"),
        ({"prompt_token_ids": [1, 100]}, "out_of_vocabulary"),
        ({"prompt_text": object()}, "bad_value"),
    ],
)
def test_whatever_comes_is_kept_and_the_next_event_goes_on(fields: dict[str, Any], reason: str) -> None:
    log = MemoryLog()
    with Recorder(log, producer_id="p", run_id="r", limits=Limits(vocab_size=100)) as recorder:
        recorder.record("rollout_started", **{"trajectory_id": "t", "attempt": 0, **fields})
        recorder.record("rollout_started", trajectory_id="u", attempt=0)
    (letter,) = rows(log, "dead_letter")
    assert letter["dead_letter"]["reason"] == reason
    assert letter["dead_letter"]["payload"]
    assert letter["dead_letter"]["detail"]
    assert (letter["log_topic"], letter["lane_seq"]) == ("rollout", 0)
    (row,) = rows(log, "rollout_started")
    assert (row["lane_seq"], row["event_index"]) == (1, 0)


def test_an_index_that_no_event_can_have_does_not_become_the_next_one() -> None:
    log = MemoryLog()
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        recorder.record("rollout_started", trajectory_id="t", attempt=0, event_index=2**40)
        recorder.record("rollout_started", trajectory_id="t", attempt=0)
    assert [row["event_index"] for row in rows(log, "rollout_started")] == [0]


def test_numpy_columns_come_through_bit_for_bit() -> None:
    log = MemoryLog()
    ids = [np.arange(n, dtype=np.int32) for n in (0, 3, 5)]
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1, 0xFF800000], np.uint32)
    log_probs = [np.zeros(0, np.float32), bits[:3].view(np.float32), bits.view(np.float32)]
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        recorder.record_batch(
            "action_sampled",
            {"trajectory_id": ["a", "b", "c"], "attempt": 0, "token_ids": ids, "rollout_log_probs": log_probs},
        )
    (part,) = log.reader(Cursor()).poll(0)
    values = part.table["rollout_log_probs"].combine_chunks()
    back = values.values.to_numpy(zero_copy_only=False).view(np.uint32)
    assert back.tolist() == [*bits[:3].tolist(), *bits.tolist()]


def test_large_batches_are_split_into_records_of_about_a_mebibyte() -> None:
    log = MemoryLog()
    sent: list[int] = []
    original = MemoryProducer.send

    def watch(self: MemoryProducer, record: Any, **options: Any) -> None:
        sent.append(record.headers.num_rows)
        original(self, record, **options)

    ids = [np.arange(20_000, dtype=np.int32)] * 64
    with Recorder(log, producer_id="p", run_id="r") as recorder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryProducer, "send", watch)
        recorder.record_batch(
            "observation_received", {"trajectory_id": [f"t{n}" for n in range(64)], "attempt": 0, "token_ids": ids}
        )
    assert sum(sent) == 64
    assert len(sent) >= 64 * 80_000 // MAX_RECORD_BYTES
    table = rows(log, "observation_received")
    assert [row["lane_seq"] for row in table] == list(range(64))
    assert sorted({row["log_offset"] for row in table}) == list(range(len(sent)))


def test_each_partition_is_a_lane_of_its_own_and_a_group_meets_one() -> None:
    log = MemoryLog(num_partitions=4)
    groups = [f"g{n % 10}" for n in range(50)]
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        for _ in range(2):
            recorder.record_batch(
                "action_sampled",
                {
                    "trajectory_id": [f"t{n}" for n in range(50)],
                    "attempt": 0,
                    "group_id": groups,
                    "token_ids": [[n] for n in range(50)],
                    "rollout_log_probs": [[-1.0] if n != 7 else [-1.0, -2.0] for n in range(50)],
                },
            )
    parts: dict[int, list[int]] = {}
    for kind in ("action_sampled", "dead_letter"):
        for row in rows(log, kind):
            assert row["log_partition"] == partition_of(row["group_id"], 4)
            parts.setdefault(row["log_partition"], []).append(row["lane_seq"])
    assert len(parts) > 1
    assert all(sorted(seqs) == list(range(len(seqs))) for seqs in parts.values())
    assert sum(map(len, parts.values())) == 100


def test_no_rows_are_no_event() -> None:
    for num_partitions in (1, 4):
        log = MemoryLog(num_partitions=num_partitions)
        with Recorder(log, producer_id="p", run_id="r") as recorder:
            receipt = recorder.record_batch("rollout_started", {"trajectory_id": [], "attempt": [], "group_id": []})
            recorder.record("rollout_started", trajectory_id="t", attempt=0)
        assert (receipt.event_ids, recorder.num_recorded) == ([], 1)
        assert [row["lane_seq"] for row in rows(log, "rollout_started")] == [0]


def large_actions(groups: int = 8, rows_a_group: int = 16) -> dict[str, Any]:
    """Groups whose rows are mixed: several large records of every partition."""
    number = groups * rows_a_group
    ids = [np.full(2_000 + row, row, dtype=np.int32) for row in range(number)]
    return {
        "trajectory_id": [f"t{row}" for row in range(number)],
        "attempt": 0,
        "group_id": [f"g{row % groups}" for row in range(number)],
        "token_ids": ids,
        "rollout_log_probs": [np.zeros(len(one), np.float32) for one in ids],
    }


@pytest.mark.parametrize("num_cpus", [1, 3])
def test_large_records_keep_their_lanes_whoever_encodes_them(num_cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.ingest.encoder._num_cpus", lambda: num_cpus)
    log = MemoryLog(num_partitions=3)
    with Recorder(log, producer_id="p", run_id="r") as recorder:
        columns = large_actions()
        recorder.record_batch("action_sampled", columns)
        receipt = recorder.record_batch("action_sampled", columns)
        ids_of = dict(zip(columns["trajectory_id"], receipt.event_ids, strict=True))
    lanes: dict[int, list[dict[str, Any]]] = {}
    for row in rows(log, "action_sampled"):
        lanes.setdefault(row["log_partition"], []).append(row)
    assert len(lanes) == 3
    for number, lane in lanes.items():
        assert [row["lane_seq"] for row in lane] == list(range(len(lane)))
        assert {row["event_index"] for row in lane} == {0, 1}
        for row in lane:
            which = int(row["trajectory_id"][1:])
            assert partition_of(row["group_id"], 3) == number
            assert row["token_ids"] == [which] * (2_000 + which)
            assert row["event_index"] == 0 or row["event_id"] == ids_of[row["trajectory_id"]]
        names = [row["trajectory_id"] for row in lane if row["event_index"] == 0]
        assert names == sorted(names, key=lambda name: int(name[1:]))


def test_what_is_still_encoded_when_the_log_is_behind_is_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.ingest.encoder._num_cpus", lambda: 3)
    log = MemoryLog(num_partitions=2)
    recorder = Recorder(log, producer_id="p", run_id="r", max_unacknowledged_bytes=1, backpressure_timeout_s=0.0)
    recorder.record("rollout_started", trajectory_id="t", attempt=0)
    log.pause()
    matrix = np.full((128, 4_000), 7, dtype=np.int32)
    columns = {"trajectory_id": [f"t{row}" for row in range(128)], "attempt": 0, "group_id": "g", "token_ids": matrix}
    recorder.record("rollout_started", trajectory_id="t", attempt=0)
    with pytest.raises(BackpressureTimeout):
        recorder.record_batch("observation_received", columns)
    matrix[:] = 9
    log.resume()
    recorder.flush()
    recorder.close()
    found = rows(log, "observation_received")
    assert len(found) == 128
    assert all(set(row["token_ids"]) == {7} for row in found)


def test_what_is_still_encoded_when_a_record_is_refused_is_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_slowly(*arguments: Any, **options: Any) -> Record:
        time.sleep(0.1)
        return record_of_lane(*arguments, **options)

    monkeypatch.setattr("rolltape.ingest.encoder._num_cpus", lambda: 3)
    monkeypatch.setattr("rolltape.ingest.encoder.record_of_lane", encode_slowly)
    log = MemoryLog(num_partitions=2)
    recorder = Recorder(log, producer_id="p", run_id="r")
    matrix = np.full((128, 4_000), 7, dtype=np.int32)
    columns = {"trajectory_id": [f"t{row}" for row in range(128)], "attempt": 0, "group_id": "g", "token_ids": matrix}
    with monkeypatch.context() as patch:

        def refuse(_self: MemoryProducer, _record: Any, **_: Any) -> None:
            raise RecordTooLargeError("refused")

        patch.setattr(MemoryProducer, "send", refuse)
        with pytest.raises(RecordTooLargeError):
            recorder.record_batch("observation_received", columns)
    matrix[:] = 9
    recorder.close()
    found = rows(log, "observation_received")
    assert len(found) == 128
    assert all(set(row["token_ids"]) == {7} for row in found)


# Back-pressure and full disks: slow down, never drop.


def test_a_log_that_is_away_slows_the_caller_down() -> None:
    log = MemoryLog()
    recorder = Recorder(log, producer_id="p", run_id="r", max_unacknowledged_bytes=20_000, backpressure_timeout_s=10)
    log.pause()
    recorded = threading.Event()

    def fill() -> None:
        for _ in range(20):
            recorder.record("rollout_started", trajectory_id="t", attempt=0, prompt_text="x" * 2000)
        recorded.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert not recorded.wait(0.3)
    log.resume()
    assert recorded.wait(10)
    thread.join()
    recorder.close()
    assert [row["event_index"] for row in rows(log, "rollout_started")] == list(range(20))


def test_a_log_that_stays_away_is_an_error_that_loses_nothing() -> None:
    log = MemoryLog()
    recorder = Recorder(log, producer_id="p", run_id="r", max_unacknowledged_bytes=5_000, backpressure_timeout_s=0.05)
    log.pause()

    def fill() -> None:
        for _ in range(20):
            recorder.record("rollout_started", trajectory_id="t", attempt=0, prompt_text="x" * 2000)

    with pytest.raises(BackpressureTimeout, match="wait in memory and go first"):
        fill()
    log.resume()
    recorder.record("rollout_started", trajectory_id="t", attempt=0)
    recorder.flush()
    indexes = [row["event_index"] for row in rows(log, "rollout_started")]
    assert indexes == list(range(len(indexes)))
    assert len(indexes) >= 2
    recorder.close()


def test_a_full_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    recorder = Recorder(log, producer_id="p", run_id="r", backpressure_timeout_s=10)
    refusals = iter([True, True, False])
    original = MemoryProducer.send

    def sometimes(self: MemoryProducer, record: Any, **options: Any) -> None:
        if next(refusals, False):
            raise StorageFullError("no room")
        original(self, record, **options)

    monkeypatch.setattr(MemoryProducer, "send", sometimes)
    recorder.record("rollout_started", trajectory_id="t", attempt=0)
    recorder.close()
    assert [row["lane_seq"] for row in rows(log, "rollout_started")] == [0]


def test_a_disk_that_stays_full_is_an_error_and_the_event_goes_first_later(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    recorder = Recorder(log, producer_id="p", run_id="r", backpressure_timeout_s=0.0)

    def full(self: MemoryProducer, record: Any, **options: Any) -> None:
        raise StorageFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryProducer, "send", full)
        with pytest.raises(StorageFullError):
            recorder.record("rollout_started", trajectory_id="t", attempt=0)
    recorder.flush()
    assert [(row["lane_seq"], row["event_index"]) for row in rows(log, "rollout_started")] == [(0, 0)]
    recorder.close()


def test_bounds_are_checked_and_the_id_is_given_back(tmp_path: Path) -> None:
    log = MemoryLog()
    with pytest.raises(ConfigError, match="max_unacknowledged_bytes"):
        Recorder(log, producer_id="p", run_id="r", max_unacknowledged_bytes=0)
    first = Recorder(log, producer_id="p", run_id="r")
    with pytest.raises(ProducerFencedError):
        Recorder(log, producer_id="p", run_id="r")
    first.close()
    Recorder(log, producer_id="p", run_id="r").close()


def test_threads_share_a_recorder() -> None:
    log = MemoryLog()
    recorder = Recorder(log, producer_id="p", run_id="r")

    def work(name: str) -> None:
        for _ in range(25):
            recorder.record("rollout_started", trajectory_id=name, attempt=0)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    found = rows(log, "rollout_started")
    assert [row["lane_seq"] for row in found] == list(range(100))
    for name in ("t0", "t3"):
        assert [row["event_index"] for row in found if row["trajectory_id"] == name] == list(range(25))


# Event indexes.


def test_indexes_go_on_after_an_end_and_are_bounded() -> None:
    counters = AttemptCounters()
    first = attempts_of({"trajectory_id": ["a", "b", "a"], "attempt": [0, 0, 1]}, 3)
    assert counters.preview(first) == [0, 0, 0]
    counters.advance(first, [0, 0, 0], ended=False)
    again = attempts_of({"trajectory_id": ["a", "a", "b"], "attempt": 0}, 3)
    assert counters.preview(again) == counters.preview(again) == [1, 2, 1]
    counters.advance(again, [1, 2, 1], ended=True)
    assert counters.preview(again) == [3, 4, 2]


def test_given_indexes_never_lower_the_next_one() -> None:
    counters = AttemptCounters()
    rows = attempts_of({"trajectory_id": ["a", "b"], "attempt": 0}, 2)
    counters.advance_to(rows, [7, "x"], ended=False)
    counters.advance_to(rows, [3, 2**31], ended=False)
    assert counters.preview(rows) == [8, 0]
    counters.advance(rows, [8, 0], ended=True)
    counters.advance(rows, [9, 1], ended=False)
    assert counters.preview(rows) == [10, 2]
