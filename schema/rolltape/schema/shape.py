"""What Python and NumPy values a column's Arrow type stands for, worked out once per column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

_NONE: Final = type(None)
_LEAVES: Final[tuple[tuple[Callable[[pa.DataType], bool], type, str], ...]] = (
    (pt.is_string, str, "U"),
    (pt.is_integer, int, "iu"),
    (pt.is_floating, float, "f"),
    (pt.is_boolean, bool, "b"),
    (pt.is_binary, bytes, ""),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """The exact Python types of a leaf (``None`` included), or what a list or struct is made of.

    ``numpy_kinds`` are the NumPy dtype kinds that Arrow converts to ``type`` without changing their meaning.
    """

    type: pa.DataType
    leaf_types: frozenset[type] = frozenset()
    numpy_kinds: str = ""
    element: Shape | None = None
    fields: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def is_leaf_list(self) -> bool:
        """Whether the type is a list of plain values."""
        return self.element is not None and bool(self.element.leaf_types)

    def matches(self, values: Sequence[Any]) -> bool:
        """Whether every value has exactly the Python type that the column stands for, down to the leaves.

        Where it does, Arrow's own conversion is exact; where not, its inference has to be asked.
        """
        if self.leaf_types:
            return self.leaf_types.issuperset(map(type, values))
        if self.element is not None:
            present = [value for value in values if value is not None]
            return {list}.issuperset(map(type, present)) and self.element.matches(list(chain.from_iterable(present)))
        return all(value is None or (type(value) is dict and self._matches_dict(value)) for value in values)

    def _matches_dict(self, value: dict[Any, Any]) -> bool:
        for name, item in value.items():
            shape = self.fields.get(name)
            if shape is None:
                return False
            if (
                item is not None
                and type(item) not in shape.leaf_types
                and (shape.leaf_types or not shape.matches([item]))
            ):
                return False
        return True


def shape_of(type_: pa.DataType) -> Shape:
    """The shape of an Arrow type."""
    if pt.is_struct(type_):
        return Shape(type=type_, fields={field.name: shape_of(field.type) for field in type_.fields})
    if pt.is_list(type_):
        return Shape(type=type_, element=shape_of(type_.value_type))
    for is_type, python_type, kinds in _LEAVES:
        if is_type(type_):
            return Shape(type=type_, leaf_types=frozenset((python_type, _NONE)), numpy_kinds=kinds)
    return Shape(type=type_, leaf_types=frozenset((_NONE,)))
