"""Collecting the rollouts of one step from the log, until all of its groups are complete (lock step)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import LogReader
from rolltape.schema.cursor import Cursor
from rolltape.schema.fold import Fold, fold
from rolltape.schema.render import arrow_schema
from rolltape.schema.runline import RunLine
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


class StepCollector:
    """Gathers events until every member that a step expects has ended and was judged.

    The reader's position when a step is complete is that step's cursor: nothing of it is left behind, and nothing of
    the next exists yet, because a step's completion releases the dispatch of the next.
    """

    def __init__(self, reader: LogReader, *, run_id: str, run_started: pa.Table) -> None:
        self._reader = reader
        self._run_id = run_id
        self._run_started = run_started
        self._tables: dict[str, list[pa.Table]] = {kind: [] for kind in KINDS}
        self._cursor_before = reader.cursor

    @property
    def cursors(self) -> tuple[Cursor, Cursor]:
        """Positions before and after what the current step consumed."""
        return self._cursor_before, self._reader.cursor

    def poll(self, timeout_s: float) -> bool:
        """Take in what came; whether anything did."""
        deliveries = self._reader.poll(timeout_s)
        for delivery in deliveries:
            table = delivery.table
            mine = pc.equal(table["run_id"], self._run_id)
            if not pc.all(mine).as_py():
                table = table.filter(mine)
            if table.num_rows:
                self._tables[delivery.kind].append(table)
        return bool(deliveries)

    def complete(self, step: int, num_members: int, line: RunLine) -> Fold | None:
        """The fold of the step's live rollouts, once all ``num_members`` members are terminal; else None."""
        dispatched = self._dispatched(step, line)
        if dispatched is None or not self._enough(dispatched, num_members):
            return None
        ids = pc.unique(dispatched["trajectory_id"])
        events = {kind: self._of(kind, ids) for kind in KINDS if kind != "rollout_dispatched"}
        events["rollout_dispatched"] = dispatched
        events["run_started"] = self._run_started
        folded = fold(events)
        current = folded.trajectories.filter(folded.trajectories["is_current"])
        open_ = pc.sum(pc.equal(current["state"], "open")).as_py() or 0
        unjudged = (
            pc.sum(pc.and_(pc.is_null(current["reward_state"]), pc.equal(current["state"], "ended"))).as_py() or 0
        )
        if current.num_rows < num_members or open_ or unjudged:
            return None
        return folded

    def rewards_of(self, members: Sequence[Member]) -> pa.Table:
        """The collected ``reward_assigned`` rows of these members' attempts."""
        table = self._of("reward_assigned", pa.array([m.trajectory_id for m in members], pa.string()))
        wanted = {(m.trajectory_id, m.attempt) for m in members}
        keys = zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        return table.filter(pa.array([key in wanted for key in keys], pa.bool_()))

    def forget(self) -> None:
        """Drop what was collected: the step is done."""
        self._tables = {kind: [] for kind in KINDS}
        self._cursor_before = self._reader.cursor

    def _dispatched(self, step: int, line: RunLine) -> pa.Table | None:
        tables = self._tables["rollout_dispatched"]
        if not tables:
            return None
        table = pa.concat_tables(tables)
        struct = table["rollout_dispatched"].combine_chunks()
        steps = pc.struct_field(struct, "training_step")
        wanted = pc.and_(pc.equal(steps, step), pc.equal(pc.struct_field(struct, "purpose"), "train"))
        epochs = table["run_epoch"].to_numpy()
        live = np.ones(table.num_rows, np.bool_)
        for epoch in set(epochs.tolist()):
            live[epochs == epoch] = line.is_live_dispatch(epoch, step)
        kept = table.filter(pc.and_(wanted.fill_null(False), pa.array(live)))
        return kept if kept.num_rows else None

    def _enough(self, dispatched: pa.Table, num_members: int) -> bool:
        """Cheap look before a fold: as many dispatches, ends and judgements as there are members."""
        counts: Iterable[int] = (
            dispatched.num_rows,
            sum(t.num_rows for t in self._tables["rollout_ended"])
            + sum(t.num_rows for t in self._tables["dead_letter"])
            + sum(t.num_rows for t in self._tables["attempt_abandoned"]),
            sum(t.num_rows for t in self._tables["reward_assigned"])
            + sum(t.num_rows for t in self._tables["dead_letter"]),
        )
        return all(count >= num_members for count in counts)

    def _of(self, kind: str, ids: pa.Array) -> pa.Table:
        tables = self._tables[kind]
        if not tables:
            return arrow_schema(kind).empty_table()
        table = pa.concat_tables(tables)
        if kind in ("dead_letter", "dead_letter_redriven"):
            return table
        return table.filter(pc.is_in(table["trajectory_id"], ids))
