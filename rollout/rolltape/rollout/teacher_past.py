"""What a scoring service that starts finds in the lake: events of units that lack scores, and where the log goes on.

One snapshot is read twice. First, of the whole run, the columns that say whose an event is and what became of it: from
them the queue and the fold tell which units are scored. Then the rows of the others, whole, out of the data files that
hold them. What lies behind the snapshot's cursor comes from the log, which is read from there on: each row comes once.

A unit counts as scored where the snapshot proves it: every rollout of it has come to its end with all of its events,
and every segment that may be trained has its score. All others are looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.rollout.teacher_queue import KINDS, ScoringQueue, UnitKey
from rolltape.rollout.teacher_scores import SegmentKey
from rolltape.rollout.teacher_units import ended_segments, unread_units
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import VacuumedError
from rolltape.schema.fold import FOLDED_COLUMNS, Fold
from rolltape.store.lake import Lake
from rolltape.store.row_filter import RowFilter
from rolltape.store.snapshot import DataFile, Snapshot
from rolltape.store.tail import split_by_partition

if TYPE_CHECKING:
    from rolltape.rollout.teachers import TeacherConfig

_TOLD: Final[Mapping[str, tuple[str, ...] | None]] = {
    "teacher_routed": None,
    "teacher_scored": ("trajectory_id", "attempt", "segment_index"),
    "alarm_raised": ("run_id", "event_id"),
    "problem_registered": ("run_id", "problem_id", "problem_registered.domain"),
}
"""Beside the rollouts: what of each kind is read, None for all."""

_IDENTITY: Final = frozenset(
    ("event_id", "run_id", "run_epoch", "trajectory_id", "attempt", "event_index", "log_offset")
)
_FATE: Final = frozenset(
    (
        *("purpose", "training_step", "group_ordinal", "member", "group_size"),
        *("from_attempt", "from_event_index", "first_event_index", "last_event_index"),
        *("action_kind", "continues_event_id", "status"),
    )
)
_UNITS_FOLDED: Final = 2_048
"""Complete units that are folded at once: some tens of thousands of rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Rows of one run before ``cursor``, by kind, that a service still needs; by default there are none."""

    cursor: Cursor = field(default_factory=Cursor)
    tables: Mapping[str, pa.Table] = field(default_factory=dict[str, pa.Table])


def read_past(lake: Lake, config: TeacherConfig, of_run: Mapping[str, pa.Table]) -> Past:
    """Read what the lake has of a run, in the newest version whose data files are all there.

    Args:
        lake: where the log is archived.
        config: which run, and its units.
        of_run: ``run_started`` and ``dead_letter_redriven`` of the run.

    Raises:
        VacuumedError: a data file is gone that the newest version names.
    """
    while True:
        snapshot = lake.snapshot()
        try:
            return _Reading(lake, snapshot, config).past(of_run)
        except VacuumedError:
            if lake.snapshot().version == snapshot.version:
                raise


class _Reading:
    """One look at one snapshot."""

    def __init__(self, lake: Lake, snapshot: Snapshot, config: TeacherConfig) -> None:
        self._lake = lake
        self._snapshot = snapshot
        self._config = config
        self._queue = ScoringQueue.of(config)

    def past(self, of_run: Mapping[str, pa.Table]) -> Past:
        told = {kind: self._read(kind, columns) for kind, columns in _TOLD.items()}
        found = {kind: self._read(kind, identity_columns(kind)) for kind in KINDS}
        for kind, table in found.items():
            self._queue.add(kind, table)
        dispatched = self._queue.trajectories()
        self._forget_scored(told["teacher_scored"], of_run)
        waiting = self._queue.trajectories()
        is_scored = pc.and_(
            pc.is_in(told["teacher_scored"]["trajectory_id"], dispatched),
            pc.invert(pc.is_in(told["teacher_scored"]["trajectory_id"], waiting)),
        )
        # Scores of rollouts whose dispatch is not archived yet stay: topics are archived each at its own pace.
        told["teacher_scored"] = told["teacher_scored"].filter(pc.invert(is_scored))
        rows = {kind: self._whole(kind, table, waiting) for kind, table in found.items()}
        return Past(cursor=self._snapshot.cursor, tables={**told, **rows})

    def _forget_scored(self, scored: pa.Table, of_run: Mapping[str, pa.Table]) -> None:
        names = ("trajectory_id", "attempt", "segment_index")
        known = set(zip(*(scored[name].to_pylist() for name in names), strict=True))
        complete = self._queue.complete()
        for first in range(0, len(complete), _UNITS_FOLDED):
            units = set(complete[first : first + _UNITS_FOLDED])
            self._queue.forget(units - _lacking_units(self._queue, self._queue.fold(units, of_run), known))

    def _read(self, kind: str, columns: tuple[str, ...] | None) -> pa.Table:
        return self._lake.read(
            kind,
            columns=columns,
            run_id=self._config.run_id,
            as_of=self._snapshot.cursor,
            snapshot=self._snapshot,
        )

    def _whole(self, kind: str, found: pa.Table, trajectories: pa.Array) -> pa.Table:
        """The rows of some trajectories among ``found``, with all of their columns."""
        wanted = found.filter(pc.is_in(found["trajectory_id"], trajectories))
        places = _Places({place: rows["log_offset"].to_numpy() for place, rows in _by_partition(wanted)})
        files = [file for file in self._snapshot.files_of(kind) if places.may_lie_in(file)]
        of_run = RowFilter(
            since=places.first,
            as_of=places.end,
            run_id=self._config.run_id,
            trajectory_ids=pc.unique(wanted["trajectory_id"]).to_pylist(),
        )
        return self._lake.read_files(files, kind, None, of_run)


def identity_columns(kind: str) -> tuple[str, ...]:
    """Of what the fold reads of a kind: whose its events are, and what became of the rollout; no lists."""
    told = [name for name in FOLDED_COLUMNS[kind] if name in _IDENTITY or name.rpartition(".")[2] in _FATE]
    asked = ("group_id", "problem_id") if kind == "rollout_dispatched" else ()
    return (*told, *asked, "log_topic", "log_partition")


def _lacking_units(queue: ScoringQueue, folded: Fold, scored: Collection[SegmentKey]) -> set[UnitKey]:
    """Folded units that may lack a score, though nobody may be able to give it now."""
    lacking = unread_units(folded, queue.place)
    segments = ended_segments(folded)
    for trajectory, attempt, index in zip(
        *(segments[name].to_pylist() for name in ("trajectory_id", "attempt", "segment_index")), strict=True
    ):
        home = queue.place(trajectory, attempt)
        if home is not None and (trajectory, attempt, index) not in scored:
            lacking.add(home[0])
    return lacking


def _by_partition(rows: pa.Table) -> list[tuple[Partition, pa.Table]]:
    return split_by_partition(rows) if rows.num_rows else []


@dataclass(frozen=True)
class _Places:
    """Log offsets of some rows, ascending, by partition."""

    offsets: Mapping[Partition, np.ndarray]

    @cached_property
    def first(self) -> Cursor:
        return Cursor({place: int(offsets[0]) for place, offsets in self.offsets.items()})

    @cached_property
    def end(self) -> Cursor:
        return Cursor({place: int(offsets[-1]) + 1 for place, offsets in self.offsets.items()})

    def may_lie_in(self, file: DataFile) -> bool:
        """Whether the file's bounds allow one of them: a unit that waits for long has few files, far apart."""
        low, high = file.min_log_offset, file.max_log_offset
        if file.partition is None or low is None or high is None:
            return bool(self.offsets)
        offsets = self.offsets.get(file.partition)
        return offsets is not None and int(np.searchsorted(offsets, low)) < int(np.searchsorted(offsets, high, "right"))
