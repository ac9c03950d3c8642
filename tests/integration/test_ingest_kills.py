"""kill -9 of recorder and committer, and full disks: nothing acknowledged is lost, nothing doubled.

The judge is a ledger of the ids that were acknowledged at level spooled, fsynced by the writing process itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rolltape.ingest.committer import Committer
from rolltape.schema.kinds import KINDS
from rolltape.store.lake import Lake

WRITER = """
import os, sys, time
from rolltape.ingest import EmbeddedLog, Recorder
from rolltape.store.lake import Lake
lake, producer_id = Lake.open(sys.argv[1]), sys.argv[3]
ledger = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
recorder = Recorder(EmbeddedLog(lake, "external"), producer_id=producer_id, run_id="run")
number = 0
while True:
    ids = [f"{producer_id}-{recorder.producer.epoch}-{number + row}" for row in range(3)]
    number += 3
    recorder.record_batch("action_sampled", {
        "event_id": ids, "trajectory_id": [f"{producer_id}-{recorder.producer.epoch}"] * 3, "attempt": 0,
        "token_ids": [[number, 2, 3]] * 3, "rollout_log_probs": [[-0.1, -0.2, -0.3]] * 3})
    recorder.record(
        "rollout_dispatched", event_id=ids[0] + "-d", trajectory_id="t", attempt=0, problem_id="q", purpose="train")
    recorder.flush("spooled")
    os.write(ledger, "".join(f"{event_id}\\n" for event_id in [*ids, ids[0] + "-d"]).encode())
    os.fsync(ledger)
    time.sleep(0.003)
"""


class Scene:
    """A lake, its processes and the ledger of what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake.create(folder / "lake")
        self.folder = folder
        self.ledger = folder / "ledger"
        self.processes: list[subprocess.Popen[bytes]] = []

    def _start(self, arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "log").open("ab")
        process = subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **environment}, stdout=log, stderr=log
        )
        log.close()
        self.processes.append(process)
        return process

    def writer(self, producer_id: str = "p") -> subprocess.Popen[bytes]:
        return self._start(["-c", WRITER, self.lake.location.path, str(self.ledger), producer_id])

    def committer(self, crash: str = "") -> subprocess.Popen[bytes]:
        return self._start(["-m", "rolltape.ingest.committer", self.lake.location.path], ROLLTAPE_CRASH=crash)

    def num_acknowledged(self) -> int:
        return self.ledger.read_bytes().count(b"\n") if self.ledger.exists() else 0

    def num_logged(self) -> int:
        return sum(self.lake.snapshot().transactions.get(f"log/{topic}/0", -1) + 1 for topic in ("rollout", "control"))

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def judge(self) -> int:
        """Drain what is left, then count: every acknowledged event once, lanes and offsets without gap."""
        committer = Committer(Lake.open(self.lake.location))
        committer.drain()
        committer.close()
        tables = {kind: table for kind in KINDS if (table := self.lake.read(kind)).num_rows}
        assert set(tables) == {"action_sampled", "rollout_dispatched"}, (self.folder / "log").read_text()
        rows = pa.concat_tables(
            [
                table.select(["event_id", "producer_id", "producer_epoch", "lane_seq", "log_offset"])
                for table in tables.values()
            ]
        )
        ids = rows["event_id"].to_pylist()
        assert len(ids) == len(set(ids))
        assert set(self.ledger.read_text().split()) <= set(ids)
        lanes: dict[tuple[str, int], list[int]] = {}
        for row in rows.to_pylist():
            lanes.setdefault((row["producer_id"], row["producer_epoch"]), []).append(row["lane_seq"])
        for lane, seqs in lanes.items():
            assert sorted(seqs) == list(range(len(seqs))), lane
        offsets = np.unique(rows["log_offset"].to_numpy())
        assert offsets.tolist() == list(range(len(offsets)))
        return len(ids)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    opened = Scene(tmp_path)
    yield opened
    opened.close()


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("window", ["data_file_written", "after_commit"])
def test_a_committer_killed_in_a_window(scene: Scene, window: str) -> None:
    mark = scene.folder / "mark"
    writer = scene.writer()
    killed = scene.committer(f"{window}:4:{mark}")
    assert killed.wait(60) == -signal.SIGKILL
    assert mark.exists()
    logged, acknowledged = scene.num_logged(), scene.num_acknowledged()
    following = scene.committer(f"{window}:4:{mark}")
    until(lambda: scene.num_logged() > logged and scene.num_acknowledged() > acknowledged + 40)
    writer.kill()
    following.terminate()
    assert following.wait(60) == 0
    assert scene.judge() >= scene.num_acknowledged() > 40


def test_kills_at_random_of_recorder_and_committer(scene: Scene) -> None:
    seed = int(os.environ.get("ROLLTAPE_SEED", "1129"))
    chance = random.Random(seed)
    writers = {name: scene.writer(name) for name in ("p", "q")}
    committer = scene.committer()
    until(lambda: scene.num_logged() > 10)
    for _ in range(8):
        time.sleep(chance.uniform(0.05, 0.4))
        victim = chance.choice(["p", "q", "committer"])
        if victim == "committer":
            committer.kill()
            committer.wait()
            committer = scene.committer()
        else:
            writers[victim].kill()
            writers[victim].wait()
            writers[victim] = scene.writer(victim)
    acknowledged, logged = scene.num_acknowledged(), scene.num_logged()
    until(lambda: scene.num_acknowledged() > acknowledged + 40 and scene.num_logged() > logged + 10)
    scene.close()
    assert scene.judge() >= scene.num_acknowledged(), f"seed {seed}"


def limit_file_size(process: subprocess.Popen[bytes], num_bytes: int) -> None:
    """From now on no file of the process grows beyond ``num_bytes``: short writes and errors, as on a full disk."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def test_full_disks_lose_nothing_and_work_goes_on_when_there_is_room(scene: Scene) -> None:
    writer, committer = scene.writer(), scene.committer()
    until(lambda: scene.num_logged() > 10)
    limit_file_size(committer, 100)
    time.sleep(0.5)
    logged, acknowledged = scene.num_logged(), scene.num_acknowledged()
    until(lambda: scene.num_acknowledged() > acknowledged + 40)
    assert scene.num_logged() == logged
    limit_file_size(committer, resource.RLIM_INFINITY)
    until(lambda: scene.num_logged() > logged + 10)
    # The ledger is much smaller than the spool, so this stops the spool alone.
    limit_file_size(
        writer, max(path.stat().st_size for path in scene.lake.spool_path.glob("producers/p/*/*.frames")) + 500
    )
    time.sleep(0.3)
    stopped = scene.num_acknowledged()
    time.sleep(0.3)
    assert scene.num_acknowledged() == stopped
    limit_file_size(writer, resource.RLIM_INFINITY)
    until(lambda: scene.num_acknowledged() > stopped + 40)
    assert writer.poll() is None
    assert committer.poll() is None
    scene.close()
    assert scene.judge() >= scene.num_acknowledged()
