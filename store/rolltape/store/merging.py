"""Merging data files of one kind into one, in log order, row group by row group.

Only the places of the rows are held for all of them, and of the rest as much as a few row groups: what a merge takes
does not grow with the files. Parsed footers are the largest part of small files (some 0.4 MB each), so none is kept.
Files whose rows lie partition by partition, as committers write them, are decoded once.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.schema.errors import StoreError
from rolltape.store import parquet
from rolltape.store.lake import Lake
from rolltape.store.log_actions import FileBounds, NewFile
from rolltape.store.row_filter import rows_at
from rolltape.store.snapshot import DataFile

STREAMED_BYTES: Final = 4 << 20
"""Files that are larger together are merged row group by row group; smaller ones at once, which is quicker."""

PLACE: Final = ("log_topic", "log_partition", "log_offset")
_BUFFERED_BYTES: Final = 8 << 20
_FILES_AT_ONCE: Final = 8


def merge_files(lake: Lake, run: Sequence[DataFile]) -> NewFile:
    """Write the rows of data files of one kind to one new file, in log order.

    Raises:
        StoreError: a file does not hold as many rows as the table says; nothing is left behind.
    """
    if sum(file.size_bytes for file in run) > STREAMED_BYTES:
        return _merge_streamed(lake, run)
    kind = run[0].kind
    table = in_log_order(_rows(lake, run, kind))
    _check_number(table.num_rows, run)
    return lake.write_files({kind: table})[0]


def _check_number(num_rows: int, run: Sequence[DataFile]) -> None:
    expected = sum(file.num_rows for file in run)
    if num_rows != expected:
        raise StoreError(
            f"expected {expected} rows of {run[0].kind} in {len(run)} data files, read {num_rows}; nothing was changed"
        )


def _rows(lake: Lake, run: Sequence[DataFile], kind: str) -> pa.Table:
    """Rows of the files, from memory where this handle wrote them lately."""
    tables: list[pa.Table] = []
    rest = []
    for file in run:
        table = lake.recent.take(file.path, kind)
        if table is None:
            rest.append(file)
        else:
            tables.append(table)
    for first in range(0, len(rest), _FILES_AT_ONCE):
        some = rest[first : first + _FILES_AT_ONCE]
        tables.append(lake.read_files(some, kind))
        for file in some:
            parquet.forget_footer(lake.table.child(file.path))
    return pa.concat_tables(tables)


def in_log_order(table: pa.Table) -> pa.Table:
    """Rows by (topic, partition, offset); rows of one record keep their order."""
    order = log_order(table)
    return table if order is None else rows_at(table, order)


def log_order(table: pa.Table) -> npt.NDArray[np.int64] | None:
    """The numbers of the rows by (topic, partition, offset), equal ones as they lie; None where they lie so."""
    if len(table["log_topic"].unique()) <= 1 and len(table["log_partition"].unique()) <= 1:
        offsets = table["log_offset"].to_numpy()
        if len(offsets) < 2 or bool((offsets[1:] >= offsets[:-1]).all()):
            return None
    keys = table.select(PLACE).append_column("row", pa.array(np.arange(table.num_rows)))
    order: npt.NDArray[np.int64] = keys.sort_by([(name, "ascending") for name in keys.column_names])["row"].to_numpy()
    return order


# Row group by row group


def _merge_streamed(lake: Lake, run: Sequence[DataFile]) -> NewFile:
    kind = run[0].kind
    sources = _Sources(lake, run)
    bounds = FileBounds()
    place = lake.table.child(f"{kind}-{uuid.uuid4().hex}.parquet")
    columns, options = sources.columns, parquet.merged_options(kind, sources.written)
    with place.writing_unique() as sink:
        with parquet.open_writer(sink, columns, options) as writer:
            for table in _whole_groups(kind, sources.rows()):
                parquet.write_groups(writer, kind, table.select(columns.names))
                bounds.add(table)
        num_bytes = sink.tell()
        _check_number(bounds.num_rows, run)
    return bounds.describe(place.name, num_bytes, kind)


class _Sources:
    """The files of a run, each opened when a row group of it is needed, and one at a time."""

    def __init__(self, lake: Lake, run: Sequence[DataFile]) -> None:
        """Look at how the files are written, and read the places of the rows."""
        self._lake = lake
        self._run = run
        self._kind = run[0].kind
        self.written: list[parquet.Written] = []
        names: set[str] = set()
        places = []
        starts = [0]
        self._groups: list[tuple[int, int]] = []
        for number, data_file in enumerate(run):
            # What is kept in memory of it would be kept in vain.
            lake.recent.discard(data_file.path)
            with self._open(data_file) as file:
                names.update(file.schema_arrow.names)
                places.append(parquet.read_groups(file, self._kind, PLACE, use_threads=False))
                self.written.append(parquet.written_as(file.metadata))
                for group in range(file.num_row_groups):
                    self._groups.append((number, group))
                    starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
        self.columns = parquet.schema_of(self._kind, names)
        self._starts = starts
        self._places = pa.concat_tables(places)

    @contextlib.contextmanager
    def _open(self, data_file: DataFile) -> Iterator[pq.ParquetFile]:
        place = self._lake.table.child(data_file.path)
        with parquet.open_file(place, data_file.size_bytes) as file:
            yield file
        parquet.forget_footer(place)

    def rows(self) -> Iterator[pa.Table]:
        """All rows in log order, in tables of rows of one row group each."""
        order = log_order(self._places)
        if order is None:
            order = np.arange(self._places.num_rows)
        groups = np.searchsorted(np.array(self._starts), order, side="right") - 1
        edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(order)]
        newest: tuple[int, pa.Table] | None = None
        for first, end in itertools.pairwise(edges):
            group = int(groups[first])
            if newest is None or newest[0] != group:
                newest = None
                newest = (group, self._decoded(group))
            yield _picked(newest[1], order[first:end] - self._starts[group])

    def _decoded(self, group: int) -> pa.Table:
        number, at = self._groups[group]
        with self._open(self._run[number]) as file:
            return parquet.read_groups(file, self._kind, None, [at], use_threads=False)


def _picked(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """The rows of a row group; a copy where they are few of it, as a slice would keep all of it in memory."""
    first, last = int(rows[0]), int(rows[-1])
    is_slice = last - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return table.slice(first, len(rows)) if is_slice and 2 * len(rows) > table.num_rows else rows_at(table, rows)


def _whole_groups(kind: str, parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables that end where row groups of one large table would end."""
    waiting: list[pa.Table] = []
    num_bytes = 0
    for part in parts:
        waiting.append(part)
        num_bytes += part.nbytes
        if num_bytes < _BUFFERED_BYTES:
            continue
        table = pa.concat_tables(waiting)
        ends = parquet.row_group_ends(kind, table)
        if len(ends) > 1:
            yield table.slice(0, ends[-2])
            table = table.slice(ends[-2])
        waiting, num_bytes = [table], table.nbytes
    if waiting:
        yield pa.concat_tables(waiting)
