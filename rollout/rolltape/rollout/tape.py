"""What a worker reads of a run's tape: its live line, completed steps and weight versions, folded from events.

The order in which topics arrive does not matter: everything is keyed, and looked at only through the live line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import EventLog, LogReader
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

_IDLE_S: Final = 5.0
_POLL_S: Final = 0.05
_ON_THEIR_WAY: Final = 64  # weights records


def read_to(reader: LogReader, end: Cursor, topics: Collection[str], apply: Callable[[str, pa.Table], None]) -> None:
    """Read ``topics`` until the reader stands at ``end`` or behind it; gives ``apply`` each kind and table.

    An empty poll is no sign of the end: a broker may just be slow. Where nothing comes for some seconds the rest is
    held back by a gap in somebody's lane, and comes when that closes.
    """
    wanted = [place for place in end if place.topic in topics]
    last = time.monotonic()
    while any(reader.cursor[place] < end[place] for place in wanted) and time.monotonic() - last < _IDLE_S:
        for delivery in reader.poll(_POLL_S):
            apply(delivery.kind, delivery.table)
            last = time.monotonic()


def start_of(log: EventLog, tape: RunTape) -> Cursor:
    """Where to begin to read a run's tape; ``tape`` is told of the newest versions where the log keeps them apart.

    Manifests of large models make the `weights` topic by far the longest to read. An engine that starts late needs the
    newest committed version and what came after it, and those a log may keep by key. The other topics are read whole.
    """
    end = log.end()
    for delivery in log.newest_versions():
        tape.apply(delivery.kind, delivery.table)
    if not tape.committed:
        return Cursor()
    weights = [place for place in end if place.topic == "weights"]
    # A version is kept by key a moment after it is in its topic, or before: what was on its way is read in both.
    return Cursor({place: max(0, end[place] - _ON_THEIR_WAY) for place in weights})


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
    follow_groups: bool = False  # whether to note which groups were consumed
    groups: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # by (epoch, step): groups of its batch
    _consumed: set[str] | None = None  # the live ones among them

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

    @property
    def consumed_groups(self) -> set[str]:
        """Groups that the trainer has consumed on the live line, trained or dropped: what lets a worker go on."""
        if self._consumed is None:
            line = self.line
            live = [groups for (epoch, step), groups in self.groups.items() if line.is_live_dispatch(epoch, step)]
            self._consumed = set().union(*live)
        return self._consumed

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
        self._consumed = None  # the live line may have changed

    def _apply_batches(self, table: pa.Table) -> None:
        struct = table["batch_formed"]
        steps = pc.struct_field(struct, "step").to_pylist()
        cursors = pc.struct_field(struct, "cursor_after").to_pylist()
        for step, rows in zip(steps, cursors, strict=True):
            self.cursors.setdefault(step, []).append(Cursor.from_rows(rows))
        if self.follow_groups:
            self._apply_groups(table, steps)

    def _apply_groups(self, table: pa.Table, steps: list[int]) -> None:
        struct = table["batch_formed"]
        columns = [pc.struct_field(struct, name).combine_chunks() for name in ("members", "dropped")]
        for row, (epoch, step) in enumerate(zip(table["run_epoch"].to_pylist(), steps, strict=True)):
            found = [pc.struct_field(pc.list_flatten(column.slice(row, 1)), "group_id") for column in columns]
            groups = {group for ids in found for group in ids.unique().to_pylist() if group is not None}
            self.groups.setdefault((epoch, step), set()).update(groups)
            if self._consumed is not None and self.line.is_live_dispatch(epoch, step):
                self._consumed |= groups

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
