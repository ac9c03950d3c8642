"""The committer: rounds, failures, lost answers, fencing, taking over; and the archive below it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rolltape.ingest import upkeep as upkeep_module
from rolltape.ingest.archive import Archive, Outcome
from rolltape.ingest.committer import Committer, CommitterOptions
from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.lake_target import LakeTarget
from rolltape.ingest.lanes import Lane
from rolltape.ingest.memory import MemoryTarget
from rolltape.ingest.recorder import Recorder
from rolltape.ingest.upkeep import Upkeep
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    CommitterFencedError,
    ConfigError,
    FlushTimeout,
    LaneGapError,
    StorageFullError,
    StoreError,
)
from rolltape.store.lake import Lake

QUICK = CommitterOptions(rescan_s=1e-6, linger_s=0.0, maintenance=False)
ROLLOUT = Partition("rollout", 0)


def record(number: int, *, producer_id: str = "p", event_id: str | None = None) -> Record:
    columns: dict[str, Any] = {
        "event_id": event_id or f"{producer_id}-{number}",
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": producer_id,
        "producer_epoch": 1,
        "lane_seq": [number],
        "recorded_at": pa.scalar(0, pa.timestamp("us", tz="UTC")),
        "trajectory_id": "t",
        "attempt": 0,
        "event_index": number,
    }
    return make_record(build_batch("rollout_started", columns, 1).batch)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def log(lake: Lake) -> Iterator[EmbeddedLog]:
    with EmbeddedLog(lake, "external") as opened:
        yield opened


@pytest.fixture
def committer(lake: Lake) -> Iterator[Committer]:
    opened = Committer(Lake.open(lake.location), QUICK)
    yield opened
    opened.close()


def indexes(lake: Lake) -> list[int]:
    found: list[int] = lake.read("rollout_started")["event_index"].to_pylist()
    return found


# Rounds.


def test_a_round_commits_everything_that_is_there(lake: Lake, log: EmbeddedLog, committer: Committer) -> None:
    one, two = log.producer("p"), log.producer("q")
    before = lake.snapshot().version
    assert not committer.run_once()
    for number in range(3):
        one.send(record(number))
        two.send(record(number, producer_id="q"))
    assert committer.run_once()
    assert not committer.run_once()
    assert lake.snapshot().version == before + 1
    assert sorted(indexes(lake)) == [0, 0, 1, 1, 2, 2]
    transactions = lake.snapshot().transactions
    assert transactions["lane/p/1/rollout/0"] == transactions["lane/q/1/rollout/0"] == 2
    assert transactions["log/rollout/0"] == 5


def test_a_new_committer_goes_on_without_doubling(lake: Lake, log: EmbeddedLog) -> None:
    producer = log.producer("p")
    for number in range(6):
        producer.send(record(number))
        opened = Committer(Lake.open(lake.location), QUICK)
        opened.run_once()
        opened.close()
    assert indexes(lake) == list(range(6))
    assert lake.snapshot().transactions["log/rollout/0"] == 5


def test_spools_of_closed_producers_go_once_archived(lake: Lake, log: EmbeddedLog, committer: Committer) -> None:
    for number in range(3):
        producer = log.producer("p")
        producer.send(record(number))
        producer.close()
    folder = lake.spool_path / "producers" / "p"
    assert len(list(folder.glob("0*"))) == 3
    committer.drain()
    committer.run_once()
    assert list(folder.glob("0*")) == []
    assert log.producer("p").epoch == 4


def test_a_full_disk_loses_nothing_and_is_tried_again(
    lake: Lake, log: EmbeddedLog, committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = log.producer("p")
    for number in range(4):
        producer.send(record(number))

    def full(*_: Any) -> None:
        raise StorageFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(LakeTarget, "append", full)
        for _ in range(2):
            with pytest.raises(StorageFullError):
                committer.run_once()
    assert indexes(lake) == []
    assert committer.run_once()
    assert indexes(lake) == [0, 1, 2, 3]


def test_a_commit_whose_answer_was_lost_is_harmless(
    lake: Lake, log: EmbeddedLog, committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = log.producer("p")
    producer.send(record(0))
    append = LakeTarget.append

    def lost(self: LakeTarget, *arguments: Any) -> None:
        append(self, *arguments)
        raise OSError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(LakeTarget, "append", lost)
        with pytest.raises(OSError, match="reset"):
            committer.run_once()
    producer.send(record(1))
    assert committer.run_once()
    assert indexes(lake) == [0, 1]
    assert lake.snapshot().transactions["log/rollout/0"] == 1


def test_a_flush_of_a_lane_that_stands_still_names_the_range(
    lake: Lake, log: EmbeddedLog, committer: Committer
) -> None:
    producer = log.producer("p")
    for number in (0, 4):
        producer.send(record(number))
    committer.run_once()
    assert producer.acknowledged(ROLLOUT) == 0
    with pytest.raises(LaneGapError, match="1 to 3 are missing"):
        producer.flush("logged", 0.0)
    for number in (1, 2, 3):
        producer.send(record(number))
    committer.drain()
    producer.flush("logged", 0.0)
    assert indexes(lake) == [0, 1, 2, 3, 4]
    producer.send(record(5))
    with pytest.raises(FlushTimeout, match="the committer is behind"):
        producer.flush("logged", 0.0)


def test_a_gap_survives_a_restart_and_is_alarmed_once(lake: Lake, log: EmbeddedLog) -> None:
    producer = log.producer("p")
    for number in (0, 2, 3):
        producer.send(record(number))
    for _ in range(3):
        opened = Committer(Lake.open(lake.location), QUICK)
        opened.run_once()
        opened.run_once()
        opened.close()
    assert lake.read("alarm_raised").num_rows == 1
    producer.send(record(1))
    opened = Committer(Lake.open(lake.location), QUICK)
    opened.drain()
    opened.close()
    assert indexes(lake) == [0, 1, 2, 3]


def test_a_damaged_spool_value_becomes_a_dead_letter(lake: Lake, log: EmbeddedLog, committer: Committer) -> None:
    producer = log.producer("p")
    for number in range(3):
        producer.send(record(number))
    (path,) = (lake.spool_path / "producers" / "p").glob("0*/*.frames")
    data = bytearray(path.read_bytes())
    middle = len(data) // 3 + len(data) // 6
    data[middle] ^= 0xFF
    path.write_bytes(data)
    committer.run_once()
    assert indexes(lake) == [0, 2]
    (letter,) = [row["dead_letter"] for row in lake.read("dead_letter").to_pylist()]
    assert (letter["reason"], letter["first_lane_seq"], letter["last_lane_seq"]) == ("truncated_payload", 1, 1)


# One at a time.


def test_a_second_committer_is_refused(lake: Lake, committer: Committer) -> None:
    with pytest.raises(CommitterFencedError, match="only committer"):
        Committer(lake, QUICK)
    with pytest.raises(CommitterFencedError):
        EmbeddedLog(lake, "thread")
    committer.close()
    Committer(lake, QUICK).close()


def test_a_committer_that_missed_another_ones_commits_is_fenced(lake: Lake, log: EmbeddedLog) -> None:
    """Two machines over one lake: each has a lock of its own, the marks decide."""
    producer = log.producer("p")
    producer.send(record(0))
    late = Archive(LakeTarget(Lake.open(lake.location)))
    late.offer(record(0))
    first = Committer(Lake.open(lake.location), QUICK)
    first.run_once()
    with pytest.raises(CommitterFencedError):
        late.commit()
    assert indexes(lake) == [0]
    first.close()


def test_auto_takes_over_when_the_other_ends(lake: Lake) -> None:
    first, second = EmbeddedLog(lake, "auto"), EmbeddedLog(Lake.open(lake.location), "auto")
    with Recorder(second, producer_id="p", run_id="run") as recorder:
        recorder.record("rollout_started", trajectory_id="t", attempt=0)
        recorder.flush("logged", 10)
        first.close()
        recorder.record("rollout_started", trajectory_id="t", attempt=0)
        recorder.flush("logged", 10)
    second.close()
    assert indexes(lake) == [0, 1]


def test_closing_drains(lake: Lake) -> None:
    with EmbeddedLog(lake, "thread") as log, Recorder(log, producer_id="p", run_id="run") as recorder:
        for _ in range(10):
            recorder.record("rollout_started", trajectory_id="t", attempt=0)
    assert indexes(lake) == list(range(10))


def test_without_a_committer_a_flush_says_so(log: EmbeddedLog) -> None:
    producer = log.producer("p")
    producer.send(record(0))
    producer.flush("spooled", 1)
    with pytest.raises(FlushTimeout, match="no committer runs"):
        producer.flush("logged", 0.05)


def test_what_the_committer_died_of_reaches_the_flush(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StoreError("expected a writable lake, got a read-only one")

    monkeypatch.setattr(LakeTarget, "append", refuse)
    log = EmbeddedLog(lake, "thread")
    producer = log.producer("p")
    producer.send(record(0))
    with pytest.raises(StoreError, match="read-only"):
        producer.flush("logged", 10)
    with pytest.raises(StoreError, match="read-only"):
        log.close()


def test_a_read_only_place_says_so(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="is the lake read-only"):
        Committer(lake, QUICK)
    with EmbeddedLog(lake, "external") as log, pytest.raises(StoreError, match="is the lake read-only"):
        log.producer("p")


def test_options_and_modes_are_checked(lake: Lake) -> None:
    with pytest.raises(ConfigError, match="poll_s"):
        CommitterOptions(poll_s=0)
    with pytest.raises(ConfigError, match="expected auto, thread or external"):
        EmbeddedLog(lake, "sometimes")  # type: ignore[arg-type]


def test_run_stops_and_drains(lake: Lake, log: EmbeddedLog, committer: Committer) -> None:
    producer = log.producer("p")
    stop = threading.Event()
    stop.set()
    producer.send(record(0))
    committer.run(stop)
    assert indexes(lake) == [0]


# The archive, as a sink with offsets of its own log uses it.


class Recorded(MemoryTarget):
    """A target that keeps the transactions of each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[Mapping[str, int | None]] = []

    def append(self, tables: Any, transactions: Any, expected: Any) -> int:
        self.expected.append(expected)
        return super().append(tables, transactions, expected)


