"""A batch from any recorded trajectories: read, folded and packed group by group, so that it is held once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rolltape.schema.fold import fold
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.groups import PadRule
from rolltape.trainers.members import Dropped, Member, add_members, finish_members, one_temperature, temperatures_of
from rolltape.trainers.packing import BatchBuilder

TRAJECTORIES_PER_PART = 160

ReadEvents = Callable[[Sequence[str]], Mapping[str, pa.Table]]
"""Trajectory ids -> their events by kind; from a lake, or from its recent window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A batch that was put together from recorded trajectories."""

    plan: BatchPlan
    packed: PackedBatch
    temperature: float


def assemble(
    read: ReadEvents,
    groups: Sequence[Sequence[str]],
    rules: VersionRules,
    *,
    pad_rule: PadRule = "gt_half",
    group_method: bool = True,
    trajectories_per_part: int = TRAJECTORIES_PER_PART,
) -> Assembled:
    """Assemble the trajectories of ``groups`` (ids of each group), in that order of groups.

    Raises:
        UntrainableError: ``group_of_one``, or actions sampled at several temperatures.
    """
    builder = BatchBuilder(sum(len(group) for group in groups))
    members: list[Member] = []
    dropped: list[Dropped] = []
    rewards: list[float] = []
    temperatures: set[float] = set()
    for ids in _parts(groups, trajectories_per_part):
        folded = fold(read(ids))
        plan = plan_batch(folded, rules, pad_rule=pad_rule, group_method=group_method)
        rewards += add_members(builder, folded, plan.members, len(members))
        temperatures |= temperatures_of(folded, plan.members)
        members += plan.members
        dropped += plan.dropped
    return Assembled(
        plan=BatchPlan(members=tuple(members), dropped=tuple(dropped)),
        packed=finish_members(builder, members, rewards),
        temperature=one_temperature(temperatures),
    )


def _parts(groups: Sequence[Sequence[str]], size: int) -> Iterator[list[str]]:
    """Ids of whole groups, about ``size`` at a time."""
    part: list[str] = []
    for group in groups:
        if part and len(part) + len(group) > size:
            yield part
            part = []
        part.extend(group)
    if part:
        yield part
