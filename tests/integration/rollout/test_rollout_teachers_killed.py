"""The scoring service as a process, killed and started again: no score twice, none lost, the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.teacher_lakes import ended_run

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.rollout.teacher_models import SHUFFLED
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.verify import verify

from .teacher_stage import Rollouts

GROUPS, SIZE = 12, 4
SERVICE = """
import sys
from rolltape.rollout.teacher_models import TeacherRoute
from rolltape.rollout.teachers import TeacherConfig, run_teachers
lake, up, down, shuffled = sys.argv[1:]
sys.exit(run_teachers(TeacherConfig(
    lake=lake, run_id="run", poll_s=0.02, token_budget=64, shuffle_scores=shuffled == "shuffled", groups_per_step=4,
    group_size=4, rollouts_per_unit=8,
    routes=(
        TeacherRoute(domain="up", lake=up, run="up"),
        TeacherRoute(domain="down", lake=down, run="down", version="1", teacher_id="down"),
    ),
)))
"""

Scores = dict[tuple[str, int, int], tuple[str, str, bytes]]


class Run:
    """A lake with its committer, rollouts, and one service process."""

    def __init__(self, folder: Path, teachers: tuple[str, str], kind: str = "straight") -> None:
        self.folder = folder
        self.lake = Lake.create(Location.parse(str(folder / "lake")))
        self.log = EmbeddedLog(self.lake, committer="thread")
        self.rollouts = Rollouts(self.log)
        self.rollouts.start_run({"p-up": "up", "p-down": "down"})
        self._arguments = [self.lake.location.url, *teachers, kind]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "service.log").open("ab") as output:
            command = [sys.executable, "-c", SERVICE, *self._arguments]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.wait(30) == -signal.SIGKILL

    def roll(self, ordinals: range) -> None:
        for ordinal in ordinals:
            self.rollouts.group("p-up" if ordinal % 3 else "p-down", ordinal=ordinal, size=SIZE)

    def finish(self) -> Scores:
        """The run ends; what the service has written."""
        assert self.process is not None
        self.rollouts.finish()
        assert self.process.wait(60) == 0, (self.folder / "service.log").read_text()
        found: Scores = {}
        for row in self.rollouts.scores():
            key = (row["trajectory_id"], row["attempt"], row["segment_index"])
            assert key not in found, f"{key} was scored twice"
            bits = np.array(row["log_probs"], np.float32).tobytes()
            found[key] = (row["teacher_id"], row["weights_digest"], bits)
        return found

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.rollouts.close()
        self.log.close()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("teachers")
    return ended_run(folder / "up", "up", 21), ended_run(folder / "down", "down", 22)


@pytest.fixture(params=["straight", "shuffled"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def calm(tmp_path: Path, teachers: tuple[str, str], kind: str) -> Scores:
    """What a service that starts late and is never killed writes."""
    (tmp_path / "calm").mkdir()
    run = Run(tmp_path / "calm", teachers, kind)
    try:
        run.roll(range(GROUPS))
        run.start()
        run.rollouts.wait_for_scores(GROUPS * SIZE)
        return run.finish()
    finally:
        run.close()


@pytest.fixture
def run(tmp_path: Path, teachers: tuple[str, str], kind: str) -> Iterator[Run]:
    (tmp_path / "killed").mkdir()
    made = Run(tmp_path / "killed", teachers, kind)
    yield made
    made.close()


def test_killed_between_and_within_groups(run: Run, calm: Scores, kind: str) -> None:
    run.start()
    seed = int(time.time())
    print(f"seed of the kills: {seed}")
    generator = np.random.default_rng(seed)
    for begin in range(0, GROUPS, GROUPS // 2):
        run.roll(range(begin, begin + GROUPS // 2))
        run.rollouts.wait_for_scores(begin * SIZE + 1)
        time.sleep(float(generator.uniform(0.0, 0.05)))
        run.kill()
        run.start()
    run.rollouts.wait_for_scores(GROUPS * SIZE)
    assert run.finish() == calm
    suffix = SHUFFLED if kind == "shuffled" else ""
    assert {teacher for teacher, _, _ in calm.values()} == {f"up@final{suffix}", f"down{suffix}"}
    run.rollouts.close()
    run.log.close()
    report = verify(Lake.open(run.lake.location, read_only=True))
    teachers = next(result for result in report.checks if result.check == "teachers")
    assert (teachers.num_broken, teachers.num_checked) == (0, GROUPS * SIZE)
