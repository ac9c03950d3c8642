"""What validation found: at most one refusal a row, and the columns of a batch by flat name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.schema.align import list_parts
from rolltape.schema.layout import Layout, columns_of, layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A row that breaks its spec: a reason of :mod:`rolltape.schema.reasons`, what was expected and what came."""

    row: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """One list column: ``offsets`` (int, ``[rows + 1]``, from 0), child ``values``, which rows are ``valid``."""

    name: str
    offsets: npt.NDArray[np.integer]
    values: pa.Array
    valid: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Elements of each row; 0 where the row is null. int64 ``[rows]``."""
        return np.where(self.valid, np.diff(self.offsets).astype(np.int64), 0)

    def rows_of(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row that each of ``elements`` (indices into ``values``) belongs to; elements under nulls left out."""
        rows = np.searchsorted(self.offsets, elements, side="right") - 1
        return rows[self.valid[rows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Collects refusals over one batch; the first reason found for a row stays."""

    layout: Layout
    batch: pa.RecordBatch
    top: Sequence[pa.Array]
    children: Sequence[pa.Array]
    refusals: dict[int, Refusal] = field(default_factory=dict)
    lists: dict[str, TokenList | None] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Findings:
        """Findings over a batch that has a kind's own schema."""
        layout = layout_of(batch.schema.field(batch.num_columns - 1).name)
        top, children = columns_of(batch)
        return cls(layout=layout, batch=batch, top=top, children=children)

    @property
    def kind(self) -> str:
        """Name of the batch's kind."""
        return self.layout.kind.name

    def column(self, name: str) -> pa.Array:
        """A column by its flat name."""
        place = self.layout.place(name)
        return (self.children if place.in_struct else self.top)[place.index]

    def present(self, name: str) -> pa.Array | None:
        """A column by its flat name, or ``None`` where it is null in every row."""
        array = self.column(name)
        return None if array.null_count == len(array) else array

    def token_list(self, name: str) -> TokenList | None:
        """A list column by its flat name, or ``None`` where it is null in every row."""
        if name not in self.lists:
            array = self.present(name)
            self.lists[name] = None if array is None else _token_list(name, array)
        return self.lists[name]

    def refuse(self, rows: npt.NDArray[np.integer], reason: str, expected: str, came: Any) -> None:
        """Refuse ``rows``: ``expected`` says what was, ``came`` is a text, or what holds one value for each row."""
        for row in dict.fromkeys(rows.tolist()):
            if row not in self.refusals:
                got = came if isinstance(came, str) else came[row]
                detail = f"{self.kind} row {row}: expected {expected}, got {got}"
                self.refusals[row] = Refusal(row=row, reason=reason, detail=detail)


def _token_list(name: str, array: pa.ListArray) -> TokenList:
    offsets, values = list_parts(array)
    return TokenList(name=name, offsets=offsets, values=values, valid=valid_mask(array))


def valid_mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Which rows are not null. bool ``[rows]``."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    mask: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return mask


def integers(array: pa.Array) -> npt.NDArray[np.int64]:
    """An integer array as int64, nulls as −1: zero-copy where it has neither nulls nor another width."""
    filled = array.fill_null(-1) if array.null_count else array
    numbers: npt.NDArray[np.int64] = filled.to_numpy().astype(np.int64, copy=False)
    return numbers
