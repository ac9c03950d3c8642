"""The archive: from records of a log to one exactly-once commit of the lake.

Shared by every log that archives: records are offered in the order of their partition, and :meth:`Archive.commit`
writes everything accepted since, with the lane marks and offsets in the same commit. Duplicates are recognised by the
lane's mark; a record beyond mark + 1 is parked until the missing ones come or an operator accepts their loss.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import pyarrow as pa

from rolltape.ingest.conflicts import ConflictWindow, ContentLookup
from rolltape.ingest.lanes import NOTHING, Gap, Lane, lane_marks, log_app_id
from rolltape.ingest.refused import (
    UNKNOWN_RUN,
    dead_letter_batch,
    letter_of_row,
    letters_of_record,
    payload_fields,
    reason_of,
)
from rolltape.ingest.stamping import check_lane, joined, partition_of_app, place, stamp
from rolltape.schema import reasons
from rolltape.schema.codec import Record, decode
from rolltape.schema.cursor import Partition
from rolltape.schema.envelope import SCHEMA_VERSION
from rolltape.schema.errors import CodecError, ValidationError
from rolltape.schema.identity import derived_id
from rolltape.schema.kinds import kind_named
from rolltape.schema.render import arrow_schema
from rolltape.schema.validate import Limits, validate

ARCHIVER_EPOCH: Final = 1
"""The archiver's own lanes go on where the lake's marks stand, so one epoch serves for ever."""

CONTROL: Final = Partition("control", 0)
_REFUSED_ERRORS: Final = (ValidationError, CodecError, pa.ArrowException, UnicodeDecodeError)


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


@dataclass(slots=True)
class _Staged:
    """Everything accepted since the last commit."""

    batches: dict[str, list[pa.RecordBatch]] = field(default_factory=dict)
    letters: dict[Partition, list[dict[str, Any]]] = field(default_factory=dict)
    marks: dict[Lane, int] = field(default_factory=dict)
    offsets: dict[Partition, int] = field(default_factory=dict)


class Archive:
    """Lane accounting, validation and commits for one target. Not thread-safe."""

    def __init__(self, target: ArchiveTarget, *, limits: Limits | None = None, archiver_id: str = "committer") -> None:
        """Take the marks over from the target."""
        self._target = target
        self._limits = limits or Limits()
        self._archiver_id = archiver_id
        self._conflicts = ConflictWindow(target)
        self._alarmed: set[tuple[Lane, int]] = set()
        self.reload()

    def reload(self) -> None:
        """Forget what is not committed and take marks and offsets from the target again."""
        transactions = self._target.transactions()
        self._marks = lane_marks(transactions)
        self._offsets = {
            partition: version
            for app_id, version in transactions.items()
            if (partition := partition_of_app(app_id)) is not None
        }
        self._staged = _Staged()
        self._parked: dict[Lane, dict[int, int]] = {}
        self._parked_offsets: dict[Partition, int] = {}
        self._conflicts.forget_staged()

    # What stands where.

    def mark(self, lane: Lane) -> int:
        """Last ``lane_seq`` of a lane that is archived or staged."""
        return self._staged.marks.get(lane, self._marks.get(lane, NOTHING))

    def last_offset(self, partition: Partition) -> int:
        """Last offset of a partition that is archived or staged."""
        return self._staged.offsets.get(partition, self._offsets.get(partition, NOTHING))

    @property
    def has_staged(self) -> bool:
        """Whether a commit would change something."""
        return bool(self._staged.marks or self._staged.offsets)

    def gaps(self) -> list[Gap]:
        """Lanes that stand still, and what they wait for."""
        return [
            Gap(lane=lane, first=self.mark(lane) + 1, last=min(waiting) - 1)
            for lane, waiting in self._parked.items()
            if waiting
        ]

    def resumable(self) -> list[Lane]:
        """Lanes whose missing records came: what was parked behind them is to be offered again."""
        return [lane for lane, waiting in self._parked.items() if waiting and min(waiting) <= self.mark(lane) + 1]

    def unpark(self, lane: Lane) -> None:
        """Forget what is parked of a lane; the caller offers it again."""
        self._parked.pop(lane, None)
        self._parked_offsets.pop(lane.log_partition, None)

    # Taking records.

    def offer(
        self, record: Record, *, offset: int | None = None, checksum: int | None = None, intact: bool = True
    ) -> Outcome:
        """Stage one record, or say why not.

        ``offset`` is the log's own; None lets the archive number the partition. ``checksum`` is the value's CRC-32
        where the caller has it; ``intact`` is False where it is known not to hold.
        """
        headers = record.headers
        lane = Lane(headers.producer_id, headers.producer_epoch, record.topic, record.partition)
        mark = self.mark(lane)
        checksum = zlib.crc32(memoryview(record.value)) if checksum is None else checksum
        if headers.last_lane_seq <= mark:
            return self._offer_known(record, lane, offset, checksum)
        if headers.first_lane_seq > mark + 1:
            self._park(lane, headers.first_lane_seq, headers.last_lane_seq, offset)
            return Outcome.PARKED
        self._conflicts.remember_record(lane, headers.first_lane_seq, checksum)
        taken = self.last_offset(lane.log_partition) + 1 if offset is None else offset
        # A record of repetitions alone leaves no row, so in a log that this archive numbers it takes no offset.
        if self._admit(record, lane, taken, intact) or offset is not None:
            self._take_offset(lane.log_partition, taken)
        self._staged.marks[lane] = headers.last_lane_seq
        return Outcome.ACCEPTED

    def _offer_known(self, record: Record, lane: Lane, offset: int | None, checksum: int) -> Outcome:
        first = record.headers.first_lane_seq
        if self._conflicts.is_new_content(lane, first, checksum):
            detail = (
                f"expected the bytes that lane_seq {first} of lane {lane} came with before, got others; both are kept"
            )
            letters = letters_of_record(record, reason=reasons.CONFLICT, detail=detail)
            for letter in letters:
                # The lane and index ranges are accounted for by the first delivery.
                letter.update(first_lane_seq=None, last_lane_seq=None, first_event_index=None, last_event_index=None)
                letter["event_id"] = derived_id(letter["event_id"], checksum)
            self._add_letters(letters[:1], record, self._take_offset(lane.log_partition, offset))
        elif offset is not None:
            self._take_offset(lane.log_partition, offset)
        return Outcome.DUPLICATE

    def _park(self, lane: Lane, first: int, last: int, offset: int | None) -> None:
        self._parked.setdefault(lane, {})[first] = last
        if offset is not None:
            partition = lane.log_partition
            self._parked_offsets[partition] = min(offset, self._parked_offsets.get(partition, offset))

    def _take_offset(self, partition: Partition, offset: int | None) -> int:
        taken = self.last_offset(partition) + 1 if offset is None else offset
        self._staged.offsets[partition] = max(taken, self.last_offset(partition))
        return taken

    def _admit(self, record: Record, lane: Lane, offset: int, intact: bool) -> bool:
        """Stage the record's rows and dead letters at ``offset``; False if there are none."""
        try:
            if not intact:
                raise CodecError(
                    "expected a value with the checksum of its frame, got other bytes: they were damaged on disk"
                )
            batch = decode(record.value, kind=kind_named(record.headers.kind).name)
            check_lane(batch, record)
        except _REFUSED_ERRORS as error:
            self._add_letters(letters_of_record(record, reason=reason_of(error), detail=str(error)), record, offset)
            return True
        known = self.mark(lane) - record.headers.first_lane_seq + 1
        if known > 0:
            batch = batch.slice(known)
        return self._admit_rows(batch, record, offset)

    def _admit_rows(self, batch: pa.RecordBatch, record: Record, offset: int) -> bool:
        kind = record.headers.kind
        refused = {refusal.row: (refusal.reason, refusal.detail) for refusal in validate(batch, self._limits)}
        repeated = self._conflicts.check(kind, batch)
        for row, detail in repeated.items():
            if detail is not None:
                refused.setdefault(row, (reasons.CONFLICT, detail))
        letters = [
            letter_of_row(batch, row, kind=kind, reason=reason, detail=detail)
            for row, (reason, detail) in sorted(refused.items())
        ]
        out = refused.keys() | repeated.keys()
        if out:
            batch = batch.filter(pa.array([row not in out for row in range(batch.num_rows)]))
        if batch.num_rows:
            stamped = stamp(batch, Partition(record.topic, record.partition), offset)
            self._conflicts.remember_rows(kind, stamped)
            self._staged.batches.setdefault(kind, []).append(stamped)
        if letters:
            self._add_letters(letters, record, offset)
        return bool(batch.num_rows or letters)

    def _add_letters(self, letters: list[dict[str, Any]], record: Record, offset: int) -> None:
        partition = Partition(record.topic, record.partition)
        source = {
            "source_topic": record.topic,
            "source_partition": record.partition,
            "source_offset": offset,
            "source_producer_id": record.headers.producer_id,
            "source_producer_epoch": record.headers.producer_epoch,
        }
        for letter in letters:
            self._staged.letters.setdefault(partition, []).append(
                {
                    "recorded_at": time.time_ns() // 1000,
                    **letter,
                    **source,
                    **self._own_lane(partition),
                    **place(partition, offset),
                }
            )

    def _own_lane(self, partition: Partition) -> dict[str, Any]:
        lane = Lane(self._archiver_id, ARCHIVER_EPOCH, *partition)
        lane_seq = self.mark(lane) + 1
        self._staged.marks[lane] = lane_seq
        return {"producer_id": self._archiver_id, "producer_epoch": ARCHIVER_EPOCH, "lane_seq": lane_seq}

    def accept_loss(self, lane: Lane, through: int, *, offset: int | None = None) -> None:
        """Close a gap by a dead letter that accounts for ``lane_seq`` mark + 1 to ``through``, if any is missing.

        ``offset`` is the one to stamp it with where the log numbers its records itself.
        """
        first = self.mark(lane) + 1
        if first > through:
            return
        partition = lane.log_partition
        offset = self._take_offset(partition, offset)
        letter = {
            "event_id": derived_id("dead_letter", reasons.LANE_GAP_ACCEPTED, lane.app_id, first, through),
            "run_id": UNKNOWN_RUN,
            "run_epoch": 0,
            "recorded_at": time.time_ns() // 1000,
            "reason": reasons.LANE_GAP_ACCEPTED,
            "detail": f"an operator accepted the loss of lane_seq {first} to {through} of lane {lane}",
            "source_topic": lane.topic,
            "source_partition": lane.partition,
            "source_producer_id": lane.producer_id,
            "source_producer_epoch": lane.producer_epoch,
            "first_lane_seq": first,
            "last_lane_seq": through,
            **payload_fields(b"", "raw", None),
        }
        self._staged.letters.setdefault(partition, []).append(
            {**letter, **self._own_lane(partition), **place(partition, offset)}
        )
        self._staged.marks[lane] = through

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
                self._stage_alarm(event_id, gap)

    def _stage_alarm(self, event_id: str, gap: Gap) -> None:
        schema = arrow_schema("alarm_raised")
        row = {
            "event_id": event_id,
            "kind": "alarm_raised",
            "schema_version": SCHEMA_VERSION,
            "run_id": UNKNOWN_RUN,
            "run_epoch": 0,
            "recorded_at": time.time_ns() // 1000,
            "alarm_raised": {
                "alarm": "lane_gap",
                "severity": "error",
                "value": float(gap.last - gap.first + 1),
                "detail": str(gap),
            },
            **self._own_lane(CONTROL),
            **place(CONTROL, self._take_offset(CONTROL, None)),
        }
        self._staged.batches.setdefault("alarm_raised", []).append(pa.RecordBatch.from_pylist([row], schema=schema))

    def commit(self) -> Any | None:
        """Commit what is staged; None if nothing is. After an error the caller reloads and offers again.

        Raises:
            CommitterFencedError: another archiver moved the marks.
            StorageFullError: no room; nothing was committed.
        """
        if not self.has_staged:
            return None
        staged = self._staged
        tables = {kind: pa.Table.from_batches(batches) for kind, batches in staged.batches.items()}
        if staged.letters:
            batches = [dead_letter_batch(staged.letters[partition]) for partition in sorted(staged.letters)]
            tables["dead_letter"] = joined("dead_letter", tables.get("dead_letter"), batches)
        transactions = {lane.app_id: mark for lane, mark in staged.marks.items()}
        expected: dict[str, int | None] = {lane.app_id: self._marks.get(lane) for lane in staged.marks}
        for partition, offset in staged.offsets.items():
            transactions[log_app_id(partition)] = self._archived_to(partition, offset)
            expected[log_app_id(partition)] = self._offsets.get(partition)
        commit = self._target.append(tables, transactions, expected)
        self._marks.update(staged.marks)
        self._offsets.update({partition: transactions[log_app_id(partition)] for partition in staged.offsets})
        self._staged = _Staged()
        self._conflicts.staged_are_committed()
        return commit

    def _archived_to(self, partition: Partition, offset: int) -> int:
        """The offset to store: never behind a parked record, which a restart has to read again."""
        parked = self._parked_offsets.get(partition)
        return offset if parked is None else min(offset, parked - 1)
