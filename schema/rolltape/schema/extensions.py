"""What a newer minor schema version has and we do not know: kept beside the event, byte for byte, and counted in SQL.

Each row's ``extensions`` is a one-row Arrow IPC stream. Its columns are the record's columns that hold something
unknown: a column at the top by its name, a field of the kind's struct as ``kind.field`` (kept whole where only part of
it is unknown). Rows without any such value keep it null.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyarrow import ipc

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


def unknown_columns(batch: pa.RecordBatch, kind: str) -> dict[str, pa.Array]:
    """Columns of ``batch`` (and fields of its kind's struct) with anything that today's schema does not have."""
    layout = layout_of(kind)
    tops = {spec.name: spec.type for spec in layout.top}
    found = {
        name: batch.column(at)
        for at, name in enumerate(batch.schema.names)
        if name != kind and (name not in tops or _has_unknown(batch.schema.field(at).type, tops[name]))
    }
    index = batch.schema.get_field_index(kind)
    if index >= 0 and pt.is_struct(batch.schema.field(index).type):
        fields = {spec.name: spec.type for spec in layout.children}
        struct = batch.column(index)
        for at, (field, values) in enumerate(zip(struct.type.fields, struct.flatten(), strict=True)):
            if field.name not in fields or _has_unknown(field.type, fields[field.name]):
                found[f"{kind}.{struct.type.field(at).name}"] = values
    return found


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
