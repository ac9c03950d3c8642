"""Ranges of tokens as NumPy arrays: reading list columns, copying many ranges at once, building list columns.

Everything here is independent of what the tokens mean. A *range* is a pair (start, length) into a flat array; many
ranges are two int64 arrays of equal length.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.columns import list_of

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

_LONG_RANGE: Final = 32  # tokens; above it a slice copy beats an index array


class Lists(NamedTuple):
    """A list column taken apart: row i holds ``values[starts[i] : starts[i] + lengths[i]]``.

    ``starts`` and ``lengths`` are right for sliced arrays too; a null row has length 0 and ``valid`` False.
    """

    values: pa.Array
    starts: Ints
    lengths: Ints
    valid: Bools


def single(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one array, without a copy where it is one chunk already."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def field_of(struct: pa.StructArray, name: str) -> pa.Array:
    """A field of a struct array; null where the struct is."""
    index = struct.type.get_field_index(name)
    return pc.struct_field(struct, [index]) if struct.null_count else struct.field(index)


def lists_of(array: pa.Array) -> Lists:
    """Take a list array apart; its slice offset is honoured (``values`` alone would ignore it)."""
    num_rows = len(array)
    valid = valid_of(array)
    if num_rows == 0:
        empty = np.zeros(0, np.int64)
        return Lists(array.values, empty, empty, valid)
    width = 8 if pa.types.is_large_list(array.type) else 4
    dtype = np.int64 if width == 8 else np.int32
    offsets = np.frombuffer(array.buffers()[1], dtype, num_rows + 1, array.offset * width).astype(np.int64)
    lengths = np.diff(offsets)
    if not valid.all():
        lengths[~valid] = 0
    return Lists(array.values, offsets[:-1], lengths, valid)


def valid_of(array: pa.Array) -> Bools:
    """Which slots are not null."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    return bools_of(array.is_valid())


def bools_of(array: pa.Array, *, null: bool = False) -> Bools:
    """A boolean array as NumPy; nulls become ``null``."""
    if array.null_count:
        array = pc.fill_null(array, null)
    filled: Bools = array.to_numpy(zero_copy_only=False).astype(np.bool_, copy=False)
    return filled


def ints_of(array: pa.Array, *, null: int = -1) -> Ints:
    """An integer array as int64 NumPy, perhaps a read-only view; nulls become ``null``."""
    if array.null_count:
        array = pc.fill_null(array.cast(pa.int64()), null)
    ints: Ints = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return ints


def floats_of(array: pa.Array) -> Array:
    """The value buffer of a float or int array without nulls, or with the values under nulls set to 0."""
    if array.null_count:
        array = pc.fill_null(array, 0)
    floats: Array = array.to_numpy(zero_copy_only=False)
    return floats


def exclusive_cumsum(lengths: Ints) -> Ints:
    """Offsets of consecutive ranges: one more than lengths, from 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def expand_ranges(starts: Ints, lengths: Ints) -> Ints:
    """All indexes of the ranges, one after the other.

    >>> expand_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets = exclusive_cumsum(lengths)
    indexes: Ints = np.arange(offsets[-1], dtype=np.int64)
    indexes += np.repeat(starts - offsets[:-1], lengths)
    return indexes


def is_contiguous(starts: Ints, lengths: Ints) -> bool:
    """Whether each range begins where the one before it ended (empty ranges may lie anywhere)."""
    if not lengths.all():
        filled = lengths > 0
        starts, lengths = starts[filled], lengths[filled]
    return bool(np.array_equal(starts[1:], starts[:-1] + lengths[:-1]))


def first_start(starts: Ints, lengths: Ints) -> int:
    """Start of the first range that is not empty, else 0."""
    filled = np.flatnonzero(lengths)
    return int(starts[filled[0]]) if len(filled) else 0


def copy_ranges(target: Array, target_starts: Ints, source: Array, source_starts: Ints, lengths: Ints) -> None:
    """Copy ``source`` ranges to ``target`` ranges of the same lengths; where targets overlap the later wins."""
    total = int(lengths.sum())
    if total == 0:
        return
    if total < _LONG_RANGE * len(lengths):
        target[expand_ranges(target_starts, lengths)] = source[expand_ranges(source_starts, lengths)]
        return
    for to, at, length in zip(target_starts.tolist(), source_starts.tolist(), lengths.tolist(), strict=True):
        target[to : to + length] = source[at : at + length]


