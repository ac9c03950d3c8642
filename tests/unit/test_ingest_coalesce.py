"""Small batches of a lane fill a record, in order, for a moment only; keys decide the partition."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.ingest.coalesce import HELD_BYTES
from rolltape.ingest.encoder import MAX_RECORD_BYTES
from rolltape.ingest.memory import MemoryLog, MemoryProducer
from rolltape.ingest.recorder import Recorder
from rolltape.ingest.routing import partition_of, spread
from rolltape.schema.codec import Record, decode, record_of_lane
from rolltape.schema.errors import RecordTooLargeError

LONG_S = 3600.0


class Log(MemoryLog):
    """A log in memory that keeps the records as they were sent."""

    def __init__(self, linger_s: float, num_partitions: int = 1) -> None:
        super().__init__(linger_s=linger_s, num_partitions=num_partitions)
        self.records: list[Record] = []

    def send(self, record: Record) -> None:
        self.records.append(record)
        super().send(record)

    def lanes(self) -> list[list[dict[str, Any]]]:
        """The rows of each partition in the order in which they were sent."""
        by_partition: dict[int, list[dict[str, Any]]] = {}
        for record in self.records:
            by_partition.setdefault(record.partition, []).extend(decode(record.value).to_pylist())
        return list(by_partition.values())


def recorder(log: Log) -> Recorder:
    return Recorder(log, producer_id="p", run_id="run")


def start(opened: Recorder, trajectory: str, group: str = "g", **columns: Any) -> None:
    opened.record("rollout_started", trajectory_id=trajectory, attempt=0, group_id=group, **columns)


def test_events_of_one_kind_fill_a_record() -> None:
    log = Log(LONG_S)
    with recorder(log) as opened:
        for number in range(30):
            start(opened, f"t{number}")
        assert log.records == []
        opened.flush()
        assert [record.headers.num_rows for record in log.records] == [30]
        (rows,) = log.lanes()
        assert [row["trajectory_id"] for row in rows] == [f"t{number}" for number in range(30)]
        assert [row["lane_seq"] for row in rows] == list(range(30))
        assert log.records[0].headers.event_ranges[3] == ("t3", 0, 0, 0)


def test_a_lane_keeps_the_order_of_kinds() -> None:
    log = Log(LONG_S)
    with recorder(log) as opened:
        for number in range(6):
            start(opened, f"t{number}")
            if number % 2:
                opened.record("rollout_ended", trajectory_id=f"t{number}", attempt=0, group_id="g", status="completed")
        opened.flush()
    (rows,) = log.lanes()
    assert [row["lane_seq"] for row in rows] == list(range(9))
    told = [(row["kind"], row["trajectory_id"]) for row in rows]
    assert told[:3] == [("rollout_started", "t0"), ("rollout_started", "t1"), ("rollout_ended", "t1")]
    assert told[3] == ("rollout_started", "t2")


def test_a_refused_row_keeps_its_place_in_the_lane() -> None:
    log = Log(LONG_S)
    with recorder(log) as opened:
        start(opened, "t0")
        start(opened, "t1", prompt_token_ids=[-1])
        start(opened, "t2")
        opened.flush()
    (rows,) = log.lanes()
    assert [(row["lane_seq"], row["kind"]) for row in rows] == [
        (0, "rollout_started"),
        (1, "dead_letter"),
        (2, "rollout_started"),
    ]


def test_what_waits_is_sent_after_a_moment_without_another_call() -> None:
    log = Log(0.005)
    with recorder(log) as opened:
        for wanted in (1, 2, 3):
            start(opened, f"t{wanted}")
            deadline = time.monotonic() + 20
            while len(log.records) < wanted:
                assert time.monotonic() < deadline, "it waits for ever"
                time.sleep(0.001)


def test_closing_sends_what_waits() -> None:
    log = Log(LONG_S)
    opened = recorder(log)
    start(opened, "t")
    opened.close()
    opened.close()
    assert [record.headers.num_rows for record in log.records] == [1]


def test_large_batches_do_not_wait_and_none_exceeds_a_record() -> None:
    log = Log(LONG_S)
    with recorder(log) as opened:
        ids = np.arange(HELD_BYTES // 8, dtype=np.int32)
        for number in range(7):
            start(opened, f"t{number}", prompt_token_ids=ids)
        assert log.records
        opened.flush()
    for record in log.records:
        assert decode(record.value).nbytes <= MAX_RECORD_BYTES + 4096
    (rows,) = log.lanes()
    assert [row["lane_seq"] for row in rows] == list(range(7))


def test_arrays_may_be_used_again_by_their_owner() -> None:
    log = Log(LONG_S)
    ordinals = np.array([5], dtype=np.int32)
    with recorder(log) as opened:
        fields = {"trajectory_id": ["t"], "attempt": 0, "problem_id": "q", "purpose": "train"}
        opened.record_batch("rollout_dispatched", {**fields, "group_ordinal": ordinals})
        ordinals[:] = 99
        opened.flush()
    (rows,) = log.lanes()
    assert rows[0]["rollout_dispatched"]["group_ordinal"] == 5


def test_threads_fill_records_together() -> None:
    log = Log(0.002, num_partitions=3)
    with recorder(log) as opened:

        def work(thread: int) -> None:
            for number in range(60):
                start(opened, f"{thread}-{number}", group=f"g{thread}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        opened.flush()
    for rows in log.lanes():
        assert [row["lane_seq"] for row in rows] == list(range(len(rows)))
        for _, own in itertools.groupby(
            sorted(rows, key=lambda row: str(row["group_id"])), lambda row: row["group_id"]
        ):
            numbers = [int(row["trajectory_id"].partition("-")[2]) for row in own]
            assert numbers == sorted(numbers)
    assert sum(map(len, log.lanes())) == 300


@pytest.fixture
def four() -> Iterator[tuple[Log, Recorder]]:
    """A log of four partitions."""
    log = Log(0.0, num_partitions=4)
    with recorder(log) as opened:
        yield log, opened


@pytest.mark.parametrize("groups", ["g1", ["g1"] * 8, [f"g{number // 3}" for number in range(8)], None])
def test_rows_go_where_their_keys_say(four: tuple[Log, Recorder], groups: Any) -> None:
    log, opened = four
    names = [f"t{number}" for number in range(8)]
    for _ in range(2):
        columns = {"trajectory_id": names, "attempt": 0, "group_id": groups}
        opened.record_batch("rollout_started", columns)
    for record in log.records:
        for row in decode(record.value).to_pylist():
            assert record.partition == partition_of(row["group_id"] or row["trajectory_id"], 4)
    for rows in log.lanes():
        assert [row["lane_seq"] for row in rows] == list(range(len(rows)))
        assert [row["event_index"] for row in rows if row["trajectory_id"] == rows[0]["trajectory_id"]] == [0, 1]
    assert sum(map(len, log.lanes())) == 16


def test_a_dead_letter_goes_where_its_event_would_have_gone(four: tuple[Log, Recorder]) -> None:
    log, opened = four
    columns = {"trajectory_id": ["a", "b"], "attempt": 0, "group_id": ["x", "y"], "prompt_token_ids": [[1], [-1]]}
    opened.record_batch("rollout_started", columns)
    found = {row["kind"]: record.partition for record in log.records for row in decode(record.value).to_pylist()}
    assert found == {"rollout_started": partition_of("x", 4), "dead_letter": partition_of("y", 4)}


@pytest.mark.parametrize(
    ("groups", "num_rows", "order"),
    [
        ("g", {2: 4}, None),
        (["g"] * 4, {2: 4}, None),
        (["g", "g", "h", "h"], {2: 2, 3: 2}, None),
        (["h", "g", "h", "g"], {2: 2, 3: 2}, [1, 3, 0, 2]),
        (np.array(["h", "g", "h", "g"]), {2: 2, 3: 2}, [1, 3, 0, 2]),
        (pa.array(["h", None, "h", None]), {2: 2, 3: 2}, [1, 3, 0, 2]),
    ],
)
def test_rows_are_sorted_by_partition_and_keep_their_order(
    groups: Any, num_rows: dict[int, int], order: list[int] | None
) -> None:
    found = spread({"group_id": groups, "trajectory_id": "g"}, "run", "rollout", 4, 4)
    assert found is not None
    assert found.num_rows == num_rows
    assert (found.order is None) if order is None else (found.order is not None and found.order.tolist() == order)


@pytest.mark.parametrize("groups", [["g", "g"], [1, 2, 3, 4], [b"g"] * 4, ["g", "g", "g", "\ud800"]])
def test_keys_that_are_no_texts_are_left_to_validation(groups: list[Any]) -> None:
    assert spread({"group_id": groups, "trajectory_id": "t"}, "run", "rollout", 4, 4) is None


def test_what_no_key_names_goes_with_its_run() -> None:
    columns: dict[str, dict[str, Any]] = {"rollout": {}, "teacher": {"group_id": ["g", "h"]}}
    for topic, keys in columns.items():
        found = spread(keys, "run", topic, 4, 2)
        assert found is not None
        assert found.num_rows == {partition_of("run", 4): 2}


def test_an_array_in_a_list_may_be_used_again_by_its_owner() -> None:
    log = Log(LONG_S)
    ids = np.array([5, 6], dtype=np.int32)
    with recorder(log) as opened:
        start(opened, "t", prompt_token_ids=ids)
        ids[:] = 99
        opened.flush()
    (rows,) = log.lanes()
    assert rows[0]["rollout_started"]["prompt_token_ids"] == [5, 6]


def test_held_rows_of_different_columns_fill_one_record() -> None:
    log = Log(LONG_S)
    with recorder(log) as opened:
        start(opened, "t0", prompt_token_ids=[1])
        start(opened, "t1", prompt_text="2 + 2?", problem_id="p")
        start(opened, "t2", prompt_token_ids=[3])
        opened.flush()
    assert [record.headers.num_rows for record in log.records] == [3]
    (rows,) = log.lanes()
    told = [(row["problem_id"], *map(row["rollout_started"].get, ("prompt_token_ids", "prompt_text"))) for row in rows]
    assert told == [(None, [1], None), ("p", None, "2 + 2?"), (None, [3], None)]
    assert [row["lane_seq"] for row in rows] == [0, 1, 2]


# Large records are encoded while their caller goes on.


@dataclass
class Encoding:
    """Encoding that waits for the test; so many records were encoded."""

    may_end: threading.Event = field(default_factory=threading.Event)
    num_encoded: int = 0

    def __call__(self, *arguments: Any, **options: Any) -> Record:
        assert self.may_end.wait(20)
        self.num_encoded += 1
        return record_of_lane(*arguments, **options)


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Encoding:
    found = Encoding()
    monkeypatch.setattr("rolltape.ingest.encoder._num_cpus", lambda: 2)
    monkeypatch.setattr("rolltape.ingest.encoder.record_of_lane", found)
    return found


def large(matrix: np.ndarray) -> dict[str, Any]:
    """Columns of a batch that makes several records."""
    names = [f"t{row}" for row in range(len(matrix))]
    return {"trajectory_id": names, "attempt": 0, "group_id": "g", "token_ids": matrix}


def token_ids(log: Log) -> list[int]:
    (lane,) = log.lanes()
    assert [row["lane_seq"] for row in lane] == list(range(len(lane)))
    return [number for row in lane for number in row["token_ids"]]


def test_a_caller_goes_on_while_its_large_records_are_encoded(encoding: Encoding) -> None:
    log = Log(LONG_S)
    matrix = np.full((8, 40_000), 7, dtype=np.int32)
    with recorder(log) as opened:
        opened.record_batch("observation_received", large(matrix))
        matrix[:] = 9
        assert (log.records, encoding.num_encoded) == ([], 0)
        encoding.may_end.set()
        # Nobody calls again: the recorder's own thread sends what was encoded.
        deadline = time.monotonic() + 20
        while sum(record.headers.num_rows for record in log.records) < 8:
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.002)
    assert len(log.records) > 1
    assert set(token_ids(log)) == {7}


def test_a_lane_keeps_its_order_while_its_records_are_encoded(encoding: Encoding) -> None:
    log = Log(LONG_S)
    with recorder(log) as opened:
        opened.record_batch("observation_received", large(np.zeros((8, 40_000), dtype=np.int32)))
        opened.record_batch("observation_received", large(np.ones((1, 4), dtype=np.int32)))
        threading.Timer(0.05, encoding.may_end.set).start()
        opened.flush()
        assert token_ids(log) == [0] * 320_000 + [1] * 4


def test_little_of_what_is_encoded_waits_in_memory(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.ingest.encoder._KEPT_BYTES", 1 << 20)
    log = Log(LONG_S)
    threading.Timer(0.05, encoding.may_end.set).start()
    with recorder(log) as opened:
        opened.record_batch("observation_received", large(np.zeros((8, 40_000), dtype=np.int32)))
        assert encoding.num_encoded > 0


def test_where_nothing_is_held_back_a_callers_arrays_are_its_own_after_the_call(encoding: Encoding) -> None:
    log = Log(0.0)
    threading.Timer(0.05, encoding.may_end.set).start()
    with recorder(log) as opened:
        opened.record_batch("observation_received", large(np.zeros((8, 40_000), dtype=np.int32)))
        assert encoding.num_encoded == len(log.records) > 1


def test_what_a_thread_could_not_send_is_an_error_of_the_next_call(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(LONG_S)
    refused = threading.Event()

    def refuse(_self: MemoryProducer, _record: Any, **_: Any) -> None:
        refused.set()
        raise RecordTooLargeError("refused")

    with recorder(log) as opened:
        opened.record_batch("observation_received", large(np.zeros((8, 40_000), dtype=np.int32)))
        with monkeypatch.context() as patch:
            patch.setattr(MemoryProducer, "send", refuse)
            encoding.may_end.set()
            assert refused.wait(20)
            with pytest.raises(RecordTooLargeError):
                start(opened, "t")
        start(opened, "t", group="g")
        opened.flush()
        rows = [row for lane in log.lanes() for row in lane]
    assert [row["lane_seq"] for row in rows] == list(range(9))
