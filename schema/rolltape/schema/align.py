"""Bringing an Arrow array to the type of a spec: by widening, never by a guess.

Two callers, two rules. *Conforming* what was written elsewhere (a file, a record): missing nested fields become null,
unknown ones are left out, other spellings of a list or text type are read, integers and floats may be widened, and
everything narrower is refused (cases D21 to D23). *Fitting* what a caller hands in: integers and floats may also be
narrowed where every value fits, integer microseconds may become a timestamp, and unknown nested fields are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from rolltape.schema.errors import ValidationError

MAX_LIST_VALUES: Final = 2**31 - 1
"""Values that the int32 offsets of one list array can address."""

_SHARED_NULLS_ROWS: Final = 1024
_UNITS: Final = ("s", "ms", "us", "ns")


Aligner = Callable[[pa.Array], pa.Array]
"""Brings arrays of one type to another; made once for a pair of types, applied to many arrays."""


def conforming(source: pa.DataType, target: pa.DataType, where: str) -> Aligner:
    """The aligner that reads ``source`` as ``target`` without changing a value; zero-copy where the types agree.

    Raises:
        ValidationError: ``source`` is no spelling of, and cannot be widened to, ``target``. The aligner itself raises
            it where a list is too long for int32 offsets.
    """
    return _aligner(source, target, where, False)


def fit_array(array: pa.Array, target: pa.DataType, where: str) -> pa.Array:
    """``array`` as ``target``, narrowed where every value fits.

    Raises:
        ValidationError: the types differ in meaning, or a value does not fit; names ``where``.
    """
    return array if array.type == target else _aligner(array.type, target, where, True)(array)


def _aligner(source: pa.DataType, target: pa.DataType, where: str, fitting: bool) -> Aligner:
    if source == target:
        return _identity
    if pt.is_null(source):
        return lambda array: pa.nulls(len(array), target)
    if pt.is_dictionary(source):
        inner = _aligner(source.value_type, target, where, fitting)
        return lambda array: inner(array.dictionary_decode())
    if pt.is_struct(target):
        return _struct_aligner(source, target, where, fitting)
    if pt.is_list(target):
        return _list_aligner(source, target, where, fitting)
    if not _may_become(source, target, fitting):
        raise _refusal(source, target, where)
    return partial(_cast, target=target, where=where)


def _identity(array: pa.Array) -> pa.Array:
    return array


def _cast(array: pa.Array, *, target: pa.DataType, where: str) -> pa.Array:
    try:
        if pt.is_integer(array.type) and pt.is_timestamp(target):
            return array.cast(pa.int64()).cast(target)
        return array.cast(target)
    except pa.ArrowInvalid as error:
        raise ValidationError(
            f"{where}: expected {target}, got {array.type} with a value that does not fit: {error}"
        ) from error


def _may_become(source: pa.DataType, target: pa.DataType, fitting: bool) -> bool:
    for is_target, rule in _RULES:
        if is_target(target):
            return rule(source, target, fitting)
    return False


def _integer_rule(source: pa.DataType, target: pa.DataType, fitting: bool) -> bool:
    if not pt.is_integer(source):
        return False
    needed = source.bit_width + (1 if pt.is_unsigned_integer(source) else 0)
    return fitting or needed <= target.bit_width


def _float_rule(source: pa.DataType, target: pa.DataType, fitting: bool) -> bool:
    if pt.is_floating(source):
        return fitting or source.bit_width <= target.bit_width
    return fitting and pt.is_integer(source)


def _string_rule(source: pa.DataType, _target: pa.DataType, _fitting: bool) -> bool:
    return bool(pt.is_string(source) or pt.is_large_string(source) or pt.is_string_view(source))


def _binary_rule(source: pa.DataType, _target: pa.DataType, _fitting: bool) -> bool:
    return bool(
        pt.is_binary(source)
        or pt.is_large_binary(source)
        or pt.is_binary_view(source)
        or pt.is_fixed_size_binary(source)
    )


def _timestamp_rule(source: pa.DataType, target: pa.DataType, fitting: bool) -> bool:
    if pt.is_timestamp(source):
        return source.tz is not None and (fitting or _UNITS.index(source.unit) <= _UNITS.index(target.unit))
    return fitting and pt.is_integer(source)


def _boolean_rule(source: pa.DataType, _target: pa.DataType, _fitting: bool) -> bool:
    return bool(pt.is_boolean(source))


_RULES: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType, pa.DataType, bool], bool]], ...]] = (
    (pt.is_string, _string_rule),
    (pt.is_integer, _integer_rule),
    (pt.is_floating, _float_rule),
    (pt.is_binary, _binary_rule),
    (pt.is_boolean, _boolean_rule),
    (pt.is_timestamp, _timestamp_rule),
)


def _struct_aligner(source: pa.DataType, target: pa.StructType, where: str, fitting: bool) -> Aligner:
    if not pt.is_struct(source):
        raise _refusal(source, target, where)
    sources = {field.name: (at, field.type) for at, field in enumerate(source.fields)}
    fields = list(target.fields)
    unknown = sources.keys() - {field.name for field in fields}
    if fitting and unknown:
        known = ", ".join(field.name for field in fields)
        raise ValidationError(f"{where}: expected fields among {known}; got {', '.join(sorted(unknown))}")
    present = {
        at: (sources[field.name][0], _aligner(sources[field.name][1], field.type, f"{where}.{field.name}", fitting))
        for at, field in enumerate(fields)
        if field.name in sources
    }
    nulls = _null_maker([field.type for field in fields])

    def align(array: pa.StructArray) -> pa.StructArray:
        children = nulls(len(array))
        given = array.flatten()
        for at, (index, inner) in present.items():
            children[at] = inner(given[index])
        return rebuild_struct(array, children, fields)

    return align


def _null_maker(types: list[pa.DataType]) -> Callable[[int], list[pa.Array]]:
    """Lists of nulls, one array for each type; short ones are made once, since arrays are immutable."""

    @lru_cache(maxsize=32)
    def shared(num_rows: int) -> tuple[pa.Array, ...]:
        return tuple(pa.nulls(num_rows, type_) for type_ in types)

    def make(num_rows: int) -> list[pa.Array]:
        return list(shared(num_rows) if num_rows <= _SHARED_NULLS_ROWS else shared.__wrapped__(num_rows))

    return make


def rebuild_struct(parent: pa.StructArray, children: list[pa.Array], fields: list[pa.Field]) -> pa.StructArray:
    """A struct array of other ``children`` that is null where ``parent`` is."""
    mask = parent.is_null() if parent.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _list_aligner(source: pa.DataType, target: pa.ListType, where: str, fitting: bool) -> Aligner:
    if not (pt.is_list(source) or pt.is_large_list(source) or _has_no_offsets(source)):
        raise _refusal(source, target, where)
    inner = _aligner(source.value_type, target.value_type, f"{where}[]", fitting)

    def align(array: pa.Array) -> pa.ListArray:
        offsets, values = list_parts(_as_offsets_list(array) if _has_no_offsets(source) else array)
        if len(values) > MAX_LIST_VALUES:
            raise ValidationError(
                f"{where}: {len(values)} list elements in one chunk, and int32 offsets address {MAX_LIST_VALUES}:"
                " give it in smaller chunks"
            )
        return rebuild_list(array, offsets.astype(np.int32, copy=False), inner(values), target)

    return align


def _has_no_offsets(type_: pa.DataType) -> bool:
    return bool(pt.is_list_view(type_) or pt.is_large_list_view(type_) or pt.is_fixed_size_list(type_))


def _as_offsets_list(array: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return pa.LargeListArray.from_arrays(pa.array(offsets), array.flatten(), mask=array.is_null())


def list_parts(array: pa.ListArray | pa.LargeListArray) -> tuple[np.ndarray, pa.Array]:
    """Offsets (from 0, one more than rows) and the child values that they address, and no neighbour's.

    ``ListArray.values`` ignores a slice's own bounds (case D23); this does not.
    """
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    first = int(offsets[0])
    values = array.values.slice(first, int(offsets[-1]) - first)
    return (offsets - first if first else offsets), values


def rebuild_list(parent: pa.Array, offsets: np.ndarray, values: pa.Array, type_: pa.ListType) -> pa.ListArray:
    """A list array of other ``values`` that is null where ``parent`` is."""
    mask = parent.is_null() if parent.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=type_, mask=mask)


def _refusal(source: pa.DataType, target: pa.DataType, where: str) -> ValidationError:
    return ValidationError(f"{where}: expected {target}, got {source}, which cannot be read as that without loss")
