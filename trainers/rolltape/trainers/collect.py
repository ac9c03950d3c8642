"""Collecting the rollouts of one step from the log, until all of its groups are complete (lock step)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import LogReader
from rolltape.schema.cursor import Cursor
from rolltape.schema.fold import Fold
from rolltape.schema.runline import RunLine
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.buffer import EventBuffer
from rolltape.trainers.members import Member
from rolltape.trainers.score_book import TEACHER_KINDS, ScoreBook


class StepCollector:
    """Gathers events until every member that a step expects has ended and was judged.

    The reader's position when a step is complete is that step's cursor: nothing of it is left behind, and nothing of
    the next exists yet, because a step's completion releases the dispatch of the next.
    """

    def __init__(
        self, reader: LogReader, *, run_id: str, run_started: pa.Table, known: Mapping[str, pa.Table] | None = None
    ) -> None:
        """``known``: problems and routes of the run that the reader does not come by."""
        self._reader = reader
        self._events = EventBuffer(run_id, run_started, known)
        self._cursor_before = reader.cursor
        self._folded: Fold | None = None  # what is complete, until something of it comes again

    @property
    def cursors(self) -> tuple[Cursor, Cursor]:
        """Positions before and after what the current step consumed."""
        return self._cursor_before, self._reader.cursor

    def poll(self, timeout_s: float) -> bool:
        """Take in what came; whether anything did."""
        deliveries = self._reader.poll(timeout_s)
        for delivery in deliveries:
            self._events.add(delivery.kind, self._events.of_run(delivery.table))
            if delivery.kind not in TEACHER_KINDS:
                self._folded = None
        return bool(deliveries)

    def complete(self, step: int, num_members: int, line: RunLine) -> Fold | None:
        """The fold of the step's live rollouts, once all ``num_members`` members are terminal; else None."""
        if self._folded is not None:
            return self._folded
        dispatched = self._dispatched(step, line)
        if dispatched is None or not self._enough(dispatched, num_members):
            return None
        folded = self._events.fold(pc.unique(dispatched["trajectory_id"]), dispatched)
        current = folded.trajectories.filter(folded.trajectories["is_current"])
        if current.num_rows < num_members or unfinished(current).num_rows:
            return None
        self._folded = folded
        return folded

    def book(self, rules: BatchRules) -> ScoreBook | None:
        """What teachers said so far, where ``rules`` use it."""
        return self._events.book(rules)

    def rewards_of(self, members: Sequence[Member]) -> pa.Table:
        """The collected ``reward_assigned`` rows of these members' attempts."""
        return self._events.rewards_of(members)

    def forget(self) -> None:
        """Drop what was collected: the step is done."""
        self._events.clear()
        self._folded = None
        self._cursor_before = self._reader.cursor

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    def _dispatched(self, step: int, line: RunLine) -> pa.Table | None:
        table = self._events.all_of("rollout_dispatched")
        if not table.num_rows:
            return None
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
        counts = (
            dispatched.num_rows,
            self._events.num_rows("rollout_ended", "dead_letter", "attempt_abandoned"),
            self._events.num_rows("reward_assigned", "dead_letter"),
        )
        return all(count >= num_members for count in counts)


def unfinished(current: pa.Table) -> pa.Table:
    """Those of some folded attempts that are open, or ended and not judged yet."""
    is_open = pc.equal(current["state"], "open")
    unjudged = pc.and_(pc.is_null(current["reward_state"]), pc.equal(current["state"], "ended"))
    return current.filter(pc.or_(is_open, unjudged))
