"""Strict conversion of one caller's column: Python, NumPy or Arrow values to the Arrow type of a spec.

Arrow's own conversion is lenient where a tape may not be: it cuts 1.5 to 1, reads a text as a list of its characters,
drops unknown keys of a dict and takes a naive time for UTC. So a value either matches the spec by its exact Python or
NumPy type (the fast way), or Arrow infers its type and :func:`rolltape.schema.align.fit_array` decides.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from rolltape.schema.align import MAX_LIST_VALUES, fit_array
from rolltape.schema.errors import ValidationError
from rolltape.schema.layout import Place
from rolltape.schema.shape import Shape

PLAIN_VALUES: Final = (str, bytes, int, float, bool, datetime, dict, type(None), np.generic, pa.Scalar)
"""Types of a value that stands for every row of its column."""

_COMMON_COLUMNS: Final = frozenset((list, np.ndarray))

_CACHEABLE: Final = frozenset((str, int, bool, type(None)))


def convert(value: Any, place: Place, num_rows: int) -> pa.Array:
    """One column as an array of its spec's type: one value a row, or a plain value for all ``num_rows``.

    Raises:
        ValidationError: a value is not what the spec says, or does not fit it. Arrow's and Python's own conversion
            errors (``pa.ArrowException``, ``TypeError``, ``ValueError``, ``OverflowError``) may come through as well.
    """
    if is_plain(value):
        return _repeated(value, place, num_rows)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        return fit_array(value, place.shape.type, place.spec.name)
    if isinstance(value, np.ndarray):
        return _from_numpy(value, place)
    return _from_sequence(value, place)


def is_plain(value: Any) -> bool:
    """Whether ``value`` stands for every row of its column."""
    return type(value) not in _COMMON_COLUMNS and isinstance(value, PLAIN_VALUES)


def _repeated(value: Any, place: Place, num_rows: int) -> pa.Array:
    if type(value) is str and str in place.shape.leaf_types:
        return _repeated_text(value, num_rows)
    if value is None:
        return pa.nulls(num_rows, place.shape.type)
    if type(value) is int or type(value) is bool:
        return _repeated_number(place, value, num_rows)
    if type(value) is dict and _is_cacheable(value):
        return _repeated_struct(place, repr(value), num_rows)
    plain: Any = value
    one = _from_sequence([plain.as_py() if isinstance(plain, pa.Scalar) else plain], place)
    return one if num_rows == 1 else pa.repeat(one[0], num_rows)


@lru_cache(maxsize=1024)
def _repeated_text(text: str, num_rows: int) -> pa.Array:
    return pa.array([text], pa.string()) if num_rows == 1 else pa.repeat(pa.scalar(text, pa.string()), num_rows)


# Typed: ``True`` and ``1`` are equal and mean different things.
@lru_cache(maxsize=1024, typed=True)
def _repeated_number(place: Place, value: int, num_rows: int) -> pa.Array:
    one = _from_sequence([value], place)
    return one if num_rows == 1 else pa.repeat(one[0], num_rows)


def _is_cacheable(value: dict[Any, Any]) -> bool:
    """Whether ``repr`` tells ``value`` from every other: plain values, keys among them, and no NaN or infinity."""
    return all(
        type(key) is str and (type(item) in _CACHEABLE or (type(item) is float and math.isfinite(item)))
        for key, item in value.items()
    )


@lru_cache(maxsize=256)
def _repeated_struct(place: Place, text: str, num_rows: int) -> pa.Array:
    one = _from_sequence([ast.literal_eval(text)], place)
    return one if num_rows == 1 else pa.repeat(one[0], num_rows)


def _from_numpy(values: npt.NDArray[Any], place: Place) -> pa.Array:
    if values.ndim == 2:
        rows, width = values.shape
        return _list_array(np.arange(rows + 1, dtype=np.int64) * width, values.reshape(-1), None, place)
    if values.ndim != 1:
        raise ValidationError(f"{place.spec.name}: expected one or two dimensions, got shape {values.shape}")
    if values.dtype == object:
        return _from_sequence(values.tolist(), place)
    return _from_vector(values, place.shape, place.spec.name)


def _from_vector(values: npt.NDArray[Any], shape: Shape, where: str) -> pa.Array:
    if values.dtype.kind in shape.numpy_kinds:
        return pa.array(values, shape.type)
    if values.dtype == np.int64 and pt.is_timestamp(shape.type):
        buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
        return pa.Array.from_buffers(shape.type, len(values), buffers)
    return fit_array(pa.array(values), shape.type, where)


def _from_sequence(values: Sequence[Any], place: Place) -> pa.Array:
    shape = place.shape
    if shape.is_leaf_list:
        # The elements are not looked at one by one in Python: Arrow infers their type.
        if _are_vectors(values):
            return _from_ragged(values, place)
    elif shape.matches(values):
        return pa.array(values, shape.type)
    return fit_array(pa.array(values), shape.type, place.spec.name)


def _are_vectors(values: Sequence[Any]) -> bool:
    dtypes = {
        value.dtype if type(value) is np.ndarray and value.ndim == 1 else None for value in values if value is not None
    }
    return len(dtypes) == 1 and None not in dtypes and np.dtype(object) not in dtypes


def _from_ragged(values: Sequence[npt.NDArray[Any] | None], place: Place) -> pa.Array:
    """One copy of all rows' tokens, whose arrays stay their owner's: no Python object for any token."""
    present = [value for value in values if value is not None]
    mask = None if len(present) == len(values) else pa.array([value is None for value in values])
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    return _list_array(offsets, np.concatenate(present), mask, place)


def _list_array(
    offsets: npt.NDArray[np.int64], values: npt.NDArray[Any], mask: pa.BooleanArray | None, place: Place
) -> pa.Array:
    name, shape = place.spec.name, place.shape
    if shape.element is None:
        raise ValidationError(f"{name}: expected {shape.type}, got a list in each row")
    if len(values) > MAX_LIST_VALUES:
        raise ValidationError(f"{name}: {len(values)} elements in one batch; at most {MAX_LIST_VALUES} fit")
    elements = _from_vector(values, shape.element, name)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), elements, type=shape.type, mask=mask)
