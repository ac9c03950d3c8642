"""A log in memory, a scripted trainer, and workers in threads that may die in the middle of what they record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from rolltape.ingest.memory import MemoryLog
from rolltape.ingest.recorder import Receipt, Recorder
from rolltape.rollout.worker import Worker, WorkerConfig, make_worker
from rolltape.store.location import Location

from .conftest import ScriptedTrainer, TapeReader


class Killed(BaseException):
    """A worker process that is no more; not an Exception, so that nothing catches it."""


class DyingRecorder(Recorder):
    """Records the first rows of the batch that it dies in, then nothing more, as a killed process would."""

    dies_at: tuple[str, int] | None = None
    num_spared = 0  # batches of that kind that still get through

    def record_batch(self, kind: str, columns: Mapping[str, Any], num_rows: int | None = None) -> Receipt:
        if self.dies_at is None or self.dies_at[0] != kind:
            return super().record_batch(kind, columns, num_rows)
        if self.num_spared:
            self.num_spared -= 1
            return super().record_batch(kind, columns, num_rows)
        rows = np.arange(self.dies_at[1])
        if len(rows):
            arrays = {n: v[rows] if isinstance(v, np.ndarray) else v for n, v in columns.items()}
            taken = {
                n: v.take(rows) if hasattr(v, "take") and not isinstance(v, np.ndarray) else v
                for n, v in arrays.items()
            }
            super().record_batch(kind, taken, len(rows))
        raise Killed(f"in {kind}")


class Running:
    """A worker in a thread."""

    def __init__(self, worker: Worker, recorder: Recorder) -> None:
        self.worker = worker
        self.recorder = recorder
        self.status: int | None = None
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.status = self.worker.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.recorder.close()

    def join(self) -> Running:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the worker did not end"
        return self


class Stage:
    """A log, a scripted trainer, and workers."""

    def __init__(self, folder: Path, config: WorkerConfig) -> None:
        self.config = config
        self.log = MemoryLog()
        self.root = Location.parse(str(folder))
        self.trainer = ScriptedTrainer(self.log, self.root)
        self.running: list[Running] = []

    @property
    def tape(self) -> TapeReader:
        return self.trainer.tape

    def worker(self, *, dies_at: tuple[str, int] | None = None, num_spared: int = 0, **changes: Any) -> Running:
        config = dataclasses.replace(self.config, **changes)
        recorder = DyingRecorder(self.log, producer_id=config.producer_id, run_id=config.run_id)
        recorder.dies_at, recorder.num_spared = dies_at, num_spared
        running = Running(make_worker(config, self.log, recorder, self.root), recorder)
        self.running.append(running)
        return running

    def begin(self) -> None:
        """A run whose version 0 is published."""
        self.trainer.start_run()
        self.version_0 = self.trainer.publish(0, step=0)

    def close(self) -> None:
        for running in self.running:
            running.worker.stop()
            running.join()
        self.trainer.close()

    def contents(self, step: int) -> dict[tuple[int, int], tuple[list[int], bytes, list[int], float, str]]:
        """Ids, log-prob bits, version numbers, reward and sampling seed of each complete attempt, by its place."""
        by_id = {(row["trajectory_id"], row["attempt"]): row for row in self.tape.rows("rollout_dispatched")}
        actions = {(row["trajectory_id"], row["attempt"]): row for row in self.tape.rows("action_sampled")}
        gone = {(row["trajectory_id"], row["attempt"]) for row in self.tape.rows("attempt_abandoned")}
        found = {}
        for row in self.tape.rows("reward_assigned"):
            key = (row["trajectory_id"], row["attempt"])
            dispatch, action = by_id[key], actions[key]
            if dispatch["training_step"] != step or key in gone:
                continue
            place = (dispatch["group_ordinal"], dispatch["member"])
            assert place not in found, f"two complete attempts at {place}"
            bits = np.array(action["rollout_log_probs"], dtype=np.float32).tobytes()
            versions = [run["version"] for run in action["version_runs"]]
            found[place] = (action["token_ids"], bits, versions, row["scalar"], dispatch["problem_id"])
        return found
