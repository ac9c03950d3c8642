"""The reference page of all events, rendered from the specs: ``python -m rolltape.schema.docs > docs/events.md``.

A test compares the page with what is rendered, so it cannot go stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Final

import pyarrow as pa
import pyarrow.types as pt

from rolltape.schema.columns import Column
from rolltape.schema.envelope import ENVELOPE, EXTENSIONS, SCHEMA_VERSION, TOKEN_COLUMNS
from rolltape.schema.kinds import KINDS, Kind
from rolltape.schema.reasons import DEAD_LETTER_REASONS, UNTRAINABLE_REASONS

_INTRODUCTION: Final = f"""\
# Events

Schema version {SCHEMA_VERSION}. This page is rendered from the column specs in `schema/rolltape/schema/kinds/`
(`python -m rolltape.schema.docs > docs/events.md`); a test keeps it true.

An event has the envelope, the token columns of its kind, and one struct column with the name of its kind. In SQL, each
kind is a view of the same name with the struct's fields side by side. Storage is nullable throughout, since the table
holds every kind; **required** says what validation refuses without.
"""


def render_events() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION, _contents()]
    parts += ["## Envelope\n", _table(ENVELOPE), "\n## Token columns\n", _table((*TOKEN_COLUMNS, EXTENSIONS))]
    for plane, kinds in groupby(KINDS.values(), key=lambda kind: kind.plane):
        parts.append(f"\n## {plane.capitalize()} plane\n")
        parts += [_kind(kind) for kind in kinds]
    parts += ["## Why a record becomes a dead letter\n", _reasons(DEAD_LETTER_REASONS)]
    parts += ["\n## Why a trajectory is not trained\n", _reasons(UNTRAINABLE_REASONS)]
    return "\n".join(parts) + "\n"


def type_text(type_: pa.DataType) -> str:
    """An Arrow type in words: ``int32``, ``list<int32>``, ``struct<start int32, …>``."""
    if pt.is_list(type_):
        return f"list<{type_text(type_.value_type)}>"
    if pt.is_struct(type_):
        return "struct<" + ", ".join(f"{field.name} {type_text(field.type)}" for field in type_.fields) + ">"
    if pt.is_timestamp(type_):
        return "timestamp (UTC, µs)"
    return {"float": "float32", "double": "float64"}.get(str(type_), str(type_))


def _contents() -> str:
    lines = ["| plane | topic | kinds |", "| --- | --- | --- |"]
    for (plane, topic), kinds in groupby(KINDS.values(), key=lambda kind: (kind.plane, kind.topic)):
        lines.append(f"| {plane} | `{topic}` | {', '.join(f'[`{kind.name}`](#{kind.name})' for kind in kinds)} |")
    return "\n".join(lines) + "\n"


def _kind(kind: Kind) -> str:
    lines = [f"### {kind.name}\n", f"{kind.doc}\n"]
    if kind.requires:
        lines.append(f"Requires of the envelope: {_names(kind.requires)}.\n")
    if kind.tokens:
        lines.append(f"Token columns: {_names(kind.tokens)}.\n")
    return "\n".join(lines) + "\n" + _table(kind.columns) + "\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(columns: Iterable[Column]) -> str:
    lines = ["| column | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{spec.name}` | {type_text(spec.type)} | {_meaning(spec)} |" for spec in columns]
    return "\n".join(lines) + "\n"


def _meaning(spec: Column) -> str:
    notes = [spec.doc]
    if spec.choices:
        notes.append(f"one of {_names(spec.choices)}")
    if spec.minimum is not None:
        notes.append(f"≥ {spec.minimum}")
    if spec.unit:
        notes.append(f"unit: {spec.unit}")
    if not spec.nullable:
        notes.append("**required**")
    return "; ".join(notes).replace("|", "\\|")


def _reasons(reasons: Mapping[str, str]) -> str:
    lines = ["| reason | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {meaning} |" for name, meaning in reasons.items())]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_events())
