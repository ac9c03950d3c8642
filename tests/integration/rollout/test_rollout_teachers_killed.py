"""The scoring service as a process, killed and started again: no score twice, none lost, the same bits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.teacher_lakes import ended_run

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.spool_layout import producers_folder
from rolltape.ingest.spool_reader import ProducerReader
from rolltape.rollout.teacher_models import SHUFFLED
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.verify import verify

from .teacher_stage import Rollouts, Scores, ServiceProcess

GROUPS, SIZE = 12, 4


class Run:
    """A lake with its committer, rollouts, and one service process."""

    def __init__(self, folder: Path, teachers: tuple[str, str], kind: str = "straight") -> None:
        self.lake = Lake.create(Location.parse(str(folder / "lake")))
        self.log = EmbeddedLog(self.lake, committer="thread")
        self.rollouts = Rollouts(self.log)
        self.rollouts.start_run({"p-up": "up", "p-down": "down"})
        self.service = ServiceProcess(folder, self.lake.location.url, teachers, kind)

    def num_spooled(self) -> int:
        """Scores that the service has written to this machine's disk, as a committer would find them."""
        spool = ProducerReader(producers_folder(self.lake.spool_path) / "run.teachers")
        try:
            heads = [spooled.record.headers for _, spooled in spool.read(1 << 24)]
        finally:
            spool.close()
        return sum(head.num_rows for head in heads if head.kind == "teacher_scored")

    def finish(self) -> Scores:
        """The run ends; what the service has written."""
        self.rollouts.finish()
        self.service.wait_for_end()
        return self.rollouts.scored()

    def close(self) -> None:
        self.service.close()
        self.rollouts.close()
        self.log.close()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("teachers")
    return ended_run(folder / "up", "up", 21), ended_run(folder / "down", "down", 22)


@pytest.fixture(scope="module", params=["straight", "shuffled"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, teachers: tuple[str, str], kind: str) -> Scores:
    """What a service that starts late and is never killed writes."""
    run = Run(tmp_path_factory.mktemp("calm"), teachers, kind)
    try:
        run.rollouts.roll(range(GROUPS), SIZE)
        run.service.start()
        run.rollouts.wait_for_scores(GROUPS * SIZE)
        return run.finish()
    finally:
        run.close()


@pytest.fixture
def run(tmp_path: Path, teachers: tuple[str, str], kind: str) -> Iterator[Run]:
    made = Run(tmp_path, teachers, kind)
    yield made
    made.close()


def test_killed_between_and_within_groups(run: Run, calm: Scores, kind: str) -> None:
    run.service.start()
    seed = int(time.time())
    print(f"seed of the kills: {seed}")
    generator = np.random.default_rng(seed)
    for begin in range(0, GROUPS, GROUPS // 2):
        run.rollouts.roll(range(begin, begin + GROUPS // 2), SIZE)
        run.rollouts.wait_for_scores(begin * SIZE + 1)
        time.sleep(float(generator.uniform(0.0, 0.05)))
        run.service.kill()
        run.service.start()
    run.rollouts.wait_for_scores(GROUPS * SIZE)
    assert run.finish() == calm
    suffix = SHUFFLED if kind == "shuffled" else ""
    assert {teacher for teacher, _, _ in calm.values()} == {f"up@final{suffix}", f"down{suffix}"}
    run.rollouts.close()
    run.log.close()
    report = verify(Lake.open(run.lake.location, read_only=True))
    teachers = next(result for result in report.checks if result.check == "teachers")
    assert (teachers.num_broken, teachers.num_checked) == (0, GROUPS * SIZE)


def test_killed_with_scores_that_nobody_has_acknowledged(run: Run, calm: Scores) -> None:
    run.rollouts.roll(range(GROUPS // 2), SIZE)
    run.log.close()  # nothing is archived any more
    run.service.start()
    run.rollouts.tape.wait_for("scores in the spool", lambda: run.num_spooled() >= GROUPS // 3 * SIZE)
    run.service.kill()
    assert not run.rollouts.scores()
    run.service.start()
    with EmbeddedLog(run.lake, committer="thread"):
        run.rollouts.roll(range(GROUPS // 2, GROUPS), SIZE)
        run.rollouts.wait_for_scores(GROUPS * SIZE)
        assert run.finish() == calm
