"""What the tape says a run has done so far: its live steps, checkpoints, batches and published versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import ReplayError
from rolltape.schema.runline import RunLine
from rolltape.store.lake import Lake

POLICY_ID: Final = "actor"


def rows_of(table: pa.Table, kind: str) -> list[dict[str, Any]]:
    """Rows of a control-sized table: the kind's fields, with event_id, run_epoch and log position beside them."""
    if not table.num_rows:
        return []
    envelope = table.select(["event_id", "run_epoch", "log_topic", "log_partition", "log_offset"]).to_pylist()
    payload = table[kind].to_pylist()
    return [{**head, **body} for head, body in zip(envelope, payload, strict=True)]


def read_line(lake: Lake, run_id: str) -> RunLine:
    """The run's epochs."""
    return RunLine.from_events(lake.read("run_started", run_id=run_id), lake.read("run_resumed", run_id=run_id), run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The live line of one run as of one moment.

    Attributes:
        started: newest ``run_started`` or ``run_resumed`` row.
        steps: ``train_step_completed`` by step, live ones only.
        batches: ``batch_formed`` by batch id, without members (read one with :meth:`Lake.read` when needed).
        checkpoints: ``checkpoint_saved`` by step, live ones only.
        published: ``weights_published`` of the policy by (policy run epoch, version), live ones only.
        resets: steps after which the policy's optimizer was reset, live ones only.
        reset_versions: the versions for which it was, by (policy run epoch, version).
    """

    run_id: str
    line: RunLine
    started: dict[str, Any]
    steps: Mapping[int, dict[str, Any]]
    batches: Mapping[str, dict[str, Any]]
    checkpoints: Mapping[int, dict[str, Any]]
    published: Mapping[tuple[int, int], dict[str, Any]]
    resets: frozenset[int] = frozenset()
    reset_versions: frozenset[tuple[int, int]] = frozenset()

    @property
    def last_step(self) -> int:
        """The newest completed step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def has_trained(self) -> bool:
        """Whether a trainer of this run has written anything."""
        return bool(self.steps or self.batches or self.checkpoints or self.published)

    def step(self, number: int) -> dict[str, Any]:
        """The row of one step.

        Raises:
            ReplayError: the step is not on the tape; the message names the range that is.
        """
        if number not in self.steps:
            known = f"steps {min(self.steps)} to {max(self.steps)}" if self.steps else "no step"
            raise ReplayError(f"run {self.run_id} has no step {number}; the tape holds {known}")
        return self.steps[number]

    def checkpoint_before(self, step: int) -> dict[str, Any]:
        """The newest kept checkpoint after which ``step`` can be run again.

        Raises:
            ReplayError: there is none.
        """
        usable = [number for number in self.checkpoints if number < step]
        if not usable:
            raise ReplayError(f"run {self.run_id}: no checkpoint is kept before step {step}")
        return self.checkpoints[max(usable)]

    def open_batch(self, step: int) -> dict[str, Any] | None:
        """A batch that was pinned for ``step`` but whose step is not completed."""
        done = {row["batch_id"] for row in self.steps.values()}
        found = [b for b in self.batches.values() if b["step"] == step and b["batch_id"] not in done]
        return max(found, key=lambda b: (b["run_epoch"], b["log_offset"]), default=None)

    def cursor_after(self, step: int) -> Cursor:
        """Where the reader stood when the batch of ``step`` was formed; the beginning for step 0."""
        if step not in self.steps:
            return Cursor()
        return Cursor.from_rows(self.batches[self.steps[step]["batch_id"]]["cursor_after"])

    @classmethod
    def read(cls, lake: Lake, run_id: str) -> RunHistory:
        """Read a run's history from the lake.

        Raises:
            ReplayError: the lake has no such run; the message lists the runs it has.
        """
        started = lake.read("run_started", run_id=run_id)
        resumed = lake.read("run_resumed", run_id=run_id)
        line = RunLine.from_events(started, resumed, run_id)
        if not line.epochs:
            known = sorted(set(lake.read("run_started", columns=["run_id"])["run_id"].to_pylist()))
            raise ReplayError(f"no run {run_id!r} in {lake.location.url}; it has {', '.join(known) or 'none'}")
        starts = [*rows_of(started, "run_started"), *rows_of(resumed, "run_resumed")]
        steps = _live(rows_of(lake.read("train_step_completed", run_id=run_id), "train_step_completed"), line)
        checkpoints = _live(rows_of(lake.read("checkpoint_saved", run_id=run_id), "checkpoint_saved"), line)
        published = rows_of(lake.read("weights_published", run_id=run_id), "weights_published")
        resets = rows_of(lake.read("optimizer_reset", run_id=run_id), "optimizer_reset")
        resets = [row for row in resets if line.is_live_step(row["run_epoch"], row["step"])]
        return cls(
            run_id=run_id,
            line=line,
            started=max(starts, key=lambda row: row["run_epoch"]),
            steps=steps,
            batches=_batches(lake.read("batch_formed", run_id=run_id), line),
            checkpoints=checkpoints,
            published={
                (row["policy_run_epoch"], row["version"]): row
                for row in published
                if row["policy_id"] == POLICY_ID and line.is_live_step(row["run_epoch"], row["step"])
            },
            resets=frozenset(row["step"] for row in resets),
            reset_versions=frozenset(key for row in resets if (key := _reset_version(row)) is not None),
        )


def _reset_version(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """The version that a reset was for; releases without a column for it named it in the reason alone."""
    if row["version"] is not None:
        return row["policy_run_epoch"], row["version"]
    found = re.fullmatch(r"version (\d+) of run epoch (\d+) serves", row["reason"] or "")
    return None if found is None else (int(found[2]), int(found[1]))


def _live(rows: list[dict[str, Any]], line: RunLine) -> dict[int, dict[str, Any]]:
    """Live rows by step; where an older and a newer epoch both have one, the newer is what counts."""
    kept = [row for row in rows if line.is_live_step(row["run_epoch"], row["step"])]
    return {row["step"]: row for row in sorted(kept, key=lambda row: row["run_epoch"])}


def _batches(table: pa.Table, line: RunLine) -> dict[str, dict[str, Any]]:
    if not table.num_rows:
        return {}
    struct = table["batch_formed"].combine_chunks()
    names = ("batch_id", "step", "algorithm", "batch_digest", "cursor_before", "cursor_after", "staleness_version")
    columns = {name: pc.struct_field(struct, name).to_pylist() for name in names}
    columns["run_epoch"] = table["run_epoch"].to_pylist()
    columns["log_offset"] = table["log_offset"].to_pylist()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    # A batch is formed for the step after the last live one, so it follows the rule of dispatches.
    return {row["batch_id"]: row for row in rows if line.is_live_dispatch(row["run_epoch"], row["step"])}
