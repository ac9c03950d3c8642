"""One event as one line of valid JSON, and back: the form in which refused rows are kept and exports are written.

JSON has no NaN and no infinity (case D9), and no bytes. Non-finite floats are written as the texts ``NaN``,
``Infinity`` and ``-Infinity`` (as protobuf's JSON does), bytes as ``{"$base64": …}``, times as ISO 8601. Reading is
guided by the kind's column specs, so the values come back. (The payload bits of a NaN do not: Arrow IPC keeps those.)
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from rolltape.schema.errors import CodecError
from rolltape.schema.layout import layout_of

_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BYTES_KEY: Final = "$base64"


def to_json_line(values: Mapping[str, Any]) -> bytes:
    """Flat columns of one event as one line of ASCII JSON, without the line's end."""
    return json.dumps(_plain(dict(values)), allow_nan=False, separators=(",", ":")).encode("ascii")


def from_json_line(kind: str, line: bytes) -> dict[str, Any]:
    """Flat columns of one event, for :func:`rolltape.schema.build.build_batch` (wrap each in a list).

    Raises:
        CodecError: the line is not a JSON object.
        ValidationError: a column that the kind does not have.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        raise CodecError(f"expected one JSON object for {kind}, got {line[:80]!r}: {error}") from error
    if not isinstance(values, dict):
        raise CodecError(f"expected one JSON object for {kind}, got {line[:80]!r}")
    layout = layout_of(kind)
    return {name: _typed(value, layout.place(name).spec.type) for name, value in values.items()}


def _plain(value: Any) -> Any:
    match value:
        case float() | np.floating():
            number = float(value)
            return number if math.isfinite(number) else _non_finite_text(number)
        case bytes():
            return {_BYTES_KEY: base64.b64encode(value).decode("ascii")}
        case np.ndarray():
            return [_plain(item) for item in value.tolist()]
        case np.generic() | pa.Scalar():
            return _plain(value.item() if isinstance(value, np.generic) else value.as_py())
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case datetime():
            return value.isoformat()
        case None | str() | int():
            return value
        case _:
            return repr(value)


def _non_finite_text(number: float) -> str:
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _typed(value: Any, type_: pa.DataType) -> Any:
    if isinstance(value, dict) and set(value) == {_BYTES_KEY}:
        return base64.b64decode(value[_BYTES_KEY])
    if isinstance(value, str) and pt.is_floating(type_):
        return _NON_FINITE.get(value, value)
    if isinstance(value, str) and pt.is_timestamp(type_):
        return datetime.fromisoformat(value)
    if isinstance(value, list) and pt.is_list(type_):
        return [_typed(item, type_.value_type) for item in value]
    if isinstance(value, dict) and pt.is_struct(type_):
        known = {field.name: field.type for field in type_.fields}
        return {name: _typed(item, known.get(name, pa.null())) for name, item in value.items()}
    return value
