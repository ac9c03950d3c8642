"""Rollout events that came from the log and wait to be trained, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.fold import Fold, fold
from rolltape.schema.render import arrow_schema
from rolltape.trainers.members import Member

KINDS: Final = (
    "rollout_dispatched",
    "attempt_abandoned",
    "rollout_started",
    "rollout_resumed",
    "action_sampled",
    "observation_received",
    "context_rewritten",
    "rollout_ended",
    "reward_assigned",
    "mask_assigned",
    "dead_letter",
    "dead_letter_redriven",
)
_OF_NO_ATTEMPT: Final = ("dead_letter", "dead_letter_redriven")


class EventBuffer:
    """Events of one run, held as the tables in which they came."""

    def __init__(self, run_id: str, run_started: pa.Table) -> None:
        self._run_id = run_id
        self._run_started = run_started
        self._tables: dict[str, list[pa.Table]] = {kind: [] for kind in KINDS}

    def of_run(self, table: pa.Table) -> pa.Table:
        """The rows of this run."""
        mine = pc.equal(table["run_id"], self._run_id)
        return table if pc.all(mine).as_py() else table.filter(mine)

    def add(self, kind: str, table: pa.Table) -> None:
        """Keep rows of one kind."""
        if table.num_rows:
            self._tables[kind].append(table)

    def num_rows(self, *kinds: str) -> int:
        """Rows held of some kinds."""
        return sum(table.num_rows for kind in kinds for table in self._tables[kind])

    def all_of(self, kind: str) -> pa.Table:
        """Every row held of a kind."""
        tables = self._tables[kind]
        return pa.concat_tables(tables) if tables else arrow_schema(kind).empty_table()

    def of(self, kind: str, ids: pa.Array) -> pa.Table:
        """Rows of a kind that belong to these trajectories; dead letters all, the fold knows whose they are."""
        table = self.all_of(kind)
        if kind in _OF_NO_ATTEMPT or not table.num_rows:
            return table
        return table.filter(pc.is_in(table["trajectory_id"], ids))

    def fold(self, ids: pa.Array, dispatched: pa.Table | None = None) -> Fold:
        """What the events held say of these trajectories (``dispatched``: with these dispatches alone)."""
        events = {kind: self.of(kind, ids) for kind in KINDS}
        if dispatched is not None:
            events["rollout_dispatched"] = dispatched
        events["run_started"] = self._run_started
        return fold(events)

    def rewards_of(self, members: Sequence[Member]) -> pa.Table:
        """The ``reward_assigned`` rows of these members' attempts."""
        table = self.of("reward_assigned", pa.array([m.trajectory_id for m in members], pa.string()))
        wanted = {(m.trajectory_id, m.attempt) for m in members}
        keys = zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        return table.filter(pa.array([key in wanted for key in keys], pa.bool_()))

    def clear(self) -> None:
        """Let go of everything."""
        self._tables = {kind: [] for kind in KINDS}

    def keep(self, trajectory_ids: Iterable[str]) -> None:
        """Let go of everything but the events of these trajectories."""
        ids = pa.array(list(trajectory_ids), pa.string())
        for kind in KINDS:
            if kind == "dead_letter_redriven":
                continue
            table = self.all_of(kind)
            kept = table.filter(pc.is_in(table["trajectory_id"], ids)) if table.num_rows else table
            self._tables[kind] = [kept] if kept.num_rows else []
        if not self._tables["dead_letter"]:
            self._tables["dead_letter_redriven"] = []
