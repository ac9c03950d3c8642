"""Rollout events that came from the log and wait to be trained, by kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.cursor import Partition
from rolltape.schema.fold import Fold, fold
from rolltape.schema.render import arrow_schema
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.members import Member
from rolltape.trainers.score_book import TEACHER_KINDS, ScoreBook

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
_OF_THE_RUN: Final = ("teacher_routed", "problem_registered")


class EventBuffer:
    """Events of one run, held as the tables in which they came.

    Args:
        run_id: the run; events of others are none of its business.
        run_started: its start.
        known: by kind, events from before the log's part that is read: of the run's problems and routes to teachers.
    """

    def __init__(self, run_id: str, run_started: pa.Table, known: Mapping[str, pa.Table] | None = None) -> None:
        self._run_id = run_id
        self._run_started = run_started
        self._tables: dict[str, list[pa.Table]] = {kind: [] for kind in (*KINDS, *TEACHER_KINDS)}
        for kind, table in (known or {}).items():
            self.add(kind, table)

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

    def book(self, rules: BatchRules) -> ScoreBook | None:
        """What teachers said so far, where ``rules`` use it."""
        if not rules.uses_teacher:
            return None
        return ScoreBook.of({kind: self.all_of(kind) for kind in TEACHER_KINDS}, self._run_started, rules)

    def clear(self) -> None:
        """Let go of everything but the run's problems and routes."""
        self._tables = {kind: tables if kind in _OF_THE_RUN else [] for kind, tables in self._tables.items()}

    def keep(self, trajectory_ids: Iterable[str], *, used_groups: Collection[str] = ()) -> None:
        """Let go of everything but the events of these trajectories, and the run's problems and routes.

        Scores come by another way than rollouts do, so they may be here first: all stay but those of ``used_groups``.
        """
        ids = pa.array(list(trajectory_ids), pa.string())
        for kind in KINDS:
            if kind == "dead_letter_redriven":
                continue
            table = self.all_of(kind)
            kept = table.filter(pc.is_in(table["trajectory_id"], ids)) if table.num_rows else table
            self._tables[kind] = [kept] if kept.num_rows else []
        if not self._tables["dead_letter"]:
            self._tables["dead_letter_redriven"] = []
        self._forget_scores(used_groups)

    def first_offsets(self, kind: str, without_groups: Collection[str] = ()) -> dict[Partition, int]:
        """Smallest offset of a kind's rows in each partition, those of some groups left out."""
        found: dict[Partition, int] = {}
        left_out = pa.array(list(without_groups), pa.string())
        for whole in self._tables[kind]:
            table = whole.filter(pc.invert(pc.is_in(whole["group_id"], left_out)))
            places = table.group_by(["log_topic", "log_partition"]).aggregate([("log_offset", "min")]).to_pylist()
            for row in places:
                place = Partition(row["log_topic"], row["log_partition"])
                found[place] = min(row["log_offset_min"], found.get(place, row["log_offset_min"]))
        return found

    def _forget_scores(self, used_groups: Collection[str]) -> None:
        table = self.all_of("teacher_scored")
        if table.num_rows:
            used = pc.is_in(table["group_id"], pa.array(list(used_groups), pa.string()))
            table = table.filter(pc.invert(used.fill_null(False)))
        self._tables["teacher_scored"] = [table] if table.num_rows else []
