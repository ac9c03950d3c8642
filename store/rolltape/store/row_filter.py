"""Row filters: which rows of a data file a read lets through, decided as far as possible without decoding them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rolltape.schema.cursor import Cursor, Partition
from rolltape.store import parquet
from rolltape.store.snapshot import DataFile

# Below this many runs of wanted rows, slices of the table are cheaper than a copy of its tokens.
MAX_SLICES: Final = 64

# What int32 offsets can address.
MAX_LIST_VALUES: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """Conditions on rows; None lets everything through.

    ``since`` and ``as_of`` bound log positions: a row passes when since ≤ its position < as_of.
    """

    as_of: Cursor | None = None
    since: Cursor | None = None
    run_id: str | None = None
    trajectory_ids: Collection[str] | None = None

    @cached_property
    def sorted_ids(self) -> list[str]:
        """The trajectory ids, sorted once for all files."""
        return sorted(self.trajectory_ids or ())

    @cached_property
    def id_set(self) -> pa.StringArray:
        """The trajectory ids as an array."""
        return pa.array(self.sorted_ids, pa.string())

    def columns_with(self, columns: Sequence[str] | None) -> Sequence[str] | None:
        """The columns to decode so that the conditions can be checked: ``columns`` itself where they suffice."""
        if columns is None:
            return None
        needed: list[str] = []
        if self.as_of is not None or self.since is not None:
            needed += ["log_topic", "log_partition", "log_offset"]
        if self.run_id is not None:
            needed.append("run_id")
        if self.trajectory_ids is not None:
            needed.append("trajectory_id")
        missing = [name for name in needed if name not in columns]
        return [*columns, *missing] if missing else columns

    def row_groups(self, file: pq.ParquetFile, data_file: DataFile) -> list[int]:
        """Row groups of the file that may hold such rows."""
        groups = set(range(file.num_row_groups))
        if len(groups) == 1:
            return [0]
        bounds = self._offset_bounds(data_file)
        if bounds is not None:
            groups &= set(parquet.groups_with_offsets(file, *bounds))
        if self.trajectory_ids is not None:
            groups &= set(parquet.groups_with_ids(file, self.sorted_ids))
        return sorted(groups)

    def apply(self, table: pa.Table, data_file: DataFile) -> pa.Table:
        """The rows of ``table`` (decoded from ``data_file``) that pass; slices of it wherever possible."""
        table = self._within_positions(table, data_file)
        if self.run_id is not None and not (data_file.min_run_id == data_file.max_run_id == self.run_id):
            table = rows_where(table, _to_mask(pc.equal(table["run_id"], self.run_id)))
        if self.trajectory_ids is not None and table.num_rows:
            table = rows_where(table, _to_mask(pc.is_in(table["trajectory_id"], value_set=self.id_set)))
        return table

    def _offset_bounds(self, data_file: DataFile) -> tuple[int, int] | None:
        """Log offsets [low, high) that pass, where the file is of one partition and not wholly inside them."""
        place, last = data_file.partition, data_file.max_log_offset
        if place is None or last is None or data_file.min_log_offset is None:
            return None
        low = self.since[place] if self.since is not None else 0
        high = self.as_of[place] if self.as_of is not None else last + 1
        return None if low <= data_file.min_log_offset and last < high else (low, high)

    def _within_positions(self, table: pa.Table, data_file: DataFile) -> pa.Table:
        if (self.as_of is None and self.since is None) or table.num_rows == 0:
            return table
        if data_file.partition is None:
            return rows_where(table, self._position_mask(table))
        bounds = self._offset_bounds(data_file)
        if bounds is None:
            return table
        offsets = table["log_offset"].to_numpy()
        return rows_where(table, (offsets >= bounds[0]) & (offsets < bounds[1]))

    def _position_mask(self, table: pa.Table) -> np.ndarray:
        """Which rows lie between the cursors, for a file of several partitions."""
        passes = np.zeros(table.num_rows, bool)
        offsets = table["log_offset"].to_numpy()
        topics, partitions = table["log_topic"], table["log_partition"].to_numpy()
        for topic in pc.unique(topics).to_pylist():
            of_topic = _to_mask(pc.equal(topics, topic))
            for number in np.unique(partitions[of_topic]):
                place = Partition(topic, int(number))
                inside = of_topic & (partitions == number)
                if self.since is not None:
                    inside &= offsets >= self.since[place]
                if self.as_of is not None:
                    inside &= offsets < self.as_of[place]
                passes |= inside
        return passes


def _to_mask(values: pa.ChunkedArray) -> np.ndarray:
    mask: np.ndarray = pc.fill_null(values, False).to_numpy()
    return mask


def rows_where(table: pa.Table, mask: np.ndarray) -> pa.Table:
    """The rows where the mask holds, in order; without a copy where they form few runs."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return table.slice(0, 0)
    if len(starts) == 1:
        return table.slice(int(starts[0]), int(ends[0] - starts[0]))
    if len(starts) <= MAX_SLICES:
        return pa.concat_tables([table.slice(int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)])
    return table.filter(pa.array(mask))


def rows_at(table: pa.Table, order: np.ndarray) -> pa.Table:
    """The rows at these indices, in this order.

    A ``take`` joins chunks first, and lists of more than 2³¹ values in all overflow their offsets there: such a table
    is put together from slices.
    """
    if _num_list_values(table) <= MAX_LIST_VALUES:
        return table.take(pa.array(order))
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    starts, ends = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(order)]))
    return pa.concat_tables([table.slice(int(order[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)])


def _num_list_values(table: pa.Table) -> int:
    """Elements of the longest top-level list column, over all of its chunks."""
    return max(
        (
            sum(chunk.offsets[-1].as_py() - chunk.offsets[0].as_py() for chunk in column.chunks)
            for column in table.columns
            if pa.types.is_list(column.type)
        ),
        default=0,
    )
