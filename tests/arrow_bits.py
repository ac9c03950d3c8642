"""Comparing Arrow data by bit pattern: NaN equals the same NaN, -0.0 is not 0.0, what lies under a null is nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt


def same_bits(one: Any, other: Any) -> bool:
    """Whether two batches or arrays have the same type, nulls and bits."""
    if isinstance(one, pa.RecordBatch):
        return one.schema.equals(other.schema) and all(map(same_bits, one.columns, other.columns))
    if one.type != other.type or len(one) != len(other) or not one.is_valid().equals(other.is_valid()):
        return False
    if pt.is_struct(one.type):
        return all(map(same_bits, one.flatten(), other.flatten()))
    if pt.is_list(one.type):
        return pc.list_value_length(one).equals(pc.list_value_length(other)) and same_bits(
            one.flatten(), other.flatten()
        )
    if pt.is_floating(one.type):
        return bits_of(one) == bits_of(other)
    return bool(one.equals(other))


def bits_of(array: Any) -> list[int]:
    """The bit patterns of a float array's values, nulls left out."""
    values = array.drop_null().to_numpy(zero_copy_only=False)
    return list(values.view(np.int32 if values.dtype == np.float32 else np.int64).tolist())
