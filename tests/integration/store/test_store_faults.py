"""Faults: no room, no right to write, death between any two steps, several committers at once."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rolltape.schema.errors import StorageFullError, StoreError
from rolltape.store import Lake
from rolltape.store.maintenance import compact, vacuum
from rolltape.store.transaction_log import TransactionLog

WRITER = pathlib.Path(__file__).with_name("lane_writer.py")
NOBODY = 65_534


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def start_writer(lake: Lake, lane: str, num_commits: int, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WRITER), lake.location.path, lane, str(num_commits)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def lane_of(lake: Lake, lane: str) -> list[int]:
    """Sequence numbers of the lane's events in the table, in the order they are read."""
    rows = lake.read("reward_assigned", columns=["producer_id", "lane_seq"])
    return [row["lane_seq"] for row in rows.to_pylist() if row["producer_id"] == lane]


@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit: what a full disk looks like to one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_loses_nothing_and_recovers(lake: Lake, feed: Any) -> None:
    lake.append(*feed.commit())
    files = len(lake.table.list())
    tables, transactions = feed.commit()
    with file_size_limit(2_000), pytest.raises(StorageFullError, match="no room left"):
        lake.append(tables, transactions)
    assert len(lake.table.list()) == files
    assert Lake.open(lake.location).read("reward_assigned").num_rows == 4
    lake.append(tables, transactions)
    assert lake.read("reward_assigned").num_rows == 8


def test_file_that_fits_beside_one_that_does_not_is_removed(lake: Lake, feed: Any) -> None:
    tables, transactions = feed.commit(num_rollouts=4, num_tokens=50_000)
    with file_size_limit(100_000), pytest.raises(StorageFullError):
        lake.append(tables, transactions)
    assert lake.table.list() == []


def test_disk_that_fills_at_the_log_keeps_the_table(lake: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, transactions = feed.commit()
    try_commit = TransactionLog.try_commit

    def without_room(self: TransactionLog, *arguments: Any) -> Any:
        with file_size_limit(100):
            return try_commit(self, *arguments)

    monkeypatch.setattr(TransactionLog, "try_commit", without_room)
    with pytest.raises(StorageFullError):
        lake.append(tables, transactions)
    monkeypatch.undo()
    assert [info.path for info in lake.table.list()] == []
    assert all(info.path.endswith(".json") for info in lake.log.folder.list())
    lake.append(tables, transactions)
    assert Lake.open(lake.location).read("reward_assigned").num_rows == 4


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """As a user who may not write; root may everywhere, so it becomes nobody for the while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_lake_is_read_and_refuses_writes_by_name(feed: Any) -> None:
    root = pathlib.Path(tempfile.mkdtemp())
    root.chmod(0o755)
    try:
        lake = Lake.create(root / "lake")
        lake.append(*feed.commit())
        tables, transactions = feed.commit()
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            folder.chmod(0o555)
        with without_rights():
            assert Lake.open(root / "lake").read("reward_assigned").num_rows == 4
            with pytest.raises(StoreError, match="read-only"):
                Lake.open(root / "lake").append(tables, transactions)
            with pytest.raises(StoreError, match="read-only"):
                Lake.create(root / "another")
        assert Lake.open(root / "lake").snapshot().version == lake.snapshot().version
    finally:
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        shutil.rmtree(root)


def test_death_before_the_commit_leaves_an_orphan_and_no_rows(lake: Lake, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    writer = start_writer(lake, "a", 3, ROLLTAPE_CRASH=f"data_file_written:2:{mark}")
    said, _ = writer.communicate(timeout=120)
    assert (writer.returncode, said.split()) == (-9, ["2"])
    assert mark.exists()
    assert lane_of(lake, "a") == [0, 1, 2]
    assert len(lake.table.list()) == 2
    again = start_writer(lake, "a", 2)
    assert again.communicate(timeout=120)[0].split() == ["5", "8"]
    assert lane_of(lake, "a") == list(range(9))
    assert len(vacuum(lake, safe_age_s=-1)) == 1
    assert lane_of(Lake.open(lake.location), "a") == list(range(9))


def test_death_after_the_commit_doubles_nothing(lake: Lake, tmp_path: pathlib.Path) -> None:
    writer = start_writer(lake, "a", 3, ROLLTAPE_CRASH=f"after_commit:2:{tmp_path / 'mark'}")
    said, _ = writer.communicate(timeout=120)
    assert (writer.returncode, said.split()) == (-9, ["2"])
    assert lane_of(lake, "a") == list(range(6))
    again = start_writer(lake, "a", 1)
    assert again.communicate(timeout=120)[0].split() == ["8"]
    assert lane_of(lake, "a") == list(range(9))


def test_random_kills_lose_nothing_acknowledged(lake: Lake) -> None:
    pause = random.Random(0)
    for _ in range(5):
        writer = start_writer(lake, "a", 10_000)
        assert writer.stdout is not None
        acknowledged = int(writer.stdout.readline())
        time.sleep(pause.uniform(0, 0.15))
        writer.kill()
        acknowledged = max([acknowledged, *map(int, writer.communicate()[0].split())])
        found = lane_of(Lake.open(lake.location), "a")
        assert found == list(range(len(found)))
        assert found[-1] >= acknowledged


def test_of_two_committers_on_one_lane_one_is_fenced(lake: Lake) -> None:
    writers = [start_writer(lake, "a", 150) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
    said = [writer.communicate(timeout=240)[0].split() for writer in writers]
    codes = sorted(writer.returncode for writer in writers)
    assert codes in ([0, 3], [0, 0]), said
    found = lane_of(lake, "a")
    assert found == list(range(len(found)))
    assert len(found) == 3 * sum(word != "fenced" for words in said for word in words)


def test_lanes_of_several_processes_all_land_beside_compactions(lake: Lake) -> None:
    writers = [start_writer(lake, lane, 25) for lane in "abc"]
    stop = threading.Event()
    compactions: list[int | None] = []

    def keep_compacting() -> None:
        other = Lake.open(lake.location)
        while not stop.is_set():
            compactions.append(compact(other).version)

    thread = threading.Thread(target=keep_compacting)
    thread.start()
    try:
        for writer in writers:
            writer.communicate(timeout=240)
    finally:
        stop.set()
        thread.join()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert any(version is not None for version in compactions)
    for lane in "abc":
        assert sorted(lane_of(lake, lane)) == list(range(75))
    assert lake.snapshot().transactions["lane/b/1/rollout/0"] == 74
