"""Batches from groups as they complete (asynchronous training): the gates that stand where rollouts are consumed.

Workers run ahead, so a batch is whatever is complete: the lowest group ordinals first, each group whole. Rollouts that
are too old are dropped here, by name; a group that does not complete in time is dropped or, if the run says so, trained
with the members that it has. One that lacks its teacher alone is held instead: the scoring service says so by an alarm,
and a teacher that is away is no reason to lose what it would have scored (algorithms.md §4.9). What a batch took, what
it dropped and where the reader has to start to see the rest are in ``batch_formed``, so a trainer that comes back
neither repeats nor skips a group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema import reasons
from rolltape.schema.fold import Fold
from rolltape.store.lake import Lake
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.collect import unfinished
from rolltape.trainers.history import RunHistory
from rolltape.trainers.members import GRPO_RULES
from rolltape.trainers.score_book import ScoreBook
from rolltape.trainers.segments import Attempt
from rolltape.trainers.source import Gathered, groups_of
from rolltape.trainers.stream import Consumed, GroupStream, OpenGroup

_POLL_S: Final = 0.05
_GIVEN_UP: Final = frozenset({reasons.GROUP_INCOMPLETE, reasons.OPEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRules:
    """How groups become a batch.

    Attributes:
        num_groups: groups of a batch.
        group_timeout_s: a group that is not complete so long after it was first seen is overdue; not one that lacks a
            teacher's scores or route alone.
        train_overdue: train overdue groups with the members they have (and teachers have scored), as the batch's rules
            allow; else drop them.
        batch: who may be trained.
    """

    num_groups: int
    group_timeout_s: float
    train_overdue: bool = False
    batch: BatchRules = GRPO_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a look at the candidates found."""

    folded: Fold
    plan: BatchPlan
    taken: Sequence[str]  # groups to train, lowest ordinal first
    refused: Collection[str]  # groups of which nothing is trained
    book: ScoreBook | None  # what teachers said, where the rules use it


