"""A scripted trainer: publishes weights, commits them, completes steps, all through the tape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from torch import nn

from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.models import build_model
from rolltape.numerics.weights import named_weights, save_shards
from rolltape.rollout.tape import read_to
from rolltape.schema.cursor import Cursor
from rolltape.schema.kinds import TOPICS
from rolltape.store.location import Location

POLICY = "actor"
PATIENCE_S = 60.0


class TapeReader:
    """Everything that a log holds, by kind."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._reader = log.reader(Cursor())
        self._tables: dict[str, list[pa.Table]] = {}

    @property
    def cursor(self) -> Cursor:
        return self._reader.cursor

    def refresh(self) -> None:
        """Take in all that is logged now; an empty poll may come of a broker that is slow."""
        read_to(self._reader, self._log.end(), TOPICS, self._keep)

    def _keep(self, kind: str, table: pa.Table) -> None:
        self._tables.setdefault(kind, []).append(table)

    def table(self, kind: str) -> pa.Table | None:
        self.refresh()
        tables = self._tables.get(kind)
        return pa.concat_tables(tables) if tables else None

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind with their struct's fields beside the envelope."""
        table = self.table(kind)
        if table is None:
            return []
        return [{**row, **row.pop(kind)} for row in table.to_pylist()]

    def count(self, kind: str) -> int:
        return sum(table.num_rows for table in self._tables.get(kind, ()))

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.refresh()
            if condition():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {PATIENCE_S:g} s for {what}; the tape holds {self.counts()}")
            time.sleep(0.01)

    def counts(self) -> dict[str, int]:
        return {kind: self.count(kind) for kind in sorted(self._tables)}


class ScriptedTrainer:
    """The trainer's side of the loop, one act at a time."""

    def __init__(self, log: EventLog, root: Location, *, run_id: str = "run", producer_id: str = "trainer") -> None:
        self.tape = TapeReader(log)
        self.recorder = Recorder(log, producer_id=producer_id, run_id=run_id)
        self._root = root

    def start_run(self) -> None:
        self.recorder.record("run_started", purpose="train", seed=0)
        self.recorder.flush("logged")

    def resume_run(self, epoch: int, *, continues_from_step: int) -> None:
        self.recorder.set_run_epoch(epoch)
        self.recorder.record("run_resumed", purpose="train", continues_from_step=continues_from_step, reason="restart")
        self.recorder.flush("logged")

    def publish(self, version: int, *, step: int, model: nn.Module | None = None, **changes: Any) -> dict[str, Any]:
        """Write the shards of ``model`` (default: random weights that depend on the version) and say so."""
        epoch = self.recorder.run_epoch
        path = f"weights/{epoch:04d}-{version:08d}"
        named = named_weights(build_model("char-64x2", version) if model is None else model)
        manifest = save_shards(self._root.child(*path.split("/")), named)
        key = {"policy_id": POLICY, "policy_run_epoch": epoch, "version": version}
        fields = {
            **key,
            "role": "actor",
            "step": step,
            "payload": "full",
            "path": path,
            **manifest.to_fields(),
            **changes,
        }
        self.recorder.record("weights_published", **fields)
        self.recorder.flush("logged")
        return {**key, "weights_digest": manifest.weights_digest}

    def commit(self, key: dict[str, Any], *, num_engines: int = 1) -> None:
        """Wait until the engines have staged, then decide."""

        def staged() -> bool:
            rows = [r for r in self.tape.rows("weights_staged") if all(r[name] == key[name] for name in key)]
            return len({row["engine_id"] for row in rows}) >= num_engines

        self.tape.wait_for(f"version {key['version']} to be staged", staged)
        self.recorder.record("weights_committed", **key, required_engines=[], staged_event_ids=[])
        self.recorder.flush("logged")

    def complete(
        self,
        step: int,
        *,
        version_out: int,
        final: bool = False,
        groups: Sequence[str] = (),
        cursor_after: Cursor | None = None,
    ) -> None:
        """Pin a batch (of these groups, where they matter) and complete the step, without training."""
        self.tape.refresh()
        batch_id = f"batch-{self.recorder.run_epoch}-{step}"
        common = {"batch_id": batch_id, "trainer_id": "trainer", "step": step}
        self.recorder.record(
            "batch_formed",
            **common,
            algorithm="grpo",
            members=[{"trajectory_id": "", "attempt": 0, "group_id": group} for group in groups],
            cursor_after=(self.tape.cursor if cursor_after is None else cursor_after).to_rows(),
        )
        self.recorder.record(
            "train_step_completed",
            **common,
            skipped=False,
            policy_id=POLICY,
            version_in=version_out - 1,
            version_out=version_out,
            metrics=[{"name": "final", "value": float(final)}],
        )
        self.recorder.flush("logged")

    def wait_for_rewards(self, step: int, num_rollouts: int) -> None:
        """Wait until the live rollouts of a step are judged."""

        def judged() -> bool:
            table = self.tape.table("rollout_dispatched")
            rewards = self.tape.table("reward_assigned")
            if table is None or rewards is None:
                return False
            steps = pc.struct_field(table["rollout_dispatched"], "training_step")
            ids = table.filter(pc.equal(steps, step))["trajectory_id"].unique()
            found = rewards.filter(pc.is_in(rewards["trajectory_id"], ids))["trajectory_id"].unique()
            return len(found) >= num_rollouts

        self.tape.wait_for(f"{num_rollouts} rewards of step {step}", judged)

    def close(self) -> None:
        self.recorder.close()
