"""What the next commit writes: rows with their offsets, and dead letters for what cannot become rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import pyarrow as pa

from rolltape.ingest.conflicts import ConflictWindow
from rolltape.ingest.losses import AcceptedLoss, accepted_losses
from rolltape.ingest.parking import Offered
from rolltape.ingest.refused import dead_letter_batch, letter_of_row, letters_of_record, reason_of
from rolltape.ingest.stamping import Place, by_partition, check_lane, joined, place, stamp
from rolltape.ingest.standing import Standing
from rolltape.ingest.together import REFUSED_ERRORS, Waiting, decode_together
from rolltape.schema import reasons
from rolltape.schema.codec import Record, decode_written, read_written
from rolltape.schema.cursor import Partition
from rolltape.schema.kinds import kind_named
from rolltape.schema.validate import Limits, validate

# Records wait to be decoded together until they hold so much, or are so many.
_MAX_WAITING_BYTES: Final = 8 << 20
_MAX_WAITING: Final = 2_048
# Where some record of so few is not in order, each is looked at alone.
_FEW: Final = 8


class Staging:
    """Decodes, validates and places the rows of records, and collects them until they are committed.

    Records wait until there are many of them, or until somebody asks what became of them (:meth:`settle`).
    ``accept`` takes a loss that an operator's event accepts and says why not. Of kinds other than ``kinds`` nothing is
    staged.
    """

    def __init__(
        self,
        standing: Standing,
        conflicts: ConflictWindow,
        limits: Limits,
        kinds: Collection[str] | None,
        accept: Callable[[AcceptedLoss, Record], str | None],
    ) -> None:
        """Start empty."""
        self._standing = standing
        self._conflicts = conflicts
        self._limits = limits
        self._kinds = None if kinds is None else frozenset(kinds)
        self._accept = accept
        self.clear()

    def clear(self) -> None:
        """Forget what is staged."""
        self._waiting: list[Waiting] = []
        self._num_waiting_bytes = 0
        self._batches: dict[str, list[pa.RecordBatch]] = {}
        self._places: dict[str, list[Place]] = {}
        self._letters: dict[Partition, list[dict[str, Any]]] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that rows, staged or waiting, and refused payloads hold."""
        return self._num_bytes + self._num_waiting_bytes

    def tables(self) -> dict[str, pa.Table]:
        """The staged rows by kind, each partition's in one piece and in the order of its offsets."""
        tables = {}
        for kind, batches in self._batches.items():
            pieces, places = by_partition(batches, self._places[kind])
            tables[kind] = stamp(pa.Table.from_batches(pieces), places)
        if self._letters:
            batches = [dead_letter_batch(self._letters[partition]) for partition in sorted(self._letters)]
            tables["dead_letter"] = joined("dead_letter", tables.get("dead_letter"), batches)
        return tables

    # Records.

    def admit(self, offered: Offered, at: int | None, skip_rows: int) -> None:
        """Stage a record's rows but for the first ``skip_rows``, and its dead letters, at ``at`` or the next offset."""
        record = offered.record
        if self._kinds is not None and record.headers.kind not in self._kinds:
            return
        if offered.refused is not None:
            self._refuse(offered, at, *offered.refused)
            return
        try:
            kind = kind_named(record.headers.kind)
            written = read_written(record.value)
        except REFUSED_ERRORS as error:
            self._refuse(offered, at, reason_of(error), str(error))
            return
        waiting = Waiting(offered, written, at)
        if skip_rows > 0 or kind.name == "dead_letter":
            # An operator's event may close a gap, which whatever comes next depends on.
            self.settle()
            self._admit_alone(waiting, max(skip_rows, 0))
            return
        self._waiting.append(waiting)
        self._num_waiting_bytes += written.rows.get_total_buffer_size()
        if self._num_waiting_bytes >= _MAX_WAITING_BYTES or len(self._waiting) >= _MAX_WAITING:
            self.settle()

    def settle(self) -> None:
        """Decide what becomes of the records that wait."""
        waiting, self._waiting = self._waiting, []
        self._num_waiting_bytes = 0
        self._settle(waiting)

    def _settle(self, waiting: Sequence[Waiting]) -> None:
        if self._settle_together(waiting):
            return
        size = 1 if len(waiting) <= _FEW else math.isqrt(len(waiting))
        for first in range(0, len(waiting), size):
            part = waiting[first : first + size]
            if len(part) > 1:
                self._settle(part)
            else:
                self._admit_alone(part[0], 0)

    def _settle_together(self, waiting: Sequence[Waiting]) -> bool:
        """Stage the records if all of them are in order and their events are new; False where nothing was done."""
        if len(waiting) <= 1:
            return not waiting
        decoded = decode_together(waiting, self._limits)
        if decoded is None or not self._conflicts.remember_new([(rows.kind, rows.batch) for rows in decoded]):
            return False
        places = [self._place(item) for item in waiting]
        for rows in decoded:
            self._stage(rows.kind, rows.batch, [places[number] for number in rows.numbers])
        return True

    def _place(self, item: Waiting) -> Place:
        record = item.offered.record
        partition = Partition(record.topic, record.partition)
        return Place(item.written.rows.num_rows, partition, self._numbered(partition, item.at))

    def _numbered(self, partition: Partition, at: int | None) -> int:
        """``at``, or the next offset of a log that the archive numbers, which is taken."""
        if at is None:
            at = self._standing.last_offset(partition) + 1
            self._standing.note_offset(partition, at)
        return at

    def _admit_alone(self, waiting: Waiting, skip_rows: int) -> None:
        offered, written, at = waiting
        try:
            batch = decode_written(written, kind=offered.record.headers.kind)
            check_lane(batch, offered.record)
        except REFUSED_ERRORS as error:
            self._refuse(offered, at, reason_of(error), str(error))
            return
        self._admit_rows(batch.slice(skip_rows) if skip_rows else batch, offered, at)

    def _refuse(self, offered: Offered, at: int | None, reason: str, detail: str) -> None:
        self.settle()
        record = offered.record
        at = self._numbered(Partition(record.topic, record.partition), at)
        self.add_letters(letters_of_record(record, reason=reason, detail=detail), offered, at)

    def _admit_rows(self, batch: pa.RecordBatch, offered: Offered, at: int | None) -> None:
        record = offered.record
        kind = record.headers.kind
        refused = {refusal.row: (refusal.reason, refusal.detail) for refusal in validate(batch, self._limits)}
        repeated = self._conflicts.check(kind, batch)
        for row, detail in repeated.items():
            if detail is not None:
                refused.setdefault(row, (reasons.CONFLICT, detail))
        if kind == "dead_letter":
            self._accept_losses(batch, record, refused, repeated.keys())
        letters = [
            letter_of_row(batch, row, kind=kind, reason=reason, detail=detail)
            for row, (reason, detail) in sorted(refused.items())
        ]
        out = refused.keys() | repeated.keys()
        if out:
            batch = batch.filter(pa.array([row not in out for row in range(batch.num_rows)]))
        if not batch.num_rows and not letters:
            # Repetitions alone leave no row, so in a log that the archive numbers they take no offset.
            return
        partition = Partition(record.topic, record.partition)
        at = self._numbered(partition, at)
        if batch.num_rows:
            self.add_rows(kind, batch, partition, at)
        if letters:
            self.add_letters(letters, offered, at)

    def _accept_losses(
        self, batch: pa.RecordBatch, record: Record, refused: dict[int, tuple[str, str]], repeated: Collection[int]
    ) -> None:
        for loss in accepted_losses(batch):
            if loss.row not in refused and loss.row not in repeated:
                detail = self._accept(loss, record)
                if detail is not None:
                    refused[loss.row] = (reasons.BAD_VALUE, detail)

    # What is staged.

    def add_rows(self, kind: str, batch: pa.RecordBatch, partition: Partition, at: int) -> None:
        """Stage rows at their place in the log; they are stamped with it once all of a commit are there."""
        self._conflicts.remember_rows(kind, batch)
        self._stage(kind, batch, [Place(batch.num_rows, partition, at)])

    def _stage(self, kind: str, batch: pa.RecordBatch, places: Sequence[Place]) -> None:
        self._batches.setdefault(kind, []).append(batch)
        self._places.setdefault(kind, []).extend(places)
        self._num_bytes += batch.get_total_buffer_size()

    def add_letters(self, letters: list[dict[str, Any]], offered: Offered, at: int) -> None:
        """Stage the dead letters of a record."""
        record = offered.record
        source = {
            "source_topic": record.topic,
            "source_partition": record.partition,
            "source_offset": at if offered.offset is None else offered.offset,
            "source_producer_id": record.headers.producer_id,
            "source_producer_epoch": record.headers.producer_epoch,
        }
        for letter in letters:
            self.add_letter({**letter, **source}, Partition(record.topic, record.partition), at, offered.time_us)

    def add_letter(self, letter: dict[str, Any], partition: Partition, at: int, time_us: int | None) -> None:
        """Stage one dead letter on the archive's own lane."""
        recorded_at = time.time_ns() // 1000 if time_us is None else time_us
        self._letters.setdefault(partition, []).append(
            {"recorded_at": recorded_at, **letter, **self._standing.own_lane(partition), **place(partition, at)}
        )
        self._num_bytes += len(letter["payload"] or b"")