class StreamSource:
    """Batches from a :class:`GroupStream`.

    Args:
        stream: the groups.
        rules: how they become a batch.
        live_versions: (run epoch, version) of the versions on the run's live line; grows as the trainer publishes.
        meanwhile: called while waiting, often: brings weights into effect.
        clock: seconds.
    """

    def __init__(
        self,
        stream: GroupStream,
        rules: StreamRules,
        *,
        live_versions: Collection[tuple[int, int]],
        meanwhile: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._rules = rules
        self._live_versions = live_versions
        self._meanwhile = meanwhile
        self._clock = clock
        self._cursor = stream.low_watermark()
        self._pending: list[str] = []
        self._began = clock()  # when the wait for the present batch began
        self._seen = (-1, -1)  # news and overdue groups at the last look in vain

    def gather(self, step: int, versions: VersionRules) -> Gathered:  # noqa: ARG002  # a step has no groups of its own
        """Wait until enough groups are complete and fresh enough.

        Fewer make a batch, and none a skipped step, where groups had to be dropped and nothing came since for
        ``group_timeout_s``: workers that wait for their groups to be consumed would wait for ever.
        """
        self._began = self._clock()
        while self._stream.poll(0.0):
            pass  # what came while the last batch was trained is no reason to wait, nor to give anything up
        found = self._look(versions)
        while found is None:
            self._meanwhile()
            self._stream.poll(_POLL_S)
            found = self._look(versions)
        return found

    def consumed(self) -> None:
        """The batch is pinned: its groups, trained or dropped, are used up."""
        self._stream.consume(self._pending)
        self._pending = []

    def close(self) -> None:
        """Stop reading."""
        self._stream.close()

    def _look(self, versions: VersionRules) -> Gathered | None:
        now = self._clock()
        groups = self._stream.groups.values()
        overdue = [g for g in groups if self._is_overdue(g, now)]
        candidates = [g for g in groups if g.is_complete] + (overdue if self._rules.train_overdue else [])
        is_quiet = now - max(self._stream.last_news, self._began) >= self._rules.group_timeout_s
        if len(candidates) < self._rules.num_groups and not (is_quiet and (candidates or overdue)):
            return None
        if self._seen == (self._stream.num_news, len(overdue)) and not is_quiet:
            return None
        choice = self._choose(candidates, versions)
        given_up = [] if self._rules.train_overdue else overdue
        if len(choice.taken) < self._rules.num_groups and not (is_quiet and (choice.refused or given_up)):
            self._seen = (self._stream.num_news, len(overdue))
            return None
        self._seen = (-1, -1)
        return self._gathered(choice, given_up)

    def _is_overdue(self, group: OpenGroup, now: float) -> bool:
        if group.is_complete or (group.is_held and not self._rules.train_overdue):
            return False
        return now - group.since >= self._rules.group_timeout_s

    def _choose(self, candidates: Sequence[OpenGroup], versions: VersionRules) -> _Choice:
        folded, book = self._stream.fold(candidates), self._stream.book(self._rules.batch)
        versions = replace(versions, off_line=attempts_off_line(self._stream.actions(), self._live_versions))
        plan = plan_batch(folded, versions, self._rules.batch, book)
        current = folded.trajectories.filter(folded.trajectories["is_current"])
        running = set(unfinished(current)["group_id"].to_pylist())
        unscored = {d.group_id for d in plan.dropped if (d.trajectory_id, d.attempt) in plan.awaiting} - running
        found = groups_of(plan)
        for group in candidates:
            # An overdue group is trained with the members that are scored; where none is, it goes on waiting.
            is_held = group.group_id in unscored and (group.is_complete or group.group_id not in found)
            group.is_unfinished = is_held or (group.is_complete and group.group_id in running)
            group.lacks_teacher_only = is_held
        ready = {group.group_id: group.ordinal for group in candidates if not group.is_unfinished}
        trainable = [group for group in found if group in ready]
        taken = sorted(trainable, key=lambda group: ready[group])[: self._rules.num_groups]
        return _Choice(folded=folded, plan=plan, taken=taken, refused=ready.keys() - set(trainable), book=book)

    def _gathered(self, choice: _Choice, given_up: Sequence[OpenGroup]) -> Gathered:
        named = {*choice.taken, *choice.refused}
        members = tuple(m for m in choice.plan.members if m.group_id in set(choice.taken))
        dropped = [d for d in choice.plan.dropped if d.group_id in named]
        dropped += [item for group in given_up for item in group.given_up()]
        dropped += self._stream.late
        self._pending = [*named, *(group.group_id for group in given_up)]
        before, self._cursor = self._cursor, self._stream.low_watermark(without=self._pending)
        return Gathered(
            folded=choice.folded,
            plan=BatchPlan(members=members, dropped=tuple(dropped)),
            rewards=self._stream.rewards_of(members),
            cursors=(before, self._cursor),
            rules=self._rules.batch,
            book=choice.book,
        )


def attempts_off_line(actions: pa.Table, live_versions: Collection[tuple[int, int]]) -> frozenset[Attempt]:
    """Attempts with tokens of a version that is not on the live line: abandoned by a later run epoch, or never known.

    Args:
        actions: ``action_sampled`` rows.
        live_versions: (run epoch, version).
    """
    if not actions.num_rows:
        return frozenset()
    runs = pc.struct_field(actions["action_sampled"].combine_chunks(), "version_runs")
    parents, flat = pc.list_parent_indices(runs).to_numpy(), pc.list_flatten(runs)
    epochs = pc.struct_field(flat, "run_epoch").fill_null(-1).to_numpy()
    numbers = pc.struct_field(flat, "version").fill_null(-1).to_numpy()
    pairs, place = np.unique(np.stack([epochs.astype(np.int64), numbers.astype(np.int64)]), axis=1, return_inverse=True)
    is_off = np.array([pair not in live_versions for pair in zip(*pairs.tolist(), strict=True)], np.bool_)
    rows = actions.take(pa.array(np.unique(parents[is_off[place.ravel()]])))
    return frozenset(zip(rows["trajectory_id"].to_pylist(), rows["attempt"].to_pylist(), strict=True))


def consumed_by(lake: Lake, history: RunHistory) -> Consumed:
    """The fold of the run's ``batch_formed``: groups that batches on the live line hold, trained or dropped."""
    table = lake.read("batch_formed", run_id=history.run_id)
    if not table.num_rows:
        return Consumed()
    struct = table["batch_formed"].combine_chunks()
    live = pc.is_in(pc.struct_field(struct, "batch_id"), pa.array(history.batches, pa.string()))
    members, dropped = (pc.list_flatten(pc.struct_field(struct.filter(live), name)) for name in ("members", "dropped"))
    why = pc.is_in(pc.struct_field(dropped, "reason"), pa.array(sorted(_GIVEN_UP)))
    given_up = pc.unique(pc.struct_field(dropped.filter(why), "group_id"))
    found = Consumed(given_up={group: set() for group in given_up.to_pylist()})
    for named in (members, dropped):
        found.groups.update(pc.unique(pc.struct_field(named, "group_id")).to_pylist())
        mine = named.filter(pc.is_in(pc.struct_field(named, "group_id"), given_up))
        columns = (pc.struct_field(mine, name).to_pylist() for name in ("group_id", "trajectory_id", "attempt"))
        for group, trajectory, attempt in zip(*columns, strict=True):
            found.given_up[group].add((trajectory, attempt))
    return found
