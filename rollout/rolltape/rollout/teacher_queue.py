"""Rollouts that wait for their scores: events from the log, kept until all of a unit has ended.

A unit is some groups of consecutive ordinals of one step (rollouts that are meant for no step are counted in the run,
in blocks as long as one). Its rollouts are scored together and in a fixed order, since the composition of a batch
decides the last bits of log-probs: a service that is killed and comes back makes the same scores. No unit crosses the
end of a step, so that a step's rollouts can all be scored before any of the next exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.fold import Fold, fold
from rolltape.schema.render import arrow_schema

if TYPE_CHECKING:
    from rolltape.rollout.teachers import TeacherConfig

KINDS: Final = (
    "rollout_dispatched",
    "attempt_abandoned",
    "rollout_started",
    "rollout_resumed",
    "action_sampled",
    "observation_received",
    "context_rewritten",
    "rollout_ended",
    "dead_letter",
)
"""Of the rollout topic: what is needed to know a rollout's tokens. Rewards and masks do not concern a teacher."""

UnitKey = tuple[int | None, int | str, int]
"""(training step, block of a step's length, unit in it); a group without an ordinal has its id for the block."""
_Place = tuple[int, int]  # group ordinal, member
_Attempt = tuple[str, int]


@dataclass(slots=True)
class _Unit:
    expected: int  # rollouts
    newest: dict[_Place, _Attempt] = field(default_factory=dict)
    problems: set[str | None] = field(default_factory=set)
    ended: set[_Attempt] = field(default_factory=set)
    dropped: set[_Attempt] = field(default_factory=set)  # by a dead letter
    abandoned: set[_Attempt] = field(default_factory=set)  # the next attempt is on its way

    @property
    def is_complete(self) -> bool:
        """Whether every rollout has come to an end that stays."""
        closed = (self.ended | self.dropped) - self.abandoned
        return len(self.newest) >= self.expected and all(attempt in closed for attempt in self.newest.values())


