"""Reading foreign JSON: a field of the wrong shape names itself, and ids are taken as they stand or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolltape.ingest.importers.source import MalformedRowError
from rolltape.schema import reasons


def required(document: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Field ``name``, which must be there and of type ``kind``.

    Raises:
        MalformedRowError: it is absent or of another type.
    """
    if name not in document:
        raise MalformedRowError(reasons.MISSING_FIELD, f"expected the field {name!r}, got only {sorted(document)}")
    value = document[name]
    if not isinstance(value, kind):
        expected = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
        detail = f"expected {expected} in the field {name!r}, got {type(value).__name__}"
        raise MalformedRowError(reasons.BAD_VALUE, detail)
    return value


def optional_list(document: Mapping[str, Any], name: str) -> list[Any] | None:
    """The list in field ``name``; None where the field is absent or null (its length is checked by validation).

    Raises:
        MalformedRowError: it is something else.
    """
    return required(document, name, list) if document.get(name) is not None else None


def optional_mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in field ``name``; an empty one where the file has none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def optional_float(document: Mapping[str, Any], name: str) -> float | None:
    """The number in field ``name``; None where the file does not say (booleans count as 0 and 1)."""
    value = document.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def optional_int(document: Mapping[str, Any], name: str) -> int | None:
    """The whole number in field ``name``; None where the file does not say."""
    value = document.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def optional_text(document: Mapping[str, Any], name: str) -> str | None:
    """The text in field ``name``; None where the file does not say."""
    value = document.get(name)
    return value if isinstance(value, str) else None


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_id(prefix: str, value: Any) -> str:
    """A name that equal content has in every file, as ``gsm8k-1f0a…`` (16 hex digits of SHA-256)."""
    return f"{prefix}-{hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]}"


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first id in which two lists differ (the shorter one's length if it is a prefix); None if equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def starts_with(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    """Whether ``ids`` extends ``prefix``."""
    return len(ids) >= len(prefix) and list(ids[: len(prefix)]) == list(prefix)
