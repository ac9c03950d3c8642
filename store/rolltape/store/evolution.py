"""A table's schema against today's specs: what it lacks, and what can never be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rolltape.schema.errors import LakeFormatError
from rolltape.schema.render import delta_schema_json


def missing_fields(schema_json: str) -> list[str]:
    """Dotted names of columns and nested fields that this version knows and a table's schema lacks.

    Raises:
        LakeFormatError: a field has another type there than here (types never narrow, and never change).
    """
    missing: list[str] = []
    _compare(json.loads(delta_schema_json())["fields"], json.loads(schema_json)["fields"], "", missing)
    return missing


def _compare(ours: Sequence[Any], theirs: Sequence[Any], prefix: str, missing: list[str]) -> None:
    found = {field["name"]: field["type"] for field in theirs}
    for field in ours:
        name = f"{prefix}{field['name']}"
        if field["name"] not in found:
            missing.append(name)
        else:
            _compare_types(field["type"], found[field["name"]], name, missing)


def _compare_types(ours: Any, theirs: Any, name: str, missing: list[str]) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours["type"] == theirs["type"]:
        if ours["type"] == "struct":
            _compare(ours["fields"], theirs["fields"], f"{name}.", missing)
        else:
            _compare_types(ours["elementType"], theirs["elementType"], f"{name}.element", missing)
    elif ours != theirs:
        raise LakeFormatError(f"expected column {name} of type {ours}, the lake has {theirs}; types never change")
