"""Members of a batch: who they are, their rows in a fold, and their packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.schema import reasons
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.packing import BatchBuilder, FlatSegments


class Member(NamedTuple):
    """One member of a batch: a trajectory's attempt, or a padding copy of one.

    A named tuple, because a batch makes thousands of them and a frozen dataclass takes ten times as long.
    """

    trajectory_id: str
    attempt: int
    group_id: str
    group_ordinal: int
    member: int
    is_padding: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """What names its record on the tape."""
        return (self.trajectory_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A candidate that is not trained, and the named reason."""

    trajectory_id: str
    attempt: int
    group_id: str | None
    reason: str


def fold_index(folded: Fold) -> dict[tuple[str, int], int]:
    """Row of each (trajectory, attempt) in ``folded.trajectories``."""
    table = folded.trajectories
    keys = zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
    return {key: row for row, key in enumerate(keys)}


def dense_groups(keys: Sequence[str]) -> npt.NDArray[np.int64]:
    """A number for each key, from 0, in the order of first appearance."""
    numbers: dict[str, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def pack_members(folded: Fold, members: Sequence[Member]) -> PackedBatch:
    """Packed tensors of the members' segments that hold action tokens, in member order then segment order.

    A member without action tokens (an empty response) has no row; its reward still counts in its group.
    """
    builder = BatchBuilder(len(members))
    rewards = add_members(builder, folded, members, 0)
    return finish_members(builder, members, rewards)


def add_members(builder: BatchBuilder, folded: Fold, members: Sequence[Member], first: int) -> list[float]:
    """Add members number ``first`` and following from a fold that holds them; returns their rewards (NaN: none)."""
    flat = FlatSegments.of(folded.segments)
    segment_rows = _segment_rows(folded, flat)
    rows: list[int] = []
    row_member: list[int] = []
    for number, member in enumerate(members, first):
        own = segment_rows.get(member.key, [])
        rows += own
        row_member += [number] * len(own)
    builder.add(flat, rows, row_member)
    index = fold_index(folded)
    rewards = folded.trajectories["reward"].to_pylist()
    found = (rewards[index[member.key]] for member in members)
    return [float("nan") if reward is None else reward for reward in found]


def finish_members(builder: BatchBuilder, members: Sequence[Member], rewards: Sequence[float]) -> PackedBatch:
    """The batch of all members added."""
    return builder.finish(
        rewards=rewards,
        groups=dense_groups([m.group_id for m in members]).tolist(),
        is_padding=[m.is_padding for m in members],
    )


def _segment_rows(folded: Fold, flat: FlatSegments) -> dict[tuple[str, int], list[int]]:
    """Rows of each attempt's segments that have a token to train, in segment order; rejected summaries have none."""
    segments = folded.segments
    found: dict[tuple[str, int], list[int]] = {}
    names = ("trajectory_id", "attempt", "is_accepted")
    keys = zip(*(segments[name].to_pylist() for name in names), flat.has_action().tolist(), strict=True)
    # A fold's rows are ordered by (run, trajectory, attempt, segment).
    for row, (trajectory, attempt, accepted, has_action) in enumerate(keys):
        if has_action and accepted is not False:
            found.setdefault((trajectory, attempt), []).append(row)
    return found


def temperatures_of(folded: Fold, members: Sequence[Member]) -> set[float]:
    """Temperatures at which the members' actions were sampled."""
    wanted = {member.key for member in members}
    rows = folded.trajectories.select(["trajectory_id", "attempt", "temperature"]).to_pylist()
    return {
        row["temperature"]
        for row in rows
        if row["temperature"] is not None and (row["trajectory_id"], row["attempt"]) in wanted
    }


def one_temperature(found: set[float]) -> float:
    """The one temperature of a batch; 1.0 for a batch without actions.

    Raises:
        UntrainableError: there are several.
    """
    if len(found) > 1:
        raise UntrainableError(f"{reasons.MIXED_TEMPERATURE}: one batch holds actions sampled at {sorted(found)}")
    return next(iter(found), 1.0)
