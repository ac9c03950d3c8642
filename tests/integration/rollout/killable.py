"""A run whose worker is a process that may be killed, on an embedded log with a scripted trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.store.lake import Lake
from rolltape.store.location import Location

from .conftest import ScriptedTrainer


class Run:
    """A lake, its committer, a scripted trainer, and one worker process that is started again whenever it dies."""

    def __init__(self, folder: Path, *, worker: str, per_step: int, num_steps: int) -> None:
        self.folder = folder
        self._worker = worker
        self._per_step = per_step
        self._num_steps = num_steps
        self.lake = Lake.create(Location.parse(str(folder / "lake")))
        self.log = EmbeddedLog(self.lake, committer="thread")
        self.trainer = ScriptedTrainer(self.log, self.lake.location)
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start_worker(self, environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / "worker.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self._worker, self.lake.location.url],
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=output,
            )
        self.num_starts += 1

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(30) == -signal.SIGKILL

    def step(self, step: int, key: dict[str, Any]) -> dict[str, Any]:
        """Commit the step's version, wait for its rollouts, complete it; gives the next version."""
        self.trainer.commit(key)
        self.trainer.wait_for_rewards(step, self._per_step)
        self.trainer.complete(step, version_out=step, final=step == self._num_steps)
        return self.trainer.publish(step, step=step)

    def finish(self, key: dict[str, Any]) -> None:
        assert self.process is not None
        self.trainer.commit(key)
        assert self.process.wait(60) == 0, (self.folder / "worker.log").read_text()
        self.trainer.tape.refresh()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.trainer.close()
        self.log.close()
