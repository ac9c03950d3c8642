"""The archive: from records of a log to one exactly-once commit of the lake.

Shared by every log that archives: records are offered in the order of their partition, and :meth:`Archive.commit`
writes everything accepted since, with the lane marks and offsets in the same commit. Duplicates are recognised by the
lane's mark; a record beyond mark + 1 is parked until the missing ones come or an operator accepts their loss.

Some logs number their records themselves (Kafka). There the rows of a record carry the offset at which it became
admissible: its own, or that of the record which closed the gap before it. So the tape is a function of the log's
content alone, whoever archives it and however often they start again, and what was read up to a cursor never changes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, Final, Protocol

import pyarrow as pa

from rolltape.ingest.alarms import alarm_batch
from rolltape.ingest.conflicts import ConflictWindow, ContentLookup
from rolltape.ingest.lanes import NOTHING, Gap, Lane, foreign_app_id
from rolltape.ingest.losses import AcceptedLoss, loss_letter
from rolltape.ingest.parking import MAX_PARKED_BYTES, Offered, Parking, Refused, Rereads
from rolltape.ingest.refused import letter_of_foreign, letters_of_record
from rolltape.ingest.staging import Staging
from rolltape.ingest.stamping import place
from rolltape.ingest.standing import Standing
from rolltape.schema import reasons
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition
from rolltape.schema.identity import derived_id
from rolltape.schema.validate import Limits

CONTROL: Final = Partition("control", 0)


class Outcome(Enum):
    """What became of an offered record."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    PARKED = "parked"


class ArchiveTarget(ContentLookup, Protocol):
    """Where an archive commits to: the lake, or its in-memory twin."""

    def transactions(self) -> Mapping[str, int]:
        """Application transactions as of now."""
        ...

    def append(
        self, tables: Mapping[str, pa.Table], transactions: Mapping[str, int], expected: Mapping[str, int | None]
    ) -> Any:
        """Commit rows and transactions at once, if the transactions stand where ``expected`` says."""
        ...


