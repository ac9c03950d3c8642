"""The column specs and what is rendered from them: one drift fails here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.types as pt
import pytest

from rolltape.schema import reasons
from rolltape.schema.columns import Column
from rolltape.schema.docs import render_events
from rolltape.schema.envelope import ENVELOPE, EXTENSIONS, STAMPED_BY_LOG, STAMPED_BY_RECORDER, TOKEN_COLUMNS
from rolltape.schema.errors import UnknownKindError
from rolltape.schema.kinds import KINDS, TOPICS, kind_named
from rolltape.schema.layout import layout_of
from rolltape.schema.render import arrow_schema, columns_of_kind, delta_schema_json, duckdb_type, table_schema

ROOT = Path(__file__).parents[3]


def leaves(type_: pa.DataType) -> list[pa.DataType]:
    if pt.is_list(type_):
        return leaves(type_.value_type)
    if pt.is_struct(type_):
        return [leaf for field in type_.fields for leaf in leaves(field.type)]
    return [type_]


def specs() -> list[tuple[str, Column]]:
    return [(kind.name, spec) for kind in KINDS.values() for spec in columns_of_kind(kind)]


def test_the_events_page_is_what_the_specs_render_to() -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    assert page == render_events(), "render it again: python -m rolltape.schema.docs > docs/events.md"


@pytest.mark.parametrize("kind", KINDS)
def test_flat_names_of_a_kind_are_unambiguous(kind: str) -> None:
    """Callers name envelope, token and own columns side by side, and SQL shows them so."""
    own = [spec.name for spec in kind_named(kind).columns]
    shared = [spec.name for spec in (*ENVELOPE, *TOKEN_COLUMNS, EXTENSIONS)]
    assert len(own) == len(set(own))
    assert set(own).isdisjoint(shared)
    assert kind not in shared
    assert set(layout_of(kind).places) == {*own, *(spec.name for spec in columns_of_kind(kind_named(kind))[:-1])}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_belongs_to_a_topic_and_a_table(kind: str) -> None:
    spec = kind_named(kind)
    assert spec.topic in TOPICS
    assert spec.doc.endswith(".")
    assert {*spec.requires} <= {column.name for column in ENVELOPE}
    table = table_schema()
    for field in arrow_schema(kind):
        assert table.field(field.name).type == field.type


def test_every_column_is_of_a_type_that_the_lake_keeps() -> None:
    """No unsigned, half-precision or nanosecond column: those come back as something else (platform.md)."""
    allowed = {
        *(pa.string(), pa.binary(), pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        pa.timestamp("us", tz="UTC"),
    }
    for kind, spec in specs():
        assert set(leaves(spec.type)) <= allowed, (kind, spec.name)
        assert not pt.is_list(spec.type) or spec.type.value_field.name == "element", (kind, spec.name)


def test_choices_and_minimums_fit_their_types() -> None:
    for kind, spec in specs():
        assert not spec.choices or pt.is_string(spec.type), (kind, spec.name)
        assert spec.minimum is None or pt.is_integer(spec.type), (kind, spec.name)
        assert spec.doc, (kind, spec.name)


def test_the_delta_schema_has_every_column() -> None:
    rendered = json.loads(delta_schema_json())
    assert [field["name"] for field in rendered["fields"]] == table_schema().names

    def depth(type_: Any) -> int:
        if not isinstance(type_, dict):
            return 0
        inner = [depth(field["type"]) for field in type_.get("fields", [])] or [depth(type_.get("elementType"))]
        return 1 + max(inner)

    assert depth(rendered) >= 4
    assert all(field["nullable"] for field in rendered["fields"])


@pytest.mark.parametrize("kind", KINDS)
def test_duckdb_reads_the_types_that_are_rendered(kind: str) -> None:
    empty = arrow_schema(kind).empty_table()
    with duckdb.connect() as connection:
        described = connection.execute("describe select * from empty").fetchall()
    assert empty.num_rows == 0
    rendered = [duckdb_type(field.type) for field in arrow_schema(kind)]
    assert [str(row[1]).replace('"', "") for row in described] == [text.replace('"', "") for text in rendered]


def test_stamps_are_envelope_columns() -> None:
    names = {column.name for column in ENVELOPE}
    assert {*STAMPED_BY_LOG, *STAMPED_BY_RECORDER} <= names


def test_an_unknown_kind_is_named_with_near_ones() -> None:
    with pytest.raises(UnknownKindError, match="did you mean rollout_ended"):
        kind_named("rollout_end")


def test_reasons_are_named_once_and_explained() -> None:
    constants = {
        value
        for name, value in vars(reasons).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("_")
    }
    assert constants == set(reasons.REASONS)
    assert set(reasons.DEAD_LETTER_REASONS).isdisjoint(reasons.UNTRAINABLE_REASONS)
    assert set(reasons.UNTRAINABLE_REASONS) == reasons.UNTRAINABLE
    assert all(reasons.REASONS.values())
