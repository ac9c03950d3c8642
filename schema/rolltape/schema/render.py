"""Rendering column specs: Arrow, Delta, DuckDB and the documentation table, all from the same specs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import pyarrow as pa

from rolltape.schema.columns import Column
from rolltape.schema.envelope import ENVELOPE, EXTENSIONS, TOKEN_COLUMNS
from rolltape.schema.kinds import KINDS, Kind, kind_named

_TOKEN_SPECS: Final = {spec.name: spec for spec in TOKEN_COLUMNS}

_DELTA_PRIMITIVE: Final = {
    pa.string(): "string",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.timestamp("us", tz="UTC"): "timestamp",
}
_DUCKDB_PRIMITIVE: Final = {
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}


def columns_of_kind(kind: Kind) -> tuple[Column, ...]:
    """Specs of the columns that a record of ``kind`` has: envelope, its token columns, extensions, its struct."""
    struct = Column(name=kind.name, type=kind.struct_type, doc=kind.doc)
    return (*ENVELOPE, *(_TOKEN_SPECS[name] for name in kind.tokens), EXTENSIONS, struct)


@cache
def arrow_schema(kind_name: str) -> pa.Schema:
    """Arrow schema of one kind's records: envelope, its token columns, extensions, its struct column."""
    return pa.schema([spec.field for spec in columns_of_kind(kind_named(kind_name))])


@cache
def table_schema() -> pa.Schema:
    """Arrow schema of the ``events`` table: envelope, shared token columns, extensions, one struct per kind."""
    structs = [pa.field(kind.name, kind.struct_type) for kind in KINDS.values()]
    return pa.schema([spec.field for spec in (*ENVELOPE, *TOKEN_COLUMNS, EXTENSIONS)] + structs)


def _delta_type(type_: pa.DataType) -> Any:
    if pa.types.is_struct(type_):
        return {"type": "struct", "fields": [_delta_field(field) for field in type_.fields]}
    if pa.types.is_list(type_):
        return {"type": "array", "elementType": _delta_type(type_.value_type), "containsNull": True}
    return _DELTA_PRIMITIVE[type_]


def _delta_field(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, "type": _delta_type(field.type), "nullable": True, "metadata": {}}


def delta_schema_json(schema: pa.Schema | None = None) -> str:
    """The Delta protocol's JSON schema string of ``schema`` (by default of the ``events`` table)."""
    fields = table_schema() if schema is None else schema
    return json.dumps({"type": "struct", "fields": [_delta_field(field) for field in fields]})


def duckdb_type(type_: pa.DataType) -> str:
    """The DuckDB type that an Arrow type of the specs reads as."""
    if pa.types.is_struct(type_):
        return "STRUCT(" + ", ".join(f'"{f.name}" {duckdb_type(f.type)}' for f in type_.fields) + ")"
    if pa.types.is_list(type_):
        return duckdb_type(type_.value_type) + "[]"
    return _DUCKDB_PRIMITIVE[type_]