def pool_array(size: int, dtype: np.dtype[Any]) -> Array:
    """An array to be filled, in memory of Arrow's pool: what it gives back there leaves no holes in the heap."""
    return np.frombuffer(pa.allocate_buffer(size * dtype.itemsize), dtype)


def spread_ranges(starts: Ints, lengths: Ints, values: Array, size: int, default: int) -> Array:
    """An array of ``size`` in which each range has its value, and ``default`` lies between; a later range wins.

    >>> spread_ranges(np.array([1, 3]), np.array([2, 1]), np.array([7, 8]), 5, -1).tolist()
    [-1, 7, 7, 8, -1]
    """
    ends = starts + lengths
    gaps = np.diff(starts, append=size)
    gaps -= lengths
    lead = int(starts[0]) if len(starts) else size
    if not lead and not gaps.any() and (values == values[:1]).all():
        spread = pool_array(size, values.dtype)
        spread[:] = values[0] if len(values) else default
        return spread
    if (gaps >= 0).all():
        steps = np.stack([lengths, gaps], axis=1).ravel()
        spread = np.stack([values, np.full(len(values), default, values.dtype)], axis=1).ravel()
        if not gaps.any():
            spread, steps = values, lengths
        return np.repeat(np.append(np.array(default, values.dtype), spread), np.append(lead, steps))
    target = np.full(size, default, values.dtype)
    for start, end, value in zip(starts.tolist(), ends.tolist(), values.tolist(), strict=True):
        target[start:end] = value
    return target


def sum_by(groups: Ints, values: Array, num_groups: int) -> Ints:
    """Sum of ``values`` for each group number (exact below 2**53)."""
    sums: Ints = np.bincount(groups, weights=values, minlength=num_groups).astype(np.int64)
    return sums


def count_by(groups: Ints, num_groups: int) -> Ints:
    """Number of entries for each group number."""
    counts: Ints = np.bincount(groups, minlength=num_groups).astype(np.int64, copy=False)
    return counts


def constant(value: bool, size: int) -> Bools:
    """``size`` times ``value`` (``bool``), read-only and without memory of its own."""
    return np.broadcast_to(np.bool_(value), (size,))


def is_constant(values: Bools) -> bool:
    """Whether the array is known, without a look at it, to hold one value throughout (not empty)."""
    return values.strides == (0,) and len(values) > 0


def bool_array(values: Bools) -> pa.Array:
    """A NumPy boolean array as Arrow's packed bits."""
    size = len(values)
    if is_constant(values):
        packed = np.full(-(-size // 8), 255 if values[0] else 0, np.uint8)
        if size % 8 and values[0]:
            packed[-1] = (1 << size % 8) - 1
    else:
        packed = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(packed)])


def nullable_array(values: Array, valid: Bools | None, type_: pa.DataType) -> pa.Array:
    """A primitive array over ``values``, null where ``valid`` is false; the buffer under nulls is kept as it is."""
    if valid is None or valid.all():
        return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])
    bits = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(type_, len(values), [bits, pa.py_buffer(values)])


def list_array(offsets: Ints, values: pa.Array, valid: Bools | None = None) -> pa.Array:
    """A list array (child named ``element``) over consecutive ranges of ``values``.

    Raises:
        OverflowError: more values than 32-bit offsets can address; fold fewer trajectories at once.
    """
    if offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"expected at most 2**31 - 1 list values in one array, got {int(offsets[-1])}")
    bits = None
    if valid is not None and not valid.all():
        bits = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bits, pa.py_buffer(offsets.astype(np.int32))]
    return pa.Array.from_buffers(list_of(values.type), len(offsets) - 1, buffers, children=[values])


def take_or_null(array: pa.Array, rows: Ints) -> pa.Array:
    """Rows of ``array``; null where the row is negative. No copy where the rows are all of it in order."""
    num_rows = len(array)
    if len(rows) == num_rows and np.array_equal(rows, np.arange(num_rows)):
        return array
    missing = rows < 0
    if not missing.any():
        return array.take(pa.array(rows))
    return array.take(pa.array(rows, mask=missing))


def reduce_by(ufunc: np.ufunc, groups: Ints, values: Array, num_groups: int, default: int) -> Ints:
    """``ufunc.reduce`` of ``values`` for each group number (ascending); groups without entries get ``default``."""
    reduced = np.full(num_groups, default, np.int64)
    if len(groups):
        firsts = np.flatnonzero(np.diff(groups, prepend=-1))
        reduced[groups[firsts]] = ufunc.reduceat(values, firsts)
    return reduced
