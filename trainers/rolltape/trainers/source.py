"""Where a trainer's batches come from: the rollouts of its next step (lock step), or whichever groups are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from rolltape.schema.cursor import Cursor
from rolltape.schema.fold import Fold
from rolltape.schema.runline import RunLine
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.collect import StepCollector
from rolltape.trainers.members import GRPO_RULES, pack_members
from rolltape.trainers.pinned import member_columns
from rolltape.trainers.score_book import ScoreBook

_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Rollouts of one batch: what they are, who is trained, and what of the log they used up."""

    folded: Fold
    plan: BatchPlan
    rewards: pa.Table  # reward_assigned of the members
    cursors: tuple[Cursor, Cursor]  # before and after
    rules: BatchRules = GRPO_RULES
    book: ScoreBook | None = None  # what teachers said, where the rules use it

    def member_columns(self) -> tuple[pa.StructArray, str]:
        """The members as ``batch_formed`` names them, and the batch digest."""
        return member_columns(self.folded, self.plan.members, self.rules, self.book)

    def packed(self) -> PackedBatch:
        """The members' tensors."""
        return pack_members(self.folded, self.plan.members, self.rules, self.book)


class BatchSource(Protocol):
    """Gathers batches from the log."""

    def gather(self, step: int, versions: VersionRules) -> Gathered:
        """Wait until a batch for ``step`` is there."""
        ...

    def consumed(self) -> None:
        """The batch that was gathered last is pinned (or an older one is trained instead): go on behind it."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


class LockStepSource:
    """All groups of the step, and nothing else."""

    def __init__(self, collector: StepCollector, line: RunLine, *, num_members: int, rules: BatchRules) -> None:
        self._collector = collector
        self._line = line
        self._num_members = num_members
        self._rules = rules

    def gather(self, step: int, versions: VersionRules) -> Gathered:
        """Wait until every member of the step has ended, was judged and, where teachers say how, was scored."""
        collector, rules = self._collector, self._rules
        while True:
            folded = collector.complete(step, self._num_members, self._line)
            if folded is not None:
                book = collector.book(rules)
                plan = plan_batch(folded, versions, rules, book)
                if not plan.awaiting:
                    break
            collector.poll(_POLL_S)
        rewards = collector.rewards_of(plan.members)
        return Gathered(folded=folded, plan=plan, rewards=rewards, cursors=collector.cursors, rules=rules, book=book)

    def consumed(self) -> None:
        """Nothing of the next step came yet: its dispatch waits for this one's completion."""
        self._collector.forget()

    def close(self) -> None:
        """Stop reading."""
        self._collector.close()


def groups_of(plan: BatchPlan) -> Sequence[str]:
    """Groups that a plan trains, in its order."""
    return list(dict.fromkeys(member.group_id for member in plan.members))
