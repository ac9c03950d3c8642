"""Reading what was written elsewhere: a file or record of one kind, brought to today's schema of that kind.

Columns and nested fields that are absent become null, older minor versions are upcast, other spellings (``item`` for
``element``, ``large_list`` for ``list``) are read, unknown columns are left out, and narrowing is refused (cases D21,
D22, D23). What has today's schema already is returned as it is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import pyarrow as pa
import pyarrow.types as pt

from rolltape.schema.align import MAX_LIST_VALUES, Aligner, conforming, list_parts
from rolltape.schema.errors import ValidationError
from rolltape.schema.extensions import has_unknown
from rolltape.schema.layout import assemble, blank_columns, layout_of
from rolltape.schema.render import arrow_schema
from rolltape.schema.upcast import upcast

Data = TypeVar("Data", pa.RecordBatch, pa.Table)


def conform(data: Data, kind: str) -> Data:
    """``data`` with exactly the columns of ``arrow_schema(kind)``; zero-copy for columns whose types agree.

    Chunks of a table stay separate, since joining lists of more than 2³¹ values would overflow their offsets; a chunk
    of a ``large_list`` that is too long for int32 offsets is cut into several.

    Raises:
        UnknownKindError: no such kind.
        ValidationError: a column cannot be read as its spec without loss; the message names it.
    """
    schema = arrow_schema(kind)
    if data.schema is schema or data.schema.equals(schema):
        return data
    data = upcast(data, kind)
    if isinstance(data, pa.RecordBatch):
        return conformer_of(data.schema, kind)(data)
    conformer = conformer_of(data.schema, kind)
    batches = [piece for batch in data.to_batches() for piece in _addressable(batch)]
    return pa.Table.from_batches([conformer(batch) for batch in batches], schema=schema)


@lru_cache(maxsize=512)
def conformer_of(source: pa.Schema, kind: str) -> Conformer:
    """A :class:`Conformer`, made once for each schema that files and records come in; they are few."""
    return Conformer(source, kind)


class Conformer:
    """Brings batches of one schema to today's schema of one kind; made once, applied to many batches."""

    __slots__ = ("_layout", "_steps", "_struct", "has_unknown")

    def __init__(self, source: pa.Schema, kind: str) -> None:
        """Work out the steps.

        Raises:
            UnknownKindError: no such kind.
            ValidationError: a column cannot be read as its spec without loss.
        """
        self._layout = layout_of(kind)
        names = {name: at for at, name in enumerate(source.names)}
        self._steps = [
            (at, names[spec.name], conforming(source.types[names[spec.name]], spec.type, f"{kind}: {spec.name}"))
            for at, spec in enumerate(self._layout.top)
            if spec.name in names
        ]
        self._struct: tuple[int, Aligner] | None = None
        if kind in names:
            target = self._layout.schema.field(kind).type
            self._struct = (names[kind], conforming(source.types[names[kind]], target, kind))
        self.has_unknown = has_unknown(source, kind)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """``batch`` with today's schema of the kind."""
        layout = self._layout
        top, children = blank_columns(layout.kind.name, batch.num_rows)
        columns = batch.columns
        for at, source, align in self._steps:
            top[at] = align(columns[source])
        if self._struct is None:
            return assemble(layout, top, children)
        source, align = self._struct
        return pa.RecordBatch.from_arrays([*top, align(columns[source])], schema=layout.schema)


def _addressable(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """``batch`` cut so that the values of each of its top-level lists can be addressed by int32 offsets."""
    longest = max((_num_values(column) for column in batch.columns), default=0)
    if longest <= MAX_LIST_VALUES:
        return [batch]
    if batch.num_rows == 1:
        raise ValidationError(f"one row holds {longest} list elements, and int32 offsets address {MAX_LIST_VALUES}")
    half = batch.num_rows // 2
    return [*_addressable(batch.slice(0, half)), *_addressable(batch.slice(half))]


def _num_values(column: pa.Array) -> int:
    return len(list_parts(column)[1]) if pt.is_large_list(column.type) else 0
