"""What the next commit writes: rows with their offsets, and dead letters for what cannot become rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Final

import pyarrow as pa

from rolltape.ingest.conflicts import ConflictWindow
from rolltape.ingest.losses import AcceptedLoss, accepted_losses
from rolltape.ingest.parking import Offered
from rolltape.ingest.refused import dead_letter_batch, letter_of_row, letters_of_record, reason_of
from rolltape.ingest.stamping import Placed, check_lane, joined, place, stamp
from rolltape.schema import reasons
from rolltape.schema.codec import Record, decode
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import CodecError, ValidationError
from rolltape.schema.kinds import kind_named
from rolltape.schema.validate import Limits, validate

# As many elements as the offsets of a list can count, even where an element is one bit.
_MAX_COMBINED_BYTES: Final = 1 << 28

_REFUSED_ERRORS: Final = (ValidationError, CodecError, pa.ArrowException, UnicodeDecodeError)


class Staging:
    """Decodes, validates and places the rows of records, and collects them until they are committed.

    ``letter_lane`` gives the lane columns of the archive's next dead letter of a partition, ``accept`` takes a loss
    that an operator's event accepts and says why not. Of kinds other than ``kinds`` nothing is staged.
    """

    def __init__(
        self,
        conflicts: ConflictWindow,
        limits: Limits,
        kinds: Collection[str] | None,
        letter_lane: Callable[[Partition], dict[str, Any]],
        accept: Callable[[AcceptedLoss, Record], str | None],
    ) -> None:
        """Start empty."""
        self._conflicts = conflicts
        self._limits = limits
        self._kinds = None if kinds is None else frozenset(kinds)
        self._letter_lane = letter_lane
        self._accept = accept
        self.clear()

    def clear(self) -> None:
        """Forget what is staged."""
        self._batches: dict[str, list[Placed]] = {}
        self._letters: dict[Partition, list[dict[str, Any]]] = {}
        self.num_bytes = 0

    def tables(self) -> dict[str, pa.Table]:
        """The staged rows by kind, each partition's in the order of its offsets."""
        tables = {kind: _whole(batches) for kind, batches in self._batches.items()}
        if self._letters:
            batches = [dead_letter_batch(self._letters[partition]) for partition in sorted(self._letters)]
            tables["dead_letter"] = joined("dead_letter", tables.get("dead_letter"), batches)
        return tables

    def admit(self, offered: Offered, at: int, skip_rows: int) -> bool:
        """Stage a record's rows but for the first ``skip_rows``, and its dead letters, at ``at``; False for none."""
        record = offered.record
        if self._kinds is not None and record.headers.kind not in self._kinds:
            return False
        if offered.refused is not None:
            self.add_letters(letters_of_record(record, **offered.refused._asdict()), offered, at)
            return True
        try:
            batch = decode(record.value, kind=kind_named(record.headers.kind).name)
            check_lane(batch, record)
        except _REFUSED_ERRORS as error:
            self.add_letters(letters_of_record(record, reason=reason_of(error), detail=str(error)), offered, at)
            return True
        return self._admit_rows(batch.slice(skip_rows) if skip_rows > 0 else batch, offered, at)

    def _admit_rows(self, batch: pa.RecordBatch, offered: Offered, at: int) -> bool:
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
        if batch.num_rows:
            self.add_rows(kind, batch, Partition(record.topic, record.partition), at)
        if letters:
            self.add_letters(letters, offered, at)
        return bool(batch.num_rows or letters)

    def _accept_losses(
        self, batch: pa.RecordBatch, record: Record, refused: dict[int, tuple[str, str]], repeated: Collection[int]
    ) -> None:
        for loss in accepted_losses(batch):
            if loss.row not in refused and loss.row not in repeated:
                detail = self._accept(loss, record)
                if detail is not None:
                    refused[loss.row] = (reasons.BAD_VALUE, detail)

    def add_rows(self, kind: str, batch: pa.RecordBatch, partition: Partition, at: int) -> None:
        """Stage rows at their place in the log; they are stamped with it once all of a commit are there."""
        self._conflicts.remember_rows(kind, batch)
        self._batches.setdefault(kind, []).append(Placed(batch, partition, at))
        self.num_bytes += batch.get_total_buffer_size()

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
            {"recorded_at": recorded_at, **letter, **self._letter_lane(partition), **place(partition, at)}
        )
        self.num_bytes += len(letter["payload"] or b"")


def _whole(placed: list[Placed]) -> pa.Table:
    """The rows as a table, in one chunk where lists allow it: that is written in two thirds of the time."""
    table = pa.Table.from_batches([item.batch for item in placed])
    if len(placed) > 1 and table.nbytes < _MAX_COMBINED_BYTES:
        table = table.combine_chunks()
    return stamp(table, placed)