class ScoringQueue:
    """Training rollouts of one run, until they are scored.

    Args:
        run_id: the run.
        groups_per_step: how many groups a step has.
        groups_per_unit: how many of them are scored together; the last unit of a step may have fewer.
    """

    def __init__(self, run_id: str, *, groups_per_step: int = 1, groups_per_unit: int = 1) -> None:
        self._run_id = run_id
        self._groups_per_step = groups_per_step
        self._groups_per_unit = min(groups_per_unit, groups_per_step)
        self._tables: dict[str, list[pa.Table]] = {kind: [] for kind in KINDS}
        self._strays: list[tuple[str, pa.Table]] = []  # of rollouts whose dispatch was not read before them
        self._units: dict[UnitKey, _Unit] = {}
        self._home: dict[_Attempt, tuple[UnitKey, _Place]] = {}

    @classmethod
    def of(cls, config: TeacherConfig) -> Self:
        """An empty one for a run."""
        return cls(config.run_id, groups_per_step=config.groups_per_step, groups_per_unit=config.groups_per_unit)

    def add(self, kind: str, table: pa.Table) -> None:
        """Take in events of one kind, of any runs.

        Kinds may come in any order between two calls of :meth:`settle`: one commit is delivered kind by kind.
        """
        table = table.filter(pc.equal(table["run_id"], self._run_id))
        if kind == "rollout_dispatched":
            table = table.filter(pc.equal(pc.struct_field(table[kind], "purpose"), "train"))
            self._enter(table)
            self._keep(kind, table)
            strays, self._strays = self._strays, []
            for stray, rows in strays:
                self._sort(stray, rows)
        else:
            self._sort(kind, table)

    def settle(self) -> None:
        """All deliveries of a poll are in: what belongs to no training rollout that waits is let go."""
        self._strays.clear()

    def _sort(self, kind: str, table: pa.Table) -> None:
        known = pa.array([trajectory for trajectory, _ in self._home], pa.string())
        is_known = pc.is_in(table["trajectory_id"], known)
        self._keep(kind, table.filter(is_known))
        strays = table.filter(pc.invert(is_known))
        if strays.num_rows:
            self._strays.append((kind, strays))

    def _keep(self, kind: str, table: pa.Table) -> None:
        if not table.num_rows:
            return
        self._tables[kind].append(table)
        if kind == "rollout_ended":
            self._note(table, "ended")
        elif kind == "attempt_abandoned":
            self._note(table, "abandoned")
        elif kind == "dead_letter":
            self._note(table, "dropped")

    def _enter(self, table: pa.Table) -> None:
        struct = table["rollout_dispatched"]
        names = ("training_step", "group_ordinal", "member", "group_size")
        columns = [pc.struct_field(struct, name).to_pylist() for name in names]
        ids = [table[name].to_pylist() for name in ("trajectory_id", "attempt", "group_id", "problem_id")]
        for step, ordinal, member, size, trajectory, attempt, group, problem in zip(*columns, *ids, strict=True):
            key, num_groups = self._unit_of(step, ordinal, group or trajectory)
            unit = self._units.setdefault(key, _Unit(num_groups * (size or 1)))
            unit.problems.add(problem)
            place = (ordinal or 0, member or 0)
            known = unit.newest.get(place)
            if known is None or known[1] <= attempt:
                unit.newest[place] = (trajectory, attempt)
            self._home[trajectory, attempt] = (key, place)

    def _unit_of(self, step: int | None, ordinal: int | None, group: str) -> tuple[UnitKey, int]:
        """Unit of a group, and how many groups it has."""
        if ordinal is None:
            return (step, group, 0), 1
        block, place = divmod(ordinal, self._groups_per_step)
        unit = place // self._groups_per_unit
        left = self._groups_per_step - unit * self._groups_per_unit
        return (step, block, unit), min(self._groups_per_unit, left)

    def _note(self, table: pa.Table, what: str) -> None:
        for attempt in zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True):
            if attempt in self._home:
                getattr(self._units[self._home[attempt][0]], what).add(attempt)

    def complete(self) -> list[UnitKey]:
        """Units of which every rollout has ended, in the order in which they were handed out."""
        return [key for key, unit in self._units.items() if unit.is_complete]

    def problems(self, units: Iterable[UnitKey]) -> set[str | None]:
        """Problems that were posed in some units."""
        return set().union(*(self._units[key].problems for key in units))

    def begun(self) -> list[UnitKey]:
        """Units of which some rollouts have ended and others have not."""
        return [key for key, unit in self._units.items() if not unit.is_complete and unit.ended - unit.abandoned]

    def place(self, trajectory_id: str, attempt: int) -> tuple[UnitKey, int, int] | None:
        """Unit, group ordinal and member of an attempt that counts in its unit; None where another took its place."""
        key, place = self._home.get((trajectory_id, attempt), (None, (0, 0)))
        if key is None or self._units[key].newest[place] != (trajectory_id, attempt):
            return None
        return (key, *place)

    def trajectories(self) -> pa.Array:
        """Ids of the rollouts that wait."""
        return self._ids(self._units)

    def fold(self, units: Iterable[UnitKey], of_run: Mapping[str, pa.Table]) -> Fold:
        """What the events say of the rollouts of some units.

        Args:
            units: which.
            of_run: events that no rollout owns: ``run_started``, ``dead_letter_redriven``.
        """
        ids = self._ids(units)
        return fold({**{kind: self._of(kind, ids) for kind in KINDS}, **of_run})

    def forget(self, units: Iterable[UnitKey]) -> None:
        """Let go of units: they are scored, or nobody may score them."""
        gone = set(units)
        if not gone:
            return
        for key in gone:
            self._units.pop(key, None)
        self._home = {attempt: home for attempt, home in self._home.items() if home[0] not in gone}
        ids = self._ids(self._units)
        for kind in KINDS:
            kept = self._of(kind, ids)
            self._tables[kind] = [kept] if kept.num_rows else []

    def _ids(self, units: Iterable[UnitKey]) -> pa.Array:
        wanted = set(units)
        return pa.array([trajectory for (trajectory, _), (key, _) in self._home.items() if key in wanted], pa.string())

    def _of(self, kind: str, ids: pa.Array) -> pa.Table:
        tables = self._tables[kind]
        if not tables:
            return arrow_schema(kind).empty_table()
        table = pa.concat_tables(tables)
        return table.filter(pc.is_in(table["trajectory_id"], ids))
