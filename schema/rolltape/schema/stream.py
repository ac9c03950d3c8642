"""Rows of one kind as bytes: one self-contained Arrow IPC stream (design §4).

The stream is a schema message, one record batch (its buffers compressed with LZ4 where it has rows enough) and the
end-of-stream marker; a stream without that marker was cut. Columns that are null in every row are left out and come
back as nulls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyarrow import ipc

from rolltape.schema.conform import Conformer, conform
from rolltape.schema.envelope import SCHEMA_MAJOR, SCHEMA_MINOR
from rolltape.schema.errors import CodecError, SchemaVersionError
from rolltape.schema.extensions import keep_unknown
from rolltape.schema.kinds import kind_named
from rolltape.schema.prune import pruner_of
from rolltape.schema.upcast import needs_upcast, upcast

CODEC: Final = "arrow-ipc-stream"
"""Name of the encoding, as records' headers carry it."""

# One thread: handing the small buffers of a record to a pool costs several times their decompression.
_COMPRESSED: Final = ipc.IpcWriteOptions(compression="lz4", use_threads=False)
# LZ4 that tries every fourth place at first, which is where numbers of four bytes start. On log-probs, which hardly
# shrink, it takes half the time for a hundredth more bytes; on text it would cost an eighth more.
_COMPRESSED_TOKENS: Final = ipc.IpcWriteOptions(compression=pa.Codec("lz4", compression_level=-3), use_threads=False)
_PLAIN: Final = ipc.IpcWriteOptions(use_threads=False)
# Of fewer rows, each buffer is too short: the record would be larger than without compression.
_COMPRESSED_ROWS: Final = 12
_READ_OPTIONS: Final = ipc.IpcReadOptions(use_threads=False)
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_MAX_CONFORMERS: Final = 512
_CONFORMERS: Final[dict[tuple[str, bytes], Conformer]] = {}


def kind_of(batch: pa.RecordBatch) -> str:
    """The kind of a batch that has a kind's own schema: the name of its last column."""
    return str(batch.schema.field(batch.num_columns - 1).name)


def encode(batch: pa.RecordBatch) -> pa.Buffer:
    """``batch`` (of one kind, with that kind's schema) as one Arrow IPC stream; slices are written as what they show.

    Raises:
        CodecError: the batch has no rows.
        UnknownKindError: its last column is not named like a kind.
        ValidationError: its columns are not that kind's.
    """
    return encode_pruned(pruned(batch))


