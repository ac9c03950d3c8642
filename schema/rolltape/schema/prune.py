"""Leaving out what is wholly null before a record is encoded.

A record of sixteen short events would otherwise be mostly the metadata of empty columns. Columns, the children of the
kind's struct and the fields of nested structs are left out where no row has a value; reading conforms them back. The
types of what remains are looked up by what is present, since making Arrow types costs more than leaving them out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.types as pt

from rolltape.schema.align import list_parts, rebuild_list, rebuild_struct
from rolltape.schema.layout import columns_of, layout_of

_WHOLE: Final = 0
_UNCACHED: Final = -1
_MAX_VARIANTS: Final = 256
_REMEMBERED_ROWS: Final = 1024

Made = TypeVar("Made")


class Part(NamedTuple):
    """An array without its null parts, its field, and the number of that field among the variants of its node."""

    array: pa.Array
    field: pa.Field
    variant: int


class Variants(Generic[Made]):
    """What was made for each set of present fields: at most :data:`_MAX_VARIANTS`, numbered from 1."""

    __slots__ = ("_made", "_numbers")

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, int], ...], tuple[int, Made]] = {}
        self._numbers = itertools.count(1)

    def get(self, parts: Sequence[tuple[int, Part]], make: Callable[[], Made]) -> tuple[int, Made]:
        """The number and the thing for ``parts`` (index and part of each present field), made at its first use."""
        key = tuple((at, part.variant) for at, part in parts)
        if (found := self._made.get(key)) is not None:
            return found
        if len(self._made) >= _MAX_VARIANTS or any(variant == _UNCACHED for _, variant in key):
            return _UNCACHED, make()
        # Numbers from a counter and one winner for a key: two threads never give one number to two sets of fields.
        return self._made.setdefault(key, (next(self._numbers), make()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One field of a kind's schema; ``children`` are the fields of its struct (or of its list's struct)."""

    field: pa.Field
    is_list: bool
    children: tuple[Node, ...]
    variants: Variants[pa.Field] = dataclasses.field(default_factory=Variants)
    newest: list[tuple[pa.StructArray, Part]] = dataclasses.field(default_factory=list)

    def prune(self, array: pa.Array) -> Part:
        """``array``, of which some row is not null, without its null parts."""
        if not self.children:
            return Part(array, self.field, _WHOLE)
        if self.is_list:
            return self._prune_list(array)
        # A configuration is one array for all batches that name it, so it is pruned once.
        for known, part in tuple(self.newest):
            if known is array:
                return part
        part = self.prune_struct(array, array.flatten())
        if len(array) <= _REMEMBERED_ROWS:
            self.newest[:] = [(array, part)]
        return part

    def prune_struct(self, array: pa.StructArray, children: Sequence[pa.Array]) -> Part:
        """A struct of ``children`` without its null parts; whole where it has no others."""
        kept = self._kept(children)
        if not kept or self._is_whole(kept):
            return Part(array, self.field, _WHOLE)
        struct = _struct_of(array, kept)
        variant, field_ = self.variants.get(kept, lambda: pa.field(self.field.name, struct.type))
        return Part(struct, field_, variant)

    def _prune_list(self, array: pa.ListArray) -> Part:
        offsets, values = list_parts(array)
        kept = self._kept(values.flatten()) if len(values) else []
        if not kept or self._is_whole(kept):
            return Part(array, self.field, _WHOLE)
        struct = _struct_of(values, kept)
        variant, field_ = self.variants.get(
            kept, lambda: pa.field(self.field.name, pa.list_(pa.field("element", struct.type)))
        )
        return Part(rebuild_list(array, offsets, struct, field_.type), field_, variant)

    def _kept(self, arrays: Sequence[pa.Array]) -> list[tuple[int, Part]]:
        return _present_parts(self.children, arrays)

    def _is_whole(self, kept: Sequence[tuple[int, Part]]) -> bool:
        return len(kept) == len(self.children) and all(part.variant == _WHOLE for _, part in kept)


def _present_parts(nodes: Sequence[Node], arrays: Sequence[pa.Array]) -> list[tuple[int, Part]]:
    """Index and pruned array of each field that is not null in every row."""
    num_rows = len(arrays[0]) if arrays else 0
    # Most fields are null in every row: they are told by their count alone.
    return [
        (at, node.prune(array))
        for at, (node, array) in enumerate(zip(nodes, arrays, strict=True))
        if array.null_count != num_rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pruner:
    """All columns of one kind's records, and the schemas that pruned records of it have."""

    nodes: tuple[Node, ...]
    schemas: Variants[pa.Schema] = dataclasses.field(default_factory=Variants)

    def prune(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """``batch`` without what is null in every row, the kind's struct included where all its fields are null."""
        *tops, own = self.nodes
        top, children = columns_of(batch)
        kept = _present_parts(tops, top)
        if any(array.null_count != batch.num_rows for array in children):
            kept.append((len(tops), own.prune_struct(batch.column(len(tops)), children)))
        _, schema = self.schemas.get(kept, lambda: pa.schema([part.field for _, part in kept]))
        return pa.RecordBatch.from_arrays([part.array for _, part in kept], schema=schema)


@cache
def pruner_of(kind_name: str) -> Pruner:
    """The pruner of one kind."""
    return Pruner(nodes=tuple(_node(field) for field in layout_of(kind_name).schema))


def _node(field_: pa.Field) -> Node:
    is_list = pt.is_list(field_.type)
    struct = field_.type.value_type if is_list else field_.type
    children = tuple(_node(child) for child in struct.fields) if pt.is_struct(struct) else ()
    return Node(field=field_, is_list=is_list, children=children)


def _struct_of(parent: pa.StructArray, kept: Sequence[tuple[int, Part]]) -> pa.StructArray:
    return rebuild_struct(parent, [part.array for _, part in kept], [part.field for _, part in kept])
