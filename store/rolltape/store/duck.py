"""DuckDB, locked down: an in-memory database that sees only what is registered (design §11).

The only module that imports ``duckdb``. External access is off, extensions neither install nor load, there is no
temporary directory (that folder alone would let a ``COPY … TO`` through), Python variables are not looked up, and the
configuration is locked before the first statement. Data come in as Arrow tables or datasets, which reach their files
through ``pyarrow.fs``: DuckDB itself never opens one.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from rolltape.schema.errors import SqlError

Relation = duckdb.DuckDBPyRelation

_LOCKED: Final[dict[str, str | bool | int | float | list[str]]] = {
    "enable_external_access": "false",
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}

# Rows of one batch of a result: 32-bit list offsets then hold a quarter of a million tokens a row.
_BATCH_ROWS: Final = 8_192


class Session:
    """One locked in-memory database.

    >>> session = Session()
    >>> session.register("numbers", pa.table({"n": [1, 2]}))
    >>> session.relation("SELECT sum(n) FROM numbers").fetchall()
    [(3,)]
    """

    def __init__(self) -> None:
        self._connection = duckdb.connect(":memory:", config=_LOCKED)
        self._connection.execute("SET TimeZone = 'UTC'")
        self._connection.execute("SET lock_configuration = true")
        self._sources: dict[str, pa.Table | ds.Dataset] = {}

    def register(self, name: str, source: pa.Table | ds.Dataset) -> None:
        """Make ``source`` readable as the table ``name``; nothing is copied or read yet."""
        self._sources[name] = source
        self._connection.register(name, source)

    def create_view(self, name: str, select: str) -> None:
        """Define the view ``name``. ``select`` is trusted text of this package, never a user's."""
        self._define(f"CREATE OR REPLACE VIEW {quoted(name)} AS {select}")

    def keep(self, name: str, select: str) -> None:
        """Compute ``select`` (trusted text of this package) once and keep its rows as the table ``name``."""
        self._define(f"CREATE TABLE {quoted(name)} AS {select}")

    def relation(self, select: str) -> Relation:
        """Bind ``select``; it runs when its rows are asked for.

        Raises:
            SqlError: it does not parse or bind.
        """
        try:
            return self._connection.sql(select)
        except duckdb.Error as error:
            raise SqlError(str(error)) from error

    def table(self, select: str) -> pa.Table:
        """Run ``select`` and return its rows."""
        return to_arrow(self.relation(select))

    def _define(self, statement: str) -> None:
        try:
            self._connection.execute(statement)
        except duckdb.Error as error:
            raise SqlError(str(error)) from error


def to_arrow(relation: Relation) -> pa.Table:
    """The rows of ``relation``. DuckDB's HUGEINT (the type of its integer sums) becomes int64 where all values fit.

    Raises:
        SqlError: the statement failed while it ran.
    """
    try:
        table = relation.to_arrow_table(_BATCH_ROWS)
    except duckdb.Error as error:
        raise SqlError(str(error)) from error
    for position, type_ in enumerate(relation.types):
        if str(type_) == "HUGEINT":
            column = table.column(position)
            try:
                column = column.cast(pa.int64())
            except pa.ArrowInvalid:
                continue  # beyond int64: the exact decimal128(38, 0) stays, never a float
            table = table.set_column(position, table.field(position).name, column)
    return table


def syntax_tree(sql: str) -> list[dict[str, Any]]:
    """DuckDB's own parse of ``sql``: the root node of each statement.

    Raises:
        SqlError: it does not parse; ``statement_kind`` tells a parsed statement that is no SELECT.
    """
    connection = _parser()
    row = connection.execute("SELECT json_serialize_sql($sql::VARCHAR)", {"sql": sql}).fetchone()
    try:
        parsed: dict[str, Any] = json.loads(row[0]) if row else {"error": True, "error_message": "no answer"}
    except RecursionError:
        raise SqlError("expected a statement of ordinary depth, got expressions nested by the hundred") from None
    if parsed["error"]:
        raise SqlError(f"expected one SELECT, got text that does not parse as one: {parsed['error_message']}")
    return [statement["node"] for statement in parsed["statements"]]


def statement_kinds(sql: str) -> list[str]:
    """The kind of each statement in ``sql`` (``SELECT``, ``COPY``, ``ATTACH`` …) as DuckDB's parser names it.

    Raises:
        SqlError: it does not parse.
    """
    try:
        return [statement.type.name for statement in _parser().extract_statements(sql)]
    except duckdb.Error as error:
        raise SqlError(str(error)) from error


def quoted(name: str) -> str:
    """``name`` as a SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """``value`` as a SQL string."""
    return "'" + value.replace("'", "''") + "'"


@cache
def _parser_database() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(":memory:", config=_LOCKED)


def _parser() -> duckdb.DuckDBPyConnection:
    return _parser_database().cursor()  # a cursor each, since one connection is not safe across threads
