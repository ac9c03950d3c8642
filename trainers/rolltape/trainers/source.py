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
from rolltape.trainers.collect import StepCollector
from rolltape.trainers.groups import PadRule

_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Rollouts of one batch: what they are, who is trained, and what of the log they used up."""

    folded: Fold
    plan: BatchPlan
    rewards: pa.Table  # reward_assigned of the members
    cursors: tuple[Cursor, Cursor]  # before and after


class BatchSource(Protocol):
    """Gathers batches from the log."""

    def gather(self, step: int, rules: VersionRules) -> Gathered:
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

    def __init__(self, collector: StepCollector, line: RunLine, *, num_members: int, pad_rule: PadRule) -> None:
        self._collector = collector
        self._line = line
        self._num_members = num_members
        self._pad_rule: PadRule = pad_rule

    def gather(self, step: int, rules: VersionRules) -> Gathered:
        """Wait until every member of the step has ended and was judged."""
        collector = self._collector
        while (folded := collector.complete(step, self._num_members, self._line)) is None:
            collector.poll(_POLL_S)
        plan = plan_batch(folded, rules, pad_rule=self._pad_rule)
        return Gathered(folded=folded, plan=plan, rewards=collector.rewards_of(plan.members), cursors=collector.cursors)

    def consumed(self) -> None:
        """Nothing of the next step came yet: its dispatch waits for this one's completion."""
        self._collector.forget()

    def close(self) -> None:
        """Stop reading."""
        self._collector.close()


def groups_of(plan: BatchPlan) -> Sequence[str]:
    """Groups that a plan trains, in its order."""
    return list(dict.fromkeys(member.group_id for member in plan.members))
