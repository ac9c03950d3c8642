"""Workers that run ahead of a scripted trainer, and engines that start late."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from rolltape.ingest.log import Delivery
from rolltape.ingest.memory import MemoryLog, MemoryReader
from rolltape.ingest.recorder import Recorder
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.process import DONE, TERMINATED
from rolltape.rollout.step import group_id_of
from rolltape.rollout.worker import Worker, WorkerConfig, make_worker
from rolltape.schema.cursor import Cursor
from rolltape.store.location import Location

from .conftest import ScriptedTrainer

GROUPS, SIZE, LEAD = 4, 2, 2
CONFIG = WorkerConfig(
    lake="memory://",
    run_id="run",
    num_workers=2,
    environment_options={"num_heldout": 20},
    seed=5,
    groups_per_step=GROUPS,
    group_size=SIZE,
    sampling=SamplingConfig(max_tokens=4),
    max_lead_steps=LEAD,
    poll_s=0.02,
    evaluate_heldout=False,
)
OWN = GROUPS // CONFIG.num_workers
BOUND = (1 + LEAD) * OWN


class KeyedLog(MemoryLog):
    """A log that keeps the newest versions apart, as Kafka's compacted topic does, and counts what is read."""

    def __init__(self) -> None:
        super().__init__(num_partitions=2)
        self.keeps_versions = True
        self.num_weights_rows = 0

    def newest_versions(self) -> list[Delivery]:
        rows = [part for commit in self.target.commits for part in commit if part.kind.startswith("weights_")]
        committed = [part for part in rows if part.kind == "weights_committed"]
        if not committed or not self.keeps_versions:
            return []
        newest = max(row["version"] for part in committed for row in part.table["weights_committed"].to_pylist())
        kept = []
        for part in rows:
            if part.kind in ("weights_published", "weights_committed"):
                is_kept = [row["version"] >= newest for row in part.table[part.kind].to_pylist()]
                table = part.table.filter(pa.array(is_kept))
                if table.num_rows:
                    kept.append(dataclasses.replace(part, table=table))
        return kept

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> MemoryReader:
        return CountingReader(self, start, topics, kinds)


class CountingReader(MemoryReader):
    """Counts rows of the topic `weights` that workers read."""

    def poll(self, timeout_s: float) -> list[Delivery]:
        found = super().poll(timeout_s)
        assert isinstance(self._log, KeyedLog)
        if self._topics is not None:  # a worker's, not this test's own
            self._log.num_weights_rows += sum(d.table.num_rows for d in found if d.partition.topic == "weights")
        return found


class Running:
    """A worker in a thread."""

    def __init__(self, log: MemoryLog, root: Location, **changes: Any) -> None:
        config = dataclasses.replace(CONFIG, **changes)
        self.recorder = Recorder(log, producer_id=config.producer_id, run_id=config.run_id)
        self.worker: Worker = make_worker(config, log, self.recorder, root)
        self.status: int | None = None
        self.error: BaseException | None = None
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.status = self.worker.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.recorder.close()

    def end(self) -> int | None:
        self.worker.stop()
        self.thread.join(60)
        assert self.error is None, self.error
        return self.status


class Stage:
    """A log, a scripted trainer, and workers."""

    def __init__(self, folder: Path) -> None:
        self.log = KeyedLog()
        self.root = Location.parse(str(folder))
        self.trainer = ScriptedTrainer(self.log, self.root)
        self.trainer.start_run()
        self.version = self.trainer.publish(0, step=0)
        self.running: list[Running] = []

    def worker(self, index: int = 0) -> Running:
        self.running.append(Running(self.log, self.root, index=index))
        return self.running[-1]

    def judged(self, index: int = 0) -> list[int]:
        """Ordinals of one worker's groups of which every member is judged."""
        rows = self.trainer.tape.rows("rollout_dispatched")
        rewards = {row["trajectory_id"] for row in self.trainer.tape.rows("reward_assigned")}
        mine = [row for row in rows if row["worker_id"] == f"worker-{index}"]
        assert all(row["training_step"] is None for row in mine)
        counts: dict[int, int] = {}
        for row in mine:
            counts[row["group_ordinal"]] = counts.get(row["group_ordinal"], 0) + (row["trajectory_id"] in rewards)
        return sorted(ordinal for ordinal, count in counts.items() if count == SIZE)

    def wait_for(self, ordinals: list[int], index: int = 0) -> None:
        self.trainer.tape.wait_for(
            f"groups {ordinals}, there are {self.judged(index)}", lambda: self.judged(index) == ordinals
        )

    def consume(self, step: int, ordinals: list[int], **fields: Any) -> None:
        groups = [group_id_of("run", "train", None, ordinal) for ordinal in ordinals]
        # Nothing is lost by a low watermark that is too low.
        self.trainer.complete(step, groups=groups, cursor_after=Cursor(), **{"version_out": 0, **fields})

    def close(self) -> None:
        for running in self.running:
            running.end()
        self.trainer.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def own_groups(count: int, index: int = 0) -> list[int]:
    """The first groups of a worker, by ordinal in the run."""
    every = [at for at in range(count * CONFIG.num_workers) if at % GROUPS % CONFIG.num_workers == index]
    return every[:count]


