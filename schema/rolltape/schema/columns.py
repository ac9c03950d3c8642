"""Column specs: what one column of the tape is, written once and rendered many times.

A spec names a column, its Arrow type and its meaning. Arrow schemas, the Delta schema, DuckDB types and
the documentation table are all rendered from it (:mod:`rolltape.schema.render`), so they cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

STRING: Final = pa.string()
BINARY: Final = pa.binary()
BOOL: Final = pa.bool_()
INT32: Final = pa.int32()
INT64: Final = pa.int64()
FLOAT32: Final = pa.float32()
FLOAT64: Final = pa.float64()
TIMESTAMP_US: Final = pa.timestamp("us", tz="UTC")


def list_of(element: pa.DataType) -> pa.ListType:
    """A list whose child is called ``element``, as Parquet and Delta call it."""
    return pa.list_(pa.field("element", element))


def struct_of(**fields: pa.DataType) -> pa.StructType:
    """A struct of nullable fields in the order given."""
    return pa.struct([pa.field(name, type_) for name, type_ in fields.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of an event.

    ``unit`` is empty for ids, names and counts. ``nullable`` says whether a valid event may leave it null. ``choices``
    lists the only texts that are valid (empty: any text); ``minimum`` is the smallest valid number.

    >>> Column(name="latency_s", type=FLOAT64, doc="time until the answer", unit="s").field
    pyarrow.Field<latency_s: double>
    """

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = True
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None

    @property
    def field(self) -> pa.Field:
        """The Arrow field that this spec renders to.

        Storage is always nullable: a table of many kinds reads absent columns as null. ``nullable`` is validation's.
        """
        return pa.field(self.name, self.type)


def column(
    name: str,
    type_: pa.DataType,
    doc: str,
    *,
    required: bool = False,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
) -> Column:
    """Short form of :class:`Column` for the tables of specs; ``required`` columns may not be null."""
    return Column(name=name, type=type_, doc=doc, nullable=not required, unit=unit, choices=choices, minimum=minimum)