def test_given_offsets_are_kept_and_never_stored_past_a_parked_record() -> None:
    target = Recorded()
    archive = Archive(target)
    assert archive.offer(record(0), offset=10) is Outcome.ACCEPTED
    assert archive.offer(record(2), offset=11) is Outcome.PARKED
    assert archive.offer(record(0, producer_id="q"), offset=12) is Outcome.ACCEPTED
    archive.commit()
    assert target.transactions()["log/rollout/0"] == 10
    assert target.expected[0] == {"lane/p/1/rollout/0": None, "lane/q/1/rollout/0": None, "log/rollout/0": None}
    restarted = Archive(target)
    assert restarted.last_offset(ROLLOUT) == 10
    assert restarted.offer(record(1), offset=13) is Outcome.ACCEPTED
    assert restarted.offer(record(2), offset=11) is Outcome.ACCEPTED
    assert restarted.offer(record(0, producer_id="q"), offset=12) is Outcome.DUPLICATE
    restarted.commit()
    assert target.transactions()["log/rollout/0"] == 13
    assert target.transactions()["lane/p/1/rollout/0"] == 2


def test_reload_forgets_what_was_staged() -> None:
    archive = Archive(MemoryTarget())
    archive.offer(record(0))
    archive.reload()
    assert not archive.has_staged
    assert archive.mark(Lane("p", 1, "rollout", 0)) == -1
    assert archive.commit() is None
    assert archive.offer(record(0)) is Outcome.ACCEPTED


