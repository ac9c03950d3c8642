"""What a record has and today's specs do not know: kept beside the event and counted in SQL, never dropped.

Each row's ``extensions`` is a one-row Arrow IPC stream. Its columns are the record's columns that hold something
unknown: a column at the top by its name, a field of the kind's struct as ``kind.field`` (kept whole where only part of
it is unknown). Rows without any such value keep it null.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyarrow import ipc

from rolltape.schema.columns import Column
from rolltape.schema.errors import CodecError
from rolltape.schema.layout import layout_of


def keep_unknown(original: pa.RecordBatch, known: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    """``known`` with its ``extensions`` filled from what ``original`` has beyond today's schema of ``kind``."""
    unknown = unknown_columns(original, kind)
    if not unknown:
        return known
    batch = pa.RecordBatch.from_arrays(list(unknown.values()), names=list(unknown))
    index = known.schema.get_field_index("extensions")
    rows = [_row_bytes(batch, row) for row in range(batch.num_rows)]
    kept = pc.coalesce(known.column(index), pa.array(rows, pa.binary()))
    return known.set_column(index, known.schema.field(index), kept)


def read_extensions(value: bytes) -> pa.RecordBatch:
    """The one row of unknown columns that an event's ``extensions`` holds.

    Raises:
        CodecError: the bytes are no such row.
    """
    try:
        with ipc.open_stream(value) as reader:
            return reader.read_next_batch()
    except (pa.ArrowException, StopIteration, OSError) as error:
        raise CodecError(
            f"expected a one-row Arrow IPC stream in extensions, got {len(value)} bytes: {error}"
        ) from error


def has_unknown(schema: pa.Schema, kind: str) -> bool:
    """Whether data of ``schema`` holds anything that today's schema of ``kind`` does not have."""
    own = schema.get_field_index(kind)
    tops = [field for field in schema if field.name != kind]
    children = schema.field(own).type.fields if own >= 0 and pt.is_struct(schema.field(own).type) else ()
    return bool(_unknown_names(tops, layout_of(kind).top) or _unknown_names(children, layout_of(kind).children))


def unknown_columns(batch: pa.RecordBatch, kind: str) -> dict[str, pa.Array]:
    """Columns of ``batch`` (and fields of its kind's struct) with anything that today's schema does not have."""
    layout = layout_of(kind)
    tops = [field for field in batch.schema if field.name != kind]
    found = {name: batch.column(name) for name in _unknown_names(tops, layout.top)}
    own = batch.schema.get_field_index(kind)
    if own >= 0 and pt.is_struct(batch.schema.field(own).type):
        struct = batch.column(own)
        children = dict(zip((field.name for field in struct.type.fields), struct.flatten(), strict=True))
        found |= {f"{kind}.{name}": children[name] for name in _unknown_names(struct.type.fields, layout.children)}
    return found


def _unknown_names(fields: Iterable[pa.Field], specs: Iterable[Column]) -> list[str]:
    known = {spec.name: spec.type for spec in specs}
    return [field.name for field in fields if field.name not in known or _has_unknown(field.type, known[field.name])]


def _has_unknown(source: pa.DataType, known: pa.DataType) -> bool:
    if pt.is_struct(source) and pt.is_struct(known):
        fields = {field.name: field.type for field in known.fields}
        return any(field.name not in fields or _has_unknown(field.type, fields[field.name]) for field in source.fields)
    if pt.is_nested(source) and pt.is_list(known):
        return _has_unknown(source.value_type, known.value_type)
    return False


def _row_bytes(batch: pa.RecordBatch, row: int) -> bytes | None:
    one = batch.slice(row, 1)
    present = [name for name, column in zip(one.schema.names, one.columns, strict=True) if column[0].is_valid]
    if not present:
        return None
    one = one.select(present)
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, one.schema) as writer:
        writer.write_batch(one)
    return bytes(sink.getvalue())
