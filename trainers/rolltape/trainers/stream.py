"""Following rollout groups on the log as they grow and complete, in whatever partition and order they come.

A group lives in one partition. What this keeps of the log is bounded by the groups that are open or wait to be
trained, and that is what the workers' lead bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import Delivery, LogReader
from rolltape.schema import reasons
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.fold import Fold
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.buffer import EventBuffer
from rolltape.trainers.members import Dropped, Member
from rolltape.trainers.score_book import ScoreBook
from rolltape.trainers.segments import Attempt

_ROUTING: Final = ("teacher_routed", "problem_registered")
_OF_NO_GROUP: Final = ("dead_letter_redriven", *_ROUTING)


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group that was dispatched and is not consumed yet."""

    group_id: str
    ordinal: int
    size: int
    place: Partition
    first_offset: int  # of its first dispatch
    since: float  # when it was first seen here
    newest: dict[str, int] = field(default_factory=dict)  # trajectory -> its newest attempt
    ended: set[Attempt] = field(default_factory=set)
    judged: set[Attempt] = field(default_factory=set)
    closed: set[Attempt] = field(default_factory=set)  # by a dead letter, or cancelled: nothing more is waited for
    is_unfinished: bool = False  # the fold found it incomplete, and nothing of it came since
    lacks_teacher_only: bool = False  # what the fold missed is a score, or a route, and no member's end

    @property
    def is_complete(self) -> bool:
        """Whether every member that the group should have ended and was judged, or never will."""
        if self.is_unfinished or len(self.newest) < self.size:
            return False
        return all(key in self.closed or (key in self.ended and key in self.judged) for key in self.newest.items())

    @property
    def is_held(self) -> bool:
        """Whether it waits for its teacher alone: it is held, however long, and never given up (algorithms.md §4.9)."""
        return self.is_unfinished and self.lacks_teacher_only

    def given_up(self) -> list[Dropped]:
        """Its attempts, dropped because the group did not become complete in time."""
        return [
            Dropped(trajectory_id=t, attempt=a, group_id=self.group_id, reason=reasons.GROUP_INCOMPLETE)
            for t, a in sorted(self.newest.items())
        ]


@dataclass(slots=True, kw_only=True)
class Consumed:
    """What earlier batches of the live line used up: never looked at again.

    ``given_up`` are those that were consumed before they were complete, with the attempts that the batch named: a
    worker that came back may have made them again meanwhile.
    """

    groups: set[str] = field(default_factory=set)
    given_up: dict[str, set[Attempt]] = field(default_factory=dict)


