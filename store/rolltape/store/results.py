"""Results of a query, in the form that the reader works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from rolltape.schema.errors import RolltapeError, SqlError
from rolltape.store.duck import Relation, to_arrow

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from rolltape.store.workspace import Workspace


class QueryResult:
    """The answer to one SELECT. It runs when its rows are first asked for, and once.

    Integer sums come as int64 where they fit, else as the exact ``decimal128(38, 0)``: never as floats.
    """

    def __init__(self, workspace: Workspace, relation: Relation, *, hidden: str = "") -> None:
        self._workspace = workspace  # keeps the session with its views alive
        self._relation = relation
        self._hidden = hidden
        self._table: pa.Table | None = None

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._relation.columns)

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table.

        Raises:
            SqlError: the statement failed while it ran.
        """
        if self._table is None:
            try:
                self._table = to_arrow(self._relation)
            except RolltapeError as error:
                raise without_place(error, self._hidden) from None
        return self._table

    def polars(self) -> pl.DataFrame:
        """The rows as a Polars frame (extra ``frames``)."""
        import polars as pl

        return cast("pl.DataFrame", pl.from_arrow(self.arrow()))

    def pandas(self) -> pd.DataFrame:
        """The rows as a pandas frame (extra ``frames``); integers with nulls stay integers."""
        import pandas as pd

        nullable = {
            pa.int8(): pd.Int8Dtype(),
            pa.int16(): pd.Int16Dtype(),
            pa.int32(): pd.Int32Dtype(),
            pa.int64(): pd.Int64Dtype(),
            pa.uint8(): pd.UInt8Dtype(),
            pa.uint16(): pd.UInt16Dtype(),
            pa.uint32(): pd.UInt32Dtype(),
            pa.uint64(): pd.UInt64Dtype(),
            pa.bool_(): pd.BooleanDtype(),
        }
        return cast("pd.DataFrame", self.arrow().to_pandas(types_mapper=nullable.get))

    def relation(self) -> Relation:
        """The unfetched DuckDB relation, to build on; it stays inside the locked session."""
        return self._relation

    def rows(self) -> list[dict[str, Any]]:
        """The rows as dictionaries; for small answers."""
        return cast("list[dict[str, Any]]", self.arrow().to_pylist())


def without_place(error: Exception, hidden: str) -> SqlError:
    """``error`` as a SqlError whose message does not show the local path ``hidden``."""
    text = str(error)
    return SqlError(text.replace(hidden, "<lake>") if hidden else text)