def test_a_worker_runs_ahead_to_the_bound_and_on_as_its_groups_are_consumed(stage: Stage) -> None:
    stage.worker()
    stage.trainer.commit(stage.version)
    stage.wait_for(own_groups(BOUND))
    stage.consume(1, own_groups(BOUND)[1:2])
    stage.consume(2, own_groups(BOUND)[2:3])
    stage.wait_for(own_groups(BOUND + OWN))
    assert stage.trainer.tape.rows("attempt_abandoned") == []


def test_new_weights_are_taken_up_on_the_way(stage: Stage) -> None:
    stage.worker()
    stage.trainer.commit(stage.version)
    stage.wait_for(own_groups(BOUND))
    stage.trainer.commit(stage.trainer.publish(1, step=1))
    stage.consume(1, own_groups(OWN), version_out=1)
    stage.wait_for(own_groups(BOUND + OWN))
    versions = [run["version"] for row in stage.trainer.tape.rows("action_sampled") for run in row["version_runs"]]
    assert versions == [0] * (BOUND * SIZE) + [1] * (OWN * SIZE)


def test_a_worker_that_comes_back_goes_on_where_the_tape_ends(stage: Stage) -> None:
    first = stage.worker()
    stage.trainer.commit(stage.version)
    stage.wait_for(own_groups(BOUND))
    stage.consume(1, [own_groups(BOUND)[0], own_groups(BOUND)[3]])
    stage.wait_for(own_groups(BOUND + OWN))
    assert first.end() == TERMINATED
    stage.worker()
    stage.consume(2, own_groups(BOUND)[1:3])
    stage.wait_for(own_groups(BOUND + 2 * OWN))
    rows = stage.trainer.tape.rows("rollout_dispatched")
    assert len({(row["trajectory_id"], row["attempt"]) for row in rows}) == len(rows) == (BOUND + 2 * OWN) * SIZE
    assert stage.trainer.tape.rows("attempt_abandoned") == []


def test_the_last_version_ends_the_work(stage: Stage) -> None:
    running = stage.worker()
    stage.trainer.commit(stage.version)
    stage.wait_for(own_groups(BOUND))
    last = stage.trainer.publish(1, step=1)
    stage.consume(1, own_groups(OWN), version_out=1, final=True)
    stage.trainer.commit(last)
    running.thread.join(60)
    assert (running.status, running.error) == (DONE, None)


@pytest.mark.parametrize("keeps_versions", [True, False])
def test_an_engine_that_starts_late_finds_the_newest_version(stage: Stage, keeps_versions: bool) -> None:
    """A hundred older versions, whose shards are gone: only where they must be are their events read."""
    stage.log.keeps_versions = keeps_versions
    fake = {"role": "actor", "payload": "full", "path": "gone", "weights_digest": "w", "policy_id": "actor"}
    for number in range(1, 101):
        key = {"policy_run_epoch": 1, "version": number}
        stage.trainer.recorder.record("weights_published", **fake, **key, step=number)
        stage.trainer.recorder.record(
            "weights_committed", policy_id="actor", weights_digest="w", **key, required_engines=[], staged_event_ids=[]
        )
    key = stage.trainer.publish(101, step=101)
    stage.trainer.recorder.record("weights_committed", **key, required_engines=[], staged_event_ids=[])
    stage.trainer.recorder.flush("logged")
    stage.worker()
    stage.wait_for(own_groups(BOUND))
    assert {r["version"] for r in stage.trainer.tape.rows("weights_staged")} == {101}
    versions = {run["version"] for row in stage.trainer.tape.rows("action_sampled") for run in row["version_runs"]}
    assert versions == {101}
    history = 2 * 101 + 1
    if keeps_versions:
        assert stage.log.num_weights_rows < history, "it read the whole history"
    else:
        assert stage.log.num_weights_rows >= history