class GroupStream:
    """Groups of one run from a reader on, without those that are consumed."""

    def __init__(
        self,
        reader: LogReader,
        *,
        run_id: str,
        run_started: pa.Table,
        consumed: Consumed,
        clock: Callable[[], float],
        known: Mapping[str, pa.Table] | None = None,
    ) -> None:
        """``known``: problems and routes of the run that the reader does not come by."""
        self._reader = reader
        self._events = EventBuffer(run_id, run_started, known)
        self._consumed = consumed
        self._clock = clock
        self._group_of: dict[str, str] = {}
        self._late: list[Dropped] = []
        self.groups: dict[str, OpenGroup] = {}
        self.last_news = clock()
        self.num_news = 0  # looks that found something

    @property
    def late(self) -> tuple[Dropped, ...]:
        """Attempts that were dispatched for groups that a batch had given up: to be dropped by name."""
        return tuple(self._late)

    def poll(self, timeout_s: float) -> bool:
        """Take in what came; whether anything of this run's training did."""
        deliveries = self._reader.poll(timeout_s)
        # Dispatches first: of one poll they may come behind what they make known.
        news = [self._take(d) for d in sorted(deliveries, key=lambda d: d.kind != "rollout_dispatched")]
        if any(news):
            self.last_news = self._clock()
            self.num_news += 1
        return any(news)

    def low_watermark(self, without: Collection[str] = ()) -> Cursor:
        """Where a reader has to start to see every group that is not consumed; ``without`` are about to be."""
        offsets = {place: self._reader.cursor[place] for place in self._reader.cursor}
        for group in self.groups.values():
            if group.group_id not in without:
                offsets[group.place] = min(group.first_offset, offsets.get(group.place, group.first_offset))
        for place, offset in self._events.first_offsets("teacher_scored", without).items():
            offsets[place] = min(offset, offsets.get(place, offset))
        return Cursor(offsets)

    def fold(self, groups: Iterable[OpenGroup]) -> Fold:
        """What the events say of these groups."""
        return self._events.fold(pa.array([t for group in groups for t in group.newest], pa.string()))

    def actions(self) -> pa.Table:
        """The ``action_sampled`` rows held."""
        return self._events.all_of("action_sampled")

    def book(self, rules: BatchRules) -> ScoreBook | None:
        """What teachers said so far, where ``rules`` use it."""
        return self._events.book(rules)

    def rewards_of(self, members: tuple[Member, ...]) -> pa.Table:
        """The ``reward_assigned`` rows of these members' attempts."""
        return self._events.rewards_of(members)

    def consume(self, group_ids: Collection[str]) -> None:
        """These groups are in a batch that is pinned: let go of them."""
        for group_id in group_ids:
            group = self.groups.pop(group_id)
            self._consumed.groups.add(group_id)
            if not group.is_complete:
                self._consumed.given_up[group_id] = set(group.newest.items())
            for trajectory in group.newest:
                del self._group_of[trajectory]
        for item in self._late:
            self._consumed.given_up[item.group_id or ""].add((item.trajectory_id, item.attempt))
        self._late = []
        self._events.keep(self._group_of, used_groups=self._consumed.groups)

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    def _take(self, delivery: Delivery) -> bool:
        table = self._events.of_run(delivery.table)
        if not table.num_rows:
            return False
        if delivery.kind == "rollout_dispatched":
            table = self._dispatched(table, delivery.partition)
        elif delivery.kind == "teacher_scored":
            table = self._scored(table)
        elif delivery.kind not in _OF_NO_GROUP:
            table = table.filter(pc.is_in(table["trajectory_id"], pa.array(list(self._group_of), pa.string())))
            self._note(delivery.kind, table)
        elif delivery.kind in _ROUTING:
            # Groups may have waited for it; where no teacher scores them on the tape nothing else comes of them.
            for group in self.groups.values():
                group.is_unfinished = False
        self._events.add(delivery.kind, table)
        return bool(table.num_rows)

    def _scored(self, table: pa.Table) -> pa.Table:
        """Scores of groups that are not consumed; of some the dispatch may not have come by yet."""
        groups = table["group_id"].to_pylist()
        for group_id in set(groups) & self.groups.keys():
            self.groups[group_id].is_unfinished = False
        return table.filter(pa.array([group_id not in self._consumed.groups for group_id in groups], pa.bool_()))

    def _dispatched(self, table: pa.Table, place: Partition) -> pa.Table:
        """Note what was handed out for training; gives the rows of groups that are not consumed."""
        struct = table["rollout_dispatched"].combine_chunks()
        wanted = pc.and_(
            pc.equal(pc.struct_field(struct, "purpose"), "train"), pc.is_null(pc.struct_field(struct, "training_step"))
        )
        table = table.filter(wanted)
        struct = table["rollout_dispatched"].combine_chunks()
        columns = [table[name].to_pylist() for name in ("group_id", "trajectory_id", "attempt", "log_offset")]
        numbers = [pc.struct_field(struct, name).to_pylist() for name in ("group_ordinal", "group_size")]
        kept = [self._dispatch(place, *row) for row in zip(*columns, *numbers, strict=True)]
        return table.filter(pa.array(kept, pa.bool_()))

    def _dispatch(
        self, place: Partition, group_id: str, trajectory: str, attempt: int, offset: int, ordinal: int, size: int
    ) -> bool:
        if group_id in self._consumed.groups:
            named = self._consumed.given_up.get(group_id)
            if named is not None and (trajectory, attempt) not in named:
                self._late.append(
                    Dropped(
                        trajectory_id=trajectory, attempt=attempt, group_id=group_id, reason=reasons.GROUP_INCOMPLETE
                    )
                )
            return False
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = OpenGroup(
                group_id=group_id, ordinal=ordinal, size=size, place=place, first_offset=offset, since=self._clock()
            )
        group.first_offset = min(group.first_offset, offset)
        group.newest[trajectory] = max(attempt, group.newest.get(trajectory, attempt))
        group.is_unfinished = False
        self._group_of[trajectory] = group_id
        return True

    def _note(self, kind: str, table: pa.Table) -> None:
        keys = list(zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True))
        for trajectory, _ in keys:
            self.groups[self._group_of[trajectory]].is_unfinished = False
        if kind == "attempt_abandoned":
            why = pc.struct_field(table[kind].combine_chunks(), "reason").to_pylist()
            # Any other reason announces the next attempt.
            keys = [key for key, reason in zip(keys, why, strict=True) if reason == "cancelled"]
        marks: Mapping[str, str] = {
            "rollout_ended": "ended",
            "reward_assigned": "judged",
            "dead_letter": "closed",
            "attempt_abandoned": "closed",
        }
        if kind in marks:
            for key in keys:
                getattr(self.groups[self._group_of[key[0]]], marks[kind]).add(key)
