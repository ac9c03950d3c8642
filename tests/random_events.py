"""Random batches of any kind: every bit pattern of a float, nulls at every level, empty lists, values under nulls."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rolltape.schema.layout import assemble, layout_of

_FLOAT_BITS = (0x7FC00001, 0xFFC00000, 0x7F800001, 0x00000001, 0x80000000, 0xFF800000, 0x7F800000, 0x3F800000)
_LETTERS = np.array(["a", "ß", "\N{SNOWMAN}", "\0", "\N{GRINNING FACE}", '"', "\n"])


def random_batch(kind: str, seed: int) -> pa.RecordBatch:
    """A batch of one to four rows with the kind's schema; two columns of three are null throughout."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 5))
    layout = layout_of(kind)
    top = [_maybe_null(rng, spec.type, num_rows) for spec in layout.top]
    children = [_maybe_null(rng, spec.type, num_rows) for spec in layout.children]
    for name, text in (("kind", kind), ("schema_version", "1.1")):
        top[layout.place(name).index] = pa.array([text] * num_rows)
    return assemble(layout, top, children)


def _maybe_null(rng: np.random.Generator, type_: pa.DataType, num_rows: int) -> pa.Array:
    return _array(rng, type_, num_rows) if rng.random() < 1 / 3 else pa.nulls(num_rows, type_)


def _array(rng: np.random.Generator, type_: pa.DataType, num_rows: int) -> pa.Array:
    mask = pa.array(rng.random(num_rows) < rng.choice([0.0, 0.4]))
    if pt.is_struct(type_):
        children = [_maybe_null(rng, field.type, num_rows) for field in type_.fields]
        return pa.StructArray.from_arrays(children, fields=list(type_.fields), mask=mask)
    if pt.is_list(type_):
        offsets = np.concatenate(([0], np.cumsum(rng.integers(0, 4, num_rows))))
        values = _array(rng, type_.value_type, int(offsets[-1]))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=type_, mask=mask)
    return _masked(_leaf(rng, type_, num_rows), mask)


def _leaf(rng: np.random.Generator, type_: pa.DataType, num_rows: int) -> pa.Array:
    if pt.is_floating(type_):
        return _floats(rng, type_, num_rows)
    if pt.is_boolean(type_):
        return pa.array(rng.random(num_rows) < 0.5)
    if pt.is_string(type_):
        return pa.array(["".join(rng.choice(_LETTERS, rng.integers(0, 5))) for _ in range(num_rows)], type_)
    if pt.is_binary(type_):
        return pa.array([rng.bytes(int(rng.integers(0, 5))) for _ in range(num_rows)], type_)
    width = 32 if type_ == pa.int32() else 50 if pt.is_timestamp(type_) else 64
    numbers = rng.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1, num_rows, endpoint=True)
    return pa.array(numbers, pa.int64()).cast(type_)


def _floats(rng: np.random.Generator, type_: pa.DataType, num_rows: int) -> pa.Array:
    bits = rng.integers(0, 2**32, num_rows, dtype=np.uint32)
    special = rng.random(num_rows) < 0.5
    bits[special] = rng.choice(np.array(_FLOAT_BITS, np.uint32), int(special.sum()))
    if type_ == pa.float32():
        return pa.array(bits.view(np.float32))
    wide = (bits.astype(np.uint64) << np.uint64(32)) | rng.integers(0, 2**32, num_rows, dtype=np.uint64)
    return pa.array(wide.view(np.float64))


def _masked(values: pa.Array, mask: pa.Array) -> pa.Array:
    """Null where ``mask`` is true; the value stays in the buffer underneath."""
    if not mask.true_count:
        return values
    validity = pa.array([not flag for flag in mask.to_pylist()], pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(values.type, len(values), [validity, *values.buffers()[1:]])
