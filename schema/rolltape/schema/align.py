"""Bringing an Arrow array to the type of a spec: by widening, never by a guess.

Two callers, two rules. *Conforming* what was written elsewhere (a file, a record): missing nested fields become null,
unknown ones are left out, other spellings of a list or text type are read, integers and floats may be widened, and
everything narrower is refused (cases D21 to D23). *Fitting* what a caller hands in: integers and floats may also be
narrowed where every value fits, integer microseconds may become a timestamp, and unknown nested fields are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from rolltape.schema.errors import ValidationError

MAX_LIST_VALUES: Final = 2**31 - 1
"""Values that the int32 offsets of one list array can address."""

_UNITS: Final = ("s", "ms", "us", "ns")


def conform_array(array: pa.Array, target: pa.DataType, where: str) -> pa.Array:
    """``array`` as ``target`` without a value changed; zero-copy where the types agree.

    Raises:
        ValidationError: the array's type is no spelling of, and cannot be widened to, ``target``.
    """
    return _align(array, target, where, False)


def fit_array(array: pa.Array, target: pa.DataType, where: str) -> pa.Array:
    """``array`` as ``target``, narrowed where every value fits.

    Raises:
        ValidationError: the types differ in meaning, or a value does not fit; names ``where``.
    """
    return _align(array, target, where, True)


def _align(array: pa.Array, target: pa.DataType, where: str, fitting: bool) -> pa.Array:
    source = array.type
    if source == target:
        return array
    if pt.is_null(source):
        return pa.nulls(len(array), target)
    if pt.is_dictionary(source):
        return _align(array.dictionary_decode(), target, where, fitting)
    if pt.is_struct(target):
        return _align_struct(array, target, where, fitting)
    if pt.is_list(target):
        return _align_list(array, target, where, fitting)
    if not _may_become(source, target, fitting):
        raise _refusal(source, target, where)
    try:
        return _cast(array, target)
    except pa.ArrowInvalid as error:
        raise ValidationError(
            f"{where}: expected {target}, got {source} with a value that does not fit: {error}"
        ) from error


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pt.is_integer(array.type) and pt.is_timestamp(target):
        return array.cast(pa.int64()).cast(target)
    return array.cast(target)


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


def _align_struct(array: pa.Array, target: pa.StructType, where: str, fitting: bool) -> pa.Array:
    if not pt.is_struct(array.type):
        raise _refusal(array.type, target, where)
    names = [field.name for field in array.type.fields]
    unknown = [name for name in names if target.get_field_index(name) < 0]
    if fitting and unknown:
        known = ", ".join(field.name for field in target.fields)
        raise ValidationError(f"{where}: expected fields among {known}; got {', '.join(unknown)}")
    children = [
        _align(array.field(names.index(field.name)), field.type, f"{where}.{field.name}", fitting)
        if field.name in names
        else pa.nulls(len(array), field.type)
        for field in target.fields
    ]
    return rebuild_struct(array, children, target.fields)


def rebuild_struct(parent: pa.StructArray, children: list[pa.Array], fields: list[pa.Field]) -> pa.StructArray:
    """A struct array of other ``children`` that is null where ``parent`` is."""
    mask = parent.is_null() if parent.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _align_list(array: pa.Array, target: pa.ListType, where: str, fitting: bool) -> pa.Array:
    source = array.type
    if pt.is_list_view(source) or pt.is_large_list_view(source) or pt.is_fixed_size_list(source):
        array = _as_offsets_list(array)
    elif not (pt.is_list(source) or pt.is_large_list(source)):
        raise _refusal(source, target, where)
    offsets, values = list_parts(array)
    if len(values) > MAX_LIST_VALUES:
        raise ValidationError(
            f"{where}: {len(values)} list elements in one chunk, and int32 offsets address {MAX_LIST_VALUES}:"
            " give it in smaller chunks"
        )
    values = _align(values, target.value_type, f"{where}[]", fitting)
    return rebuild_list(array, offsets.astype(np.int32, copy=False), values, target)


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
