"""Records decoded and validated together: what is done once for many rows costs little a row.

All or none: where any of them is not what its headers say, cannot be decoded or has a row that breaks its spec, the
caller looks at fewer at a time, down to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from rolltape.ingest.parking import Offered
from rolltape.ingest.stamping import are_of_their_lanes
from rolltape.schema.codec import Written, decode_written, join_written
from rolltape.schema.errors import CodecError, ValidationError
from rolltape.schema.validate import Limits, validate

REFUSED_ERRORS: Final = (ValidationError, CodecError, pa.ArrowException, UnicodeDecodeError)
"""What a record raises whose payload is at fault."""


class Waiting(NamedTuple):
    """A record whose turn it is, at ``at`` or (None) at the next offset; its rows are read and not yet decoded."""

    offered: Offered
    written: Written
    at: int | None


class Rows(NamedTuple):
    """Rows of one kind, of the records with these ``numbers`` among those that were decoded together."""

    kind: str
    batch: pa.RecordBatch
    numbers: Sequence[int]


def decode_together(waiting: Sequence[Waiting], limits: Limits) -> list[Rows] | None:
    """All rows of the records, by kind and in the order of the records; None where any is not in order."""
    groups: dict[tuple[str, bytes], list[int]] = {}
    for number, item in enumerate(waiting):
        groups.setdefault((item.offered.record.headers.kind, item.written.schema), []).append(number)
    found: dict[str, list[Rows]] = {}
    for (kind, _), numbers in groups.items():
        rows = _decode(kind, [waiting[number] for number in numbers], limits)
        if rows is None:
            return None
        found.setdefault(kind, []).append(Rows(kind, rows, numbers))
    return [rows for parts in found.values() for rows in (parts if len(parts) == 1 else _in_order(parts, waiting))]


def _decode(kind: str, members: Sequence[Waiting], limits: Limits) -> pa.RecordBatch | None:
    num_rows = [item.written.rows.num_rows for item in members]
    try:
        batch = decode_written(join_written([item.written for item in members]), kind=kind)
        if not are_of_their_lanes(batch, [item.offered.record for item in members], num_rows):
            return None
        return None if validate(batch, limits) else batch
    except REFUSED_ERRORS:
        return None


def _in_order(parts: Sequence[Rows], waiting: Sequence[Waiting]) -> list[Rows]:
    """Rows of one kind that came with different columns, in runs of records that follow each other."""
    singles: list[Rows] = []
    for part in parts:
        row = 0
        for number in part.numbers:
            num_rows = waiting[number].written.rows.num_rows
            singles.append(Rows(part.kind, part.batch.slice(row, num_rows), (number,)))
            row += num_rows
    return sorted(singles, key=lambda rows: rows.numbers[0])
