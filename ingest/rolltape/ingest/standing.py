"""Where lanes and partitions stand: what is archived of them, and what the next commit will add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rolltape.ingest.lanes import NOTHING, Lane, behind_app_id, behind_marks, lane_marks, log_app_id
from rolltape.ingest.stamping import partition_of_app
from rolltape.schema.cursor import Partition

ARCHIVER_EPOCH: Final = 1
"""The archiver's own lanes go on where the lake's marks stand, so one epoch serves for ever."""


@dataclass(slots=True)
class _Staged:
    """What the next commit moves."""

    marks: dict[Lane, int] = field(default_factory=dict)
    offsets: dict[Partition, int] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)


class Moves(NamedTuple):
    """What a commit is to move, from where, and up to which offset each partition is archived after it."""

    moved: Mapping[str, int]
    known: Mapping[str, int | None]
    offsets: Mapping[Partition, int]


class Standing:
    """Lane marks, offsets and other application transactions, archived and staged."""

    def __init__(self, transactions: Mapping[str, int], archiver_id: str) -> None:
        """Take over what a target's transactions say."""
        self._archiver_id = archiver_id
        self._transactions = transactions
        self._marks = lane_marks(transactions)
        self._behind = behind_marks(transactions)
        self._offsets = {
            partition: version
            for app_id, version in transactions.items()
            if (partition := partition_of_app(app_id)) is not None
        }
        self._staged = _Staged()

    @property
    def has_staged(self) -> bool:
        """Whether a commit may change something."""
        return bool(self._staged.marks or self._staged.offsets or self._staged.transactions)

    def mark(self, lane: Lane) -> int:
        """Last ``lane_seq`` of a lane that is archived or staged."""
        return self._staged.marks.get(lane, self._marks.get(lane, NOTHING))

    def set_mark(self, lane: Lane, lane_seq: int) -> None:
        """Stage a lane's mark."""
        self._staged.marks[lane] = lane_seq

    def last_offset(self, partition: Partition) -> int:
        """Last offset of a partition that is archived or staged."""
        return self._staged.offsets.get(partition, self._offsets.get(partition, NOTHING))

    def note_offset(self, partition: Partition, offset: int) -> None:
        """Stage a partition's offset; never behind where it stands."""
        self._staged.offsets[partition] = max(offset, self.last_offset(partition))

    def transaction(self, app_id: str) -> int | None:
        """Version of any application transaction that is archived or staged."""
        return self._staged.transactions.get(app_id, self._transactions.get(app_id))

    def set_transaction(self, app_id: str, version: int) -> None:
        """Stage an application transaction that is neither a lane's nor a partition's."""
        self._staged.transactions[app_id] = version

    def behind(self, lane: Lane) -> int:
        """The offset at which what had waited in a lane is admitted; :data:`NOTHING` for none."""
        return self._behind.get(lane, NOTHING)

    def set_behind(self, lane: Lane, offset: int) -> None:
        """Stage it, so that whoever goes on after a commit in between places the rest likewise."""
        self._behind[lane] = offset
        self._staged.transactions[behind_app_id(lane)] = offset

    def own_lane(self, partition: Partition) -> dict[str, Any]:
        """Lane columns of the next event that the archiver itself writes to a partition."""
        lane = Lane(self._archiver_id, ARCHIVER_EPOCH, *partition)
        lane_seq = self.mark(lane) + 1
        self._staged.marks[lane] = lane_seq
        return {"producer_id": self._archiver_id, "producer_epoch": ARCHIVER_EPOCH, "lane_seq": lane_seq}

    def moves(self, archived_to: Callable[[Partition, int], int]) -> Moves:
        """What is staged; ``archived_to`` says how far a partition that stands at an offset is archived."""
        staged = self._staged
        offsets = {partition: archived_to(partition, offset) for partition, offset in staged.offsets.items()}
        transactions = {lane.app_id: mark for lane, mark in staged.marks.items()}
        transactions |= {log_app_id(partition): offset for partition, offset in offsets.items()}
        transactions |= staged.transactions
        known: dict[str, int | None] = {lane.app_id: self._marks.get(lane) for lane in staged.marks}
        known |= {log_app_id(partition): self._offsets.get(partition) for partition in staged.offsets}
        known |= {app_id: self._transactions.get(app_id) for app_id in staged.transactions}
        moved = {
            app_id: version
            for app_id, version in transactions.items()
            if version != (NOTHING if known[app_id] is None else known[app_id])
        }
        return Moves(moved, known, offsets)

    def committed(self, moves: Moves) -> None:
        """What was staged is archived."""
        self._marks.update(self._staged.marks)
        self._offsets.update({partition: offset for partition, offset in moves.offsets.items() if offset != NOTHING})
        if self._staged.transactions:
            self._transactions = {**self._transactions, **self._staged.transactions}
        self._staged = _Staged()