# Maintenance beside the commits.


def test_upkeep_compacts_while_commits_go_on(lake: Lake, log: EmbeddedLog) -> None:
    committer = Committer(Lake.open(lake.location), CommitterOptions(rescan_s=1e-6, linger_s=0.0))
    upkeep = Upkeep(lake)
    producer = log.producer("p")
    for number in range(120):
        producer.send(record(number))
        upkeep.after_round(committed=committer.run_once())
        upkeep.after_round(committed=committer.run_once())
    upkeep.close()
    committer.close()
    assert sorted(indexes(lake)) == list(range(120))
    assert len(lake.snapshot().files) < 100


def test_upkeep_compacts_from_memory_what_the_committer_just_wrote(lake: Lake, feed: Any) -> None:
    upkeep = Upkeep(lake)
    for _ in range(upkeep_module._BUSY_COMMITS):
        lake.append(*feed.commit())
        upkeep.after_round(committed=True)
    written = {file.path for file in lake.snapshot().files}
    upkeep.close()
    compacted = written - {file.path for file in lake.snapshot().files}
    assert compacted
    assert not [path for path in compacted if path in lake.recent]


def test_upkeep_that_fails_is_put_off(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise StorageFullError("no room")

    monkeypatch.setattr(upkeep_module, "maintain", full)
    upkeep = Upkeep(lake)
    for _ in range(8):
        upkeep.after_round(committed=True)
    deadline = time.monotonic() + 10
    while not caplog.text and time.monotonic() < deadline:
        upkeep.after_round(committed=False)
        time.sleep(0.001)
    upkeep.close()
    assert "nothing is lost: no room" in caplog.text
