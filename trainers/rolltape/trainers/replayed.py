"""A batch from any recorded trajectories: read, folded and packed group by group, so that it is held once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rolltape.schema.fold import fold
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.members import (
    GRPO_RULES,
    Dropped,
    Member,
    MemberPacker,
    one_temperature,
    temperatures_of,
)
from rolltape.trainers.score_book import ScoreBook

DECODED_PER_PART: Final = 64
"""Trajectories read and folded at once where a read decodes files: as a lake does."""

_STEP: Final = 64  # trajectories: a part of mapped events is a multiple of it
_SPARE: Final = 0.25
_FOLDED_PER_PACKED: Final = 1.5

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
    versions: VersionRules,
    rules: BatchRules = GRPO_RULES,
    book: ScoreBook | None = None,
    *,
    trajectories_per_part: int | None = DECODED_PER_PART,
) -> Assembled:
    """Assemble the trajectories of ``groups`` (ids of each group), in that order of groups.

    Args:
        read: called once a part.
        groups: whole groups; one is never split over two parts.
        versions: as in :func:`plan_batch`, like the next two.
        rules: see there.
        book: see there.
        trajectories_per_part: about so many are read and folded at once. None: as :func:`room` says, for events that
            are slices of mapped memory (a recent window's).

    Raises:
        UntrainableError: ``group_of_one``, or actions sampled at several temperatures.
    """
    packer = MemberPacker(rules, book, num_members=sum(len(group) for group in groups))
    members: list[Member] = []
    dropped: list[Dropped] = []
    temperatures: set[float] = set()
    for ids in _parts(groups, trajectories_per_part):
        folded = fold(read(ids))
        plan = plan_batch(folded, versions, rules, book)
        packer.add(folded, plan.members)
        temperatures |= temperatures_of(folded, plan.members)
        members += plan.members
        dropped += plan.dropped
        del folded  # before the next part is read: two parts at once would be twice the memory
        pa.default_memory_pool().release_unused()
    return Assembled(
        plan=BatchPlan(members=tuple(members), dropped=tuple(dropped)),
        packed=packer.finish(),
        temperature=one_temperature(temperatures),
    )


def _parts(groups: Sequence[Sequence[str]], size: int | None) -> Iterator[list[str]]:
    """Ids of whole groups, about ``size`` at a time (None: as :func:`room` says)."""
    total = sum(len(group) for group in groups)
    done = 0
    part: list[str] = []
    for group in groups:
        if part and len(part) + len(group) > (size or room(total, done)):
            yield part
            done += len(part)
            part = []
        part.extend(group)
    if part:
        yield part


def room(total: int, done: int) -> int:
    """Trajectories of the next part, when ``done`` of ``total`` are packed.

    Folding a part takes one and a half times the memory that it fills in the batch. All that the batch is yet to fill
    is free for it, and some of the batch beyond; so parts begin large, and get smaller.
    """
    free = _SPARE * total + (total - done)
    fitting = int(free / (1 + _FOLDED_PER_PACKED))
    return max(fitting // _STEP, 1) * _STEP