class Archive:
    """Lane accounting, validation and commits for one target. Not thread-safe."""

    def __init__(
        self,
        target: ArchiveTarget,
        *,
        limits: Limits | None = None,
        archiver_id: str = "committer",
        max_parked_bytes: int = MAX_PARKED_BYTES,
        kinds: Collection[str] | None = None,
    ) -> None:
        """Take the marks over from the target. Of kinds other than ``kinds`` only the lanes are accounted for."""
        self._target = target
        self._archiver_id = archiver_id
        self._max_parked_bytes = max_parked_bytes
        self._conflicts = ConflictWindow(target)
        self._kinds = kinds
        self._limits = limits or Limits()
        self._alarmed: set[tuple[Lane, int]] = set()
        self._headless: set[Partition] = set()
        self.reload()

    def reload(self) -> Mapping[str, int]:
        """Forget what is not committed and take marks and offsets from the target again; returns all transactions."""
        transactions = self._target.transactions()
        self._standing = Standing(transactions, self._archiver_id)
        self._rows = Staging(self._standing, self._conflicts, self._limits, self._kinds, self._accept)
        self._closed: list[Lane] = []
        self._parking = Parking(self._max_parked_bytes)
        self._rereads = Rereads()
        self._conflicts.forget_staged()
        self._conflicts.look_back(self._kinds)
        return transactions

    # What stands where.

    def mark(self, lane: Lane) -> int:
        """Last ``lane_seq`` of a lane that is archived or staged."""
        return self._standing.mark(lane)

    def last_offset(self, partition: Partition) -> int:
        """Last offset of a partition that is archived or staged."""
        self._rows.settle()
        return self._standing.last_offset(partition)

    def transaction(self, app_id: str) -> int | None:
        """Version of any application transaction that is archived or staged."""
        return self._standing.transaction(app_id)

    @property
    def has_staged(self) -> bool:
        """Whether a commit may change something."""
        return self._standing.has_staged

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the staged rows and refused payloads hold."""
        return self._rows.num_bytes

    @property
    def parked_bytes(self) -> int:
        """Bytes of parked records that are kept in memory."""
        return self._parking.num_bytes

    def gaps(self) -> list[Gap]:
        """Lanes that stand still, and what they wait for."""
        return [
            Gap(lane=lane, first=mark + 1, last=lowest - 1)
            for lane, lowest in self._parking.lanes()
            if lowest > (mark := self.mark(lane)) + 1
        ]

    def waiting_since(self, lane: Lane) -> int | None:
        """The log's time stamp, in microseconds, of the record that a lane's gap showed itself by; None: not kept."""
        return self._parking.waiting_since(lane)

    def resumable(self) -> list[Lane]:
        """Lanes whose missing records came: what was parked behind them is to be offered again."""
        return [lane for lane, lowest in self._parking.lanes() if lowest <= self.mark(lane) + 1]

    def unpark(self, lane: Lane) -> None:
        """Forget what is parked of a lane; the caller offers it again."""
        self._parking.drop(lane)

    def reread_from(self, partition: Partition) -> int | None:
        """Where the caller has to go on reading a partition; None: after what it offered last.

        Not None once parked records that were not kept can be admitted: then everything from that offset is to be
        offered again, before anything else of the partition.
        """
        return self._rereads.next_offset(partition)

    # Taking records.

    def offer(
        self,
        record: Record,
        *,
        offset: int | None = None,
        checksum: int | None = None,
        refused: Refused | None = None,
        time_us: int | None = None,
    ) -> Outcome:
        """Stage one record, or say why not.

        Args:
            record: the record.
            offset: the log's own; None lets the archive number the partition.
            checksum: the value's CRC-32, where the caller has it.
            refused: why it is a dead letter whatever its rows are.
            time_us: the log's own time stamp, for the dead letters that the record may become (default: now).
        """
        headers = record.headers
        lane = Lane(headers.producer_id, headers.producer_epoch, record.topic, record.partition)
        checksum = zlib.crc32(memoryview(record.value)) if checksum is None else checksum
        offered = Offered(record, checksum, offset, refused, time_us)
        if offset is not None:
            self._note_offset(lane.log_partition, offset)
        mark = self.mark(lane)
        if mark == NOTHING and lane.log_partition in self._headless:
            mark = headers.first_lane_seq - 1
            self._standing.set_mark(lane, mark)
        if headers.last_lane_seq <= mark:
            return self._offer_known(offered, lane)
        if headers.first_lane_seq > mark + 1:
            return self._park(offered, lane)
        if offset is None:
            self._take(offered, lane, None)
        else:
            # What was parked before this archive began is admitted where it became admissible.
            at = max(offset, self._standing.behind(lane))
            self._take(offered, lane, at)
            self._take_parked(lane, at)
        return Outcome.ACCEPTED

    def _note_offset(self, partition: Partition, offset: int) -> None:
        self._standing.note_offset(partition, offset)
        self._rereads.pass_offset(partition, offset)

    def begin_lanes_late(self, partition: Partition) -> None:
        """Take the first record of each unknown lane of a partition for its beginning: the log lost what was before.

        For readers without a lake only. Whoever archives leaves lanes in a gap until an operator accepts the loss.
        """
        self._headless.add(partition)

    def pass_offset(self, partition: Partition, offset: int) -> None:
        """Note that the log has nothing to archive up to ``offset``: its own marks, say, or nothing at all."""
        self._note_offset(partition, offset)

    def _park(self, offered: Offered, lane: Lane) -> Outcome:
        first = offered.record.headers.first_lane_seq
        if offered.offset is not None:
            if self._parking.holds(lane, first):
                return self._offer_known(offered, lane, Outcome.PARKED)
            self._conflicts.remember_record(lane, first, offered.checksum)
        self._parking.put(lane, first, offered)
        return Outcome.PARKED

    def _take(self, offered: Offered, lane: Lane, at: int | None) -> None:
        """Stage a record whose turn it is at offset ``at``, or at the next one of a log that this archive numbers."""
        headers = offered.record.headers
        self._conflicts.remember_record(lane, headers.first_lane_seq, offered.checksum)
        self._rows.admit(offered, at, self.mark(lane) - headers.first_lane_seq + 1)
        self._standing.set_mark(lane, headers.last_lane_seq)

    def _take_parked(self, lane: Lane, at: int) -> None:
        """Stage what waited in a lane, or in one whose loss was accepted, and is admissible now: at offset ``at``."""
        self._closed.append(lane)
        while self._closed:
            lane = self._closed.pop()
            while (offered := self._parking.take(lane, self.mark(lane) + 1)) is not None:
                if offered.record.headers.last_lane_seq > self.mark(lane):
                    self._take(offered, lane, at)
            again = self._parking.take_beyond(lane, self.mark(lane) + 1)
            if again is not None:
                self._read_again(lane, again, at)

    def _accept(self, loss: AcceptedLoss, record: Record) -> str | None:
        """Close the gap whose loss an operator's event accepts; says why not where it fits no gap."""
        lane, mark, lowest = loss.lane, self.mark(loss.lane), self._parking.lowest(loss.lane)
        if lane.log_partition != (record.topic, record.partition) or lane.producer_id == record.headers.producer_id:
            return f"expected another producer's lane on {record.topic}/{record.partition}, got {lane}"
        if loss.first != mark + 1 or loss.last < loss.first or (lowest is not None and loss.last >= lowest):
            missing = f"{mark + 1} to {'…' if lowest is None else lowest - 1}"
            return (
                f"lane {lane}: expected the loss of lane_seq {missing} to be accepted, got {loss.first} to {loss.last}"
            )
        self._standing.set_mark(lane, loss.last)
        self._closed.append(lane)
        return None

    def _read_again(self, lane: Lane, offset: int, at: int) -> None:
        """Have everything from ``offset`` offered again, and admit this lane's records of it at ``at``.

        A commit in between says so too, or whoever goes on after it would place the rest elsewhere.
        """
        partition = lane.log_partition
        self._standing.set_behind(lane, at)
        self._rereads.want(partition, offset, until=max(at, self._standing.last_offset(partition)))

    def _offer_known(self, offered: Offered, lane: Lane, outcome: Outcome = Outcome.DUPLICATE) -> Outcome:
        record = offered.record
        first = record.headers.first_lane_seq
        if not self._conflicts.is_new_content(lane, first, offered.checksum):
            return outcome
        self._rows.settle()
        detail = f"expected the bytes that lane_seq {first} of lane {lane} came with before, got others; both are kept"
        letter = letters_of_record(record, reason=reasons.CONFLICT, detail=detail)[0]
        # The lane and index ranges are accounted for by the first delivery.
        letter.update(first_lane_seq=None, last_lane_seq=None, first_event_index=None, last_event_index=None)
        letter["event_id"] = derived_id(letter["event_id"], offered.checksum)
        at = offered.offset
        if at is None:
            at = self.last_offset(lane.log_partition) + 1
            self._note_offset(lane.log_partition, at)
        elif self._target.read_events("dead_letter", [letter["event_id"]], None):
            # Offered again after a restart, because of something parked before it.
            return outcome
        self._rows.add_letters([letter], offered, at)
        return outcome

    def offer_foreign(
        self, partition: Partition, offset: int, *, detail: str, payload: bytes, time_us: int | None = None
    ) -> Outcome:
        """Stage a dead letter for a message of the log that is no record of ours, unless it was archived before."""
        self._note_offset(partition, offset)
        app_id = foreign_app_id(partition)
        archived = self.transaction(app_id)
        if archived is not None and offset <= archived:
            return Outcome.DUPLICATE
        self._standing.set_transaction(app_id, offset)
        self._rows.settle()
        letter = letter_of_foreign(partition, offset, detail=detail, payload=payload)
        self._rows.add_letter(letter, partition, offset, time_us)
        return Outcome.ACCEPTED

    def accept_loss(self, lane: Lane, through: int) -> None:
        """Close a gap by a dead letter that accounts for ``lane_seq`` mark + 1 to ``through``, if any is missing.

        For logs that this archive numbers. In others an operator sends the acceptance as an event (see
        :func:`rolltape.ingest.deadletters.accept_loss_in_log`), and whoever reads it closes the gap.
        """
        first = self.mark(lane) + 1
        if first > through:
            return
        at = self.last_offset(lane.log_partition) + 1
        self._note_offset(lane.log_partition, at)
        self._rows.add_letter(loss_letter(lane, first, through), lane.log_partition, at, None)
        self._standing.set_mark(lane, through)

    # Committing.

    def raise_alarms(self) -> None:
        """Stage one alarm for each gap that has none yet, on ``control/0``.

        For logs that this archive numbers; a sink of another log sends an event of its own for each of :meth:`gaps`.
        """
        for gap in self.gaps():
            event_id = derived_id("alarm_raised", "lane_gap", gap.lane.app_id, gap.first)
            if (gap.lane, gap.first) in self._alarmed:
                continue
            self._alarmed.add((gap.lane, gap.first))
            if not self._target.read_events("alarm_raised", [event_id], None):
                at = self.last_offset(CONTROL) + 1
                self._note_offset(CONTROL, at)
                stamps = {**self._standing.own_lane(CONTROL), **place(CONTROL, at)}
                batch = alarm_batch(gap, event_id, time.time_ns() // 1000, stamps)
                self._rows.add_rows("alarm_raised", batch, CONTROL, at)

    def stage_transaction(self, app_id: str, version: int) -> None:
        """Have the next commit move an application transaction that is neither a lane's nor a partition's."""
        self._standing.set_transaction(app_id, version)

    def commit(self) -> Any | None:
        """Commit what is staged; None if nothing is. After an error the caller reloads and offers again.

        Raises:
            CommitterFencedError: another archiver moved the marks.
            StorageFullError: no room; nothing was committed.
        """
        self._rows.settle()
        moves = self._standing.moves(self._archived_to)
        commit = self._target.append(self._rows.tables(), moves.moved, moves.known) if moves.moved else None
        self._standing.committed(moves)
        self._rows.clear()
        self._conflicts.staged_are_committed()
        return commit

    def _archived_to(self, partition: Partition, offset: int) -> int:
        """The offset to store: never behind what a restart has to read again, as it is parked or was not kept."""
        again, parked = self._rereads.next_offset(partition), self._parking.oldest_offset(partition)
        return min([offset, *(at - 1 for at in (again, parked) if at is not None)])
