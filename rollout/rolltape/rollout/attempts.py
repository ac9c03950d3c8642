"""Attempts that a worker finds on the tape for a step: which stay, which are scored again, which are made again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import LogReader
from rolltape.rollout.tape import read_to
from rolltape.schema.cursor import Cursor
from rolltape.schema.reward import RewardComponent
from rolltape.schema.runline import RunLine

TOPICS: Final = ("rollout",)
KINDS: Final = ("rollout_dispatched", "attempt_abandoned", "action_sampled", "rollout_ended", "reward_assigned")

Place = tuple[str, int | None, int, int]
"""(purpose, training step, group ordinal, member). Step None: meant for none, and the ordinal counts in the run."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The newest attempt at one place of a step."""

    trajectory_id: str
    attempt: int
    epoch: int  # run epoch of its dispatch
    step: int | None
    token_ids: list[int] = field(default_factory=list)
    ended: str | None = None  # status of its own end
    rewarded: bool = False
    components: tuple[RewardComponent, ...] = ()  # of the reward of the whole attempt
    abandoned: bool = False

    def stays(self, line: RunLine) -> bool:
        """Whether the attempt counts and needs nothing but, perhaps, a reward."""
        return self.ended is not None and not self.abandoned and self.is_live(line)

    def is_live(self, line: RunLine) -> bool:
        """Whether its dispatch counts; one that is meant for no step does in every run epoch."""
        return self.step is None or line.is_live_dispatch(self.epoch, self.step)


class AttemptBook:
    """Attempts of one worker, by place. What the worker writes itself it enters at once."""

    def __init__(self, run_id: str, worker_id: str) -> None:
        self._run_id = run_id
        self._worker_id = worker_id
        self._newest: dict[Place, Attempt] = {}
        self._by_id: dict[tuple[str, int], Attempt] = {}

    def newest(self, place: Place) -> Attempt | None:
        """The newest attempt at a place."""
        return self._newest.get(place)

    def enter(self, place: Place, attempt: Attempt) -> None:
        """Note an attempt; a newer one of the same place takes over."""
        known = self._newest.get(place)
        if known is None or attempt.attempt >= known.attempt:
            self._newest[place] = attempt
        self._by_id[attempt.trajectory_id, attempt.attempt] = attempt

    def forget(self, is_past: Callable[[Place], bool]) -> None:
        """Let go of the attempts at places that nobody will ask for again."""
        self._newest = {place: attempt for place, attempt in self._newest.items() if not is_past(place)}
        self._by_id = {(a.trajectory_id, a.attempt): a for a in self._newest.values()}

    def read_all(self, reader: LogReader, end: Cursor) -> None:
        """Take in everything that the reader has up to ``end``, dispatches first."""
        tables: dict[str, list[pa.Table]] = {kind: [] for kind in KINDS}

        def keep(kind: str, table: pa.Table) -> None:
            mine = table.filter(pc.equal(table["run_id"], self._run_id))
            if mine.num_rows:
                tables[kind].append(mine)

        read_to(reader, end, TOPICS, keep)
        for kind in KINDS:
            for table in tables[kind]:
                self._apply(kind, table)

    def _apply(self, kind: str, table: pa.Table) -> None:
        if kind == "rollout_dispatched":
            self._apply_dispatched(table)
            return
        known = self._known(table)
        if kind == "action_sampled":
            for attempt, token_ids in zip(known, table["token_ids"].to_pylist(), strict=True):
                if attempt is not None:
                    attempt.token_ids = [*attempt.token_ids, *(token_ids or ())]
        elif kind == "rollout_ended":
            for attempt, status in zip(known, pc.struct_field(table[kind], "status").to_pylist(), strict=True):
                if attempt is not None:
                    attempt.ended = status
        elif kind == "reward_assigned":
            _note_rewards(known, table[kind])
        else:
            for attempt in filter(None, known):
                attempt.abandoned = True

    def _apply_dispatched(self, table: pa.Table) -> None:
        struct = table["rollout_dispatched"]
        table = table.filter(pc.equal(pc.struct_field(struct, "worker_id"), self._worker_id))
        struct = table["rollout_dispatched"]
        names = ("purpose", "training_step", "group_ordinal", "member")
        places = zip(*(pc.struct_field(struct, name).to_pylist() for name in names), strict=True)
        ids = (table[name].to_pylist() for name in ("trajectory_id", "attempt", "run_epoch"))
        for place, trajectory_id, attempt, epoch in zip(places, *ids, strict=True):
            self.enter(place, Attempt(trajectory_id=trajectory_id, attempt=attempt, epoch=epoch, step=place[1]))

    def _known(self, table: pa.Table) -> list[Attempt | None]:
        keys = zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
        return [self._by_id.get(key) for key in keys]


def _note_rewards(known: list[Attempt | None], rewards: pa.ChunkedArray) -> None:
    whole = pc.is_null(pc.struct_field(rewards, "target_event_id")).to_pylist()
    components = pc.struct_field(rewards, "components")
    for row, attempt in enumerate(known):
        if attempt is not None:
            attempt.rewarded = True
            if whole[row]:
                attempt.components = tuple(RewardComponent.from_row(part) for part in components[row].as_py() or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done for the places of a step, by row index."""

    record: np.ndarray[Any, np.dtype[np.int64]]  # dispatch (again) and record
    abandon: np.ndarray[Any, np.dtype[np.int64]]  # of these, an earlier attempt is abandoned first
    score: np.ndarray[Any, np.dtype[np.int64]]  # ended, but not judged

    @property
    def is_empty(self) -> bool:
        """Whether the step is complete."""
        return not (len(self.record) or len(self.score))


def plan_step(book: AttemptBook, places: Iterable[Place], line: RunLine) -> Plan:
    """Compare what a step needs with what the tape has."""
    record, abandon, score = [], [], []
    for row, place in enumerate(places):
        attempt = book.newest(place)
        if attempt is None:
            record.append(row)
        elif not attempt.stays(line):
            record.append(row)
            if not attempt.abandoned:
                abandon.append(row)
        elif not attempt.rewarded:
            score.append(row)
    return Plan(record=_rows(record), abandon=_rows(abandon), score=_rows(score))


def _rows(rows: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64)
