"""What a worker reads of a run's tape: its live line, completed steps and weight versions, folded from events.

The order in which topics arrive does not matter: everything is keyed, and looked at only through the live line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import LogReader
from rolltape.schema.cursor import Cursor
from rolltape.schema.runline import RunLine

TOPICS: Final = ("control", "training", "weights")
KINDS: Final = (
    "run_started",
    "run_resumed",
    "batch_formed",
    "train_step_completed",
    "evaluation_completed",
    "weights_published",
    "weights_committed",
    "weights_aborted",
)

VersionKey = tuple[int, int]
"""(policy run epoch, version number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedStep:
    """One ``train_step_completed``."""

    epoch: int  # run epoch in which it was trained
    step: int
    version_out: int
    is_final: bool  # its metrics hold final = 1.0


@dataclass(slots=True)
class RunTape:
    """The fold of one run's control, training and weights events, for one policy."""

    run_id: str
    policy_id: str
    epochs: dict[int, int] = field(default_factory=dict)  # epoch -> step that it continues from
    steps: dict[tuple[int, int], CompletedStep] = field(default_factory=dict)  # by (epoch, step)
    cursors: dict[int, list[Cursor]] = field(default_factory=dict)  # by step: cursor after its batch, of each epoch
    published: dict[VersionKey, dict[str, Any]] = field(default_factory=dict)
    committed: set[VersionKey] = field(default_factory=set)
    aborted: set[VersionKey] = field(default_factory=set)
    evaluated: set[tuple[VersionKey, str]] = field(default_factory=set)  # version and problem set

    @property
    def line(self) -> RunLine:
        """The run's epochs."""
        return RunLine.from_pairs(self.epochs.items())

    @property
    def last_step(self) -> CompletedStep | None:
        """The newest completed step on the live line; None before the first."""
        line = self.line
        live = [step for step in self.steps.values() if line.is_live_step(step.epoch, step.step)]
        return max(live, key=lambda step: (step.step, step.epoch), default=None)

    @property
    def live_versions(self) -> dict[VersionKey, dict[str, Any]]:
        """``weights_published`` by version, without aborted ones and those of abandoned steps."""
        line = self.line
        return {
            key: row
            for key, row in self.published.items()
            if key not in self.aborted and line.is_live_step(key[0], row["step"] or 0)
        }

    def cursor_before(self, step: int) -> Cursor:
        """A position before every rollout that was ever dispatched for ``step`` or later ones, in whatever epoch.

        A rollout is dispatched after the step before is completed in the same or an older epoch, hence after that
        step's batch was formed; a newer epoch's batch of that step may have been formed later than it.
        """
        earliest, *others = self.cursors.get(step - 1) or [Cursor()]
        for cursor in others:
            earliest = Cursor({place: min(earliest[place], cursor[place]) for place in earliest})
        return earliest

    def read(self, reader: LogReader, timeout_s: float) -> bool:
        """Take in what the reader has, waiting at most ``timeout_s`` for it; whether anything came."""
        deliveries = reader.poll(timeout_s)
        for delivery in deliveries:
            self.apply(delivery.kind, delivery.table)
        return bool(deliveries)

    def apply(self, kind: str, table: pa.Table) -> None:
        """Take over events of one kind, of any runs; those of others are ignored."""
        mine = table.filter(pc.equal(table["run_id"], self.run_id))
        if mine.num_rows:
            self._apply(kind, mine)

    def _apply(self, kind: str, table: pa.Table) -> None:
        match kind:
            case "run_started" | "run_resumed":
                self._apply_epochs(table)
            case "batch_formed":
                self._apply_batches(table)
            case "train_step_completed":
                self._apply_steps(table)
            case "evaluation_completed":
                self.evaluated.update((_key(row), row["problem_set"]) for row in self._of_policy(table, kind))
            case "weights_published":
                self.published.update((_key(row), row) for row in self._of_policy(table, kind))
            case "weights_committed":
                self.committed.update(_key(row) for row in self._of_policy(table, kind))
            case "weights_aborted":
                self.aborted.update(_key(row) for row in self._of_policy(table, kind))

    def _apply_epochs(self, table: pa.Table) -> None:
        epochs = table["run_epoch"].to_pylist()
        if "run_resumed" in table.column_names:
            steps = pc.struct_field(table["run_resumed"], "continues_from_step").to_pylist()
        else:
            steps = [0] * len(epochs)
        self.epochs.update(zip(epochs, steps, strict=True))

    def _apply_batches(self, table: pa.Table) -> None:
        struct = table["batch_formed"]
        steps = pc.struct_field(struct, "step").to_pylist()
        cursors = pc.struct_field(struct, "cursor_after").to_pylist()
        for step, rows in zip(steps, cursors, strict=True):
            self.cursors.setdefault(step, []).append(Cursor.from_rows(rows))

    def _apply_steps(self, table: pa.Table) -> None:
        struct = table["train_step_completed"]
        columns = [pc.struct_field(struct, name).to_pylist() for name in ("step", "version_out", "metrics")]
        for epoch, step, version, metrics in zip(table["run_epoch"].to_pylist(), *columns, strict=True):
            is_final = any(metric["name"] == "final" and metric["value"] == 1.0 for metric in metrics or ())
            self.steps[epoch, step] = CompletedStep(epoch=epoch, step=step, version_out=version, is_final=is_final)

    def _of_policy(self, table: pa.Table, kind: str) -> list[dict[str, Any]]:
        return [row for row in table[kind].to_pylist() if row["policy_id"] == self.policy_id]


def _key(row: dict[str, Any]) -> VersionKey:
    return (row["policy_run_epoch"], row["version"])
