"""Where the flat names of a kind lie in its record: at the top, or inside the kind's own struct.

Callers name envelope columns, token columns and the kind's own fields side by side. The mapping is computed once per
kind, since a single event must be built in well under a millisecond.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

import pyarrow as pa

from rolltape.schema.columns import Column
from rolltape.schema.errors import ValidationError
from rolltape.schema.kinds import Kind, kind_named
from rolltape.schema.render import arrow_schema, columns_of_kind
from rolltape.schema.shape import Shape, shape_of

_SHARED_BLANK_ROWS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """One flat name: its spec, and its index at the top or (``in_struct``) among the struct's children."""

    spec: Column
    shape: Shape
    index: int
    in_struct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One kind's record: ``places`` by flat name, ``top`` specs before the struct column, ``children`` in it."""

    kind: Kind
    schema: pa.Schema
    top: tuple[Column, ...]
    children: tuple[Column, ...]
    child_fields: tuple[pa.Field, ...]
    places: Mapping[str, Place]

    def place(self, name: str) -> Place:
        """The place of a flat name.

        Raises:
            ValidationError: the kind has no such column; the message lists near ones.
        """
        try:
            return self.places[name]
        except KeyError:
            near = difflib.get_close_matches(name, self.places, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValidationError(f"{self.kind.name} has no column {name!r}{hint}") from None


@cache
def layout_of(kind_name: str) -> Layout:
    """The layout of one kind.

    Raises:
        UnknownKindError: no kind has this name.
    """
    kind = kind_named(kind_name)
    *top, _ = columns_of_kind(kind)
    places = {
        spec.name: Place(spec=spec, shape=shape_of(spec.type), index=at, in_struct=in_struct)
        for in_struct, specs in ((False, top), (True, kind.columns))
        for at, spec in enumerate(specs)
    }
    return Layout(
        kind=kind,
        schema=arrow_schema(kind_name),
        top=tuple(top),
        children=kind.columns,
        child_fields=tuple(spec.field for spec in kind.columns),
        places=MappingProxyType(places),
    )


def blank_columns(kind_name: str, num_rows: int) -> tuple[list[pa.Array], list[pa.Array]]:
    """All columns of a kind as nulls: those at the top, and the children of the struct; the lists are the caller's.

    The arrays are shared between calls where they are short, since arrays are immutable.
    """
    top, children = (_shared_blank if num_rows <= _SHARED_BLANK_ROWS else _blank)(kind_name, num_rows)
    return list(top), list(children)


def _blank(kind_name: str, num_rows: int) -> tuple[tuple[pa.Array, ...], tuple[pa.Array, ...]]:
    layout = layout_of(kind_name)
    top = tuple(pa.nulls(num_rows, spec.type) for spec in layout.top)
    return top, tuple(pa.nulls(num_rows, spec.type) for spec in layout.children)


_shared_blank: Final = lru_cache(maxsize=512)(_blank)


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """One column of a batch of one kind by its flat name (the batch has the kind's own schema)."""
    layout = layout_of(batch.schema.field(batch.num_columns - 1).name)
    place = layout.place(name)
    return batch.column(batch.num_columns - 1).field(place.index) if place.in_struct else batch.column(place.index)


class Columns(NamedTuple):
    """All columns of a batch of one kind: those at the top, and the children of its struct, nulls applied."""

    top: tuple[pa.Array, ...]
    children: tuple[pa.Array, ...]


def columns_of(batch: pa.RecordBatch) -> Columns:
    """All columns of a batch that has a kind's own schema; asked again for the same batch, the same arrays.

    Asking Arrow for 50 columns costs as much as validating them. A batch is built, validated and encoded in a row, so
    the columns of the newest batch are remembered for as long as that batch lives.
    """
    remembered = _newest[0]
    if remembered is not None and remembered[0]() is batch:
        return remembered[1]
    *top, struct = batch.to_struct_array().flatten()
    return _remember(batch, Columns(tuple(top), tuple(struct.flatten())))


def assemble(layout: Layout, top: list[pa.Array], children: list[pa.Array]) -> pa.RecordBatch:
    """A record batch of one kind from all its columns, in the order of the specs."""
    struct = pa.StructArray.from_arrays(children, fields=list(layout.child_fields))
    batch = pa.RecordBatch.from_arrays([*top, struct], schema=layout.schema)
    _remember(batch, Columns(tuple(top), tuple(children)))
    return batch


_newest: list[tuple[weakref.ref[pa.RecordBatch], Columns] | None] = [None]


def _remember(batch: pa.RecordBatch, columns: Columns) -> Columns:
    _newest[0] = (weakref.ref(batch, _forget), columns)
    return columns


def _forget(reference: weakref.ref[pa.RecordBatch]) -> None:
    remembered = _newest[0]
    if remembered is not None and remembered[0] is reference:
        _newest[0] = None