def pruned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` (as :func:`encode` takes it) without what is null in every row: the columns that its record holds.

    Raises:
        UnknownKindError, ValidationError: as :func:`encode`.
    """
    kind = kind_of(batch)
    return pruner_of(kind).prune(conform(batch, kind))


def encode_pruned(batch: pa.RecordBatch) -> pa.Buffer:
    """As :func:`encode`, of rows that :func:`pruned` gave back, or of a slice of them.

    A column that only the slice has no value of is written as nulls, and read as the same.

    Raises:
        CodecError: the batch has no rows.
    """
    if not batch.num_rows:
        raise CodecError("expected at least one row to encode, got none")
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema, options=_options(batch)) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _options(batch: pa.RecordBatch) -> ipc.IpcWriteOptions:
    if batch.num_rows < _COMPRESSED_ROWS:
        return _PLAIN
    return _COMPRESSED_TOKENS if batch.schema.get_field_index("rollout_log_probs") >= 0 else _COMPRESSED


class Written(NamedTuple):
    """Rows as they were written, of one record or of several with the same columns: not of today's schema yet.

    ``schema`` are the bytes of the first message, the same for the same columns; ``num_bytes`` are those of the values.
    """

    rows: pa.RecordBatch
    schema: bytes
    num_bytes: int


def decode(value: pa.Buffer | bytes | bytearray | memoryview, *, kind: str | None = None) -> pa.RecordBatch:
    """The rows of one record, conformed to today's schema of their kind.

    Older minor versions are upcast. Columns that today's specs do not know (of a newer minor version, say) are kept in
    ``extensions``. Text that is not UTF-8 is left for :func:`rolltape.schema.validate.validate` to find by row.

    Args:
        value: the stream.
        kind: what the headers say; ``None``: whatever the rows say.

    Raises:
        CodecError: the bytes are no whole stream, its rows are not of one kind, or not of the kind expected.
        UnknownKindError: no such kind.
        SchemaVersionError: a newer major version, or none.
        ValidationError: a column cannot be read as its spec without loss.
    """
    return decode_written(read_written(value), kind=kind)


def read_written(value: pa.Buffer | bytes | bytearray | memoryview) -> Written:
    """The first half of :func:`decode`: rows that are safe to touch.

    Raises:
        CodecError: the bytes are no whole stream.
    """
    buffer = pa.py_buffer(value)
    try:
        rows = _read(buffer)
        _check_bounds(rows)
        return Written(rows, _schema_message(buffer), buffer.size)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _unsound(buffer.size, error) from error


def decode_written(written: Written, *, kind: str | None = None) -> pa.RecordBatch:
    """The second half of :func:`decode`; raises what it raises."""
    try:
        return _decode(written, kind)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _unsound(written.num_bytes, error) from error


def join_written(parts: Sequence[Written]) -> Written:
    """Rows of records with the same ``schema``, in one piece: decoded together they cost little more than one.

    Raises:
        CodecError: they cannot be joined (dictionaries that differ, say); each can be decoded alone.
    """
    if len(parts) == 1:
        return parts[0]
    num_bytes = sum(part.num_bytes for part in parts)
    try:
        return Written(pa.concat_batches([part.rows for part in parts]), parts[0].schema, num_bytes)
    except pa.ArrowException as error:
        raise _unsound(num_bytes, error) from error


def _unsound(num_bytes: int, error: Exception) -> CodecError:
    # Names of fields, say, that are no UTF-8: Arrow notices only when they are asked for.
    return CodecError(f"expected a sound Arrow record, got {num_bytes} bytes that are none: {error}")


def _decode(written: Written, kind: str | None) -> pa.RecordBatch:
    batch = written.rows
    _check_versions(batch)
    found = _only_kind(batch)
    if kind is not None and found != kind:
        raise CodecError(f"expected a record of kind {kind}, got rows of kind {found}")
    if needs_upcast(batch.schema, found):
        batch = upcast(batch, found)
        conformer = Conformer(batch.schema, found)
    else:
        conformer = _conformer_of(batch.schema, found, written.schema)
    known = conformer(batch)
    return keep_unknown(batch, known, found) if conformer.has_unknown else known


def _conformer_of(schema: pa.Schema, kind: str, message: bytes) -> Conformer:
    conformer = _CONFORMERS.get((kind, message))
    if conformer is None:
        conformer = Conformer(schema, kind)
        if len(_CONFORMERS) < _MAX_CONFORMERS:
            _CONFORMERS[kind, message] = conformer
    return conformer


def _schema_message(value: pa.Buffer) -> bytes:
    """The bytes of the stream's first message: they tell one schema from another without building it."""
    view = memoryview(value)
    return bytes(view[: 8 + int.from_bytes(view[4:8], "little")])


def _read(value: pa.Buffer) -> pa.RecordBatch:
    if value.size < len(_END_OF_STREAM) or bytes(value[-len(_END_OF_STREAM) :]) != _END_OF_STREAM:
        raise CodecError(f"expected an Arrow IPC stream with its end marker, got {value.size} bytes without: truncated")
    try:
        with ipc.open_stream(value, options=_READ_OPTIONS) as reader:
            batches = list(reader)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise CodecError(f"expected an Arrow IPC stream, got {value.size} bytes that are none: {error}") from error
    if sum(batch.num_rows for batch in batches) == 0:
        raise CodecError("expected at least one row in a record, got none")
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _only_kind(batch: pa.RecordBatch) -> str:
    kinds = _distinct(batch, "kind")
    if len(kinds) != 1 or kinds[0] is None:
        raise CodecError(f"expected one kind in all rows of a record, got {kinds[:5]}")
    return kind_named(kinds[0]).name


def _distinct(batch: pa.RecordBatch, name: str) -> list[str | None]:
    index = batch.schema.get_field_index(name)
    if index < 0 or not (pt.is_string(batch.column(index).type) or pt.is_large_string(batch.column(index).type)):
        return [None]
    values: list[str | None] = pc.unique(batch.column(index)).to_pylist()
    return values


def parse_version(text: str | None) -> tuple[int, int]:
    """``major.minor`` as two numbers.

    Raises:
        SchemaVersionError: the text is not of that form.
    """
    major, dot, minor = (text or "").partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        raise SchemaVersionError(f"expected a schema version as in {SCHEMA_MAJOR}.{SCHEMA_MINOR}, got {text!r}")
    return int(major), int(minor)


def _check_versions(batch: pa.RecordBatch) -> None:
    for text in _distinct(batch, "schema_version"):
        if parse_version(text)[0] != SCHEMA_MAJOR:
            raise SchemaVersionError(
                f"expected schema version {SCHEMA_MAJOR}.x, got {text}: read it with a Rolltape that knows it"
            )


def _check_bounds(batch: pa.RecordBatch) -> None:
    """Refuse a record whose offsets point outside its buffers; broken text alone is left to validation."""
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        # As bytes instead of text, only the offsets are left to be wrong.
        for column in batch.columns:
            column.view(_bytes_for_text(column.type)).validate(full=True)


def _bytes_for_text(type_: pa.DataType) -> pa.DataType:
    if pt.is_struct(type_):
        return pa.struct([pa.field(field.name, _bytes_for_text(field.type)) for field in type_.fields])
    if pt.is_list(type_):
        return pa.list_(_bytes_for_text(type_.value_type))
    if pt.is_large_list(type_):
        return pa.large_list(_bytes_for_text(type_.value_type))
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(type_, type_)
