"""Data files: one kind each, as Parquet.

Token ids are PLAIN, log-probs and other float lists BYTE_STREAM_SPLIT (PLAIN where some are null), all of it zstd
level 1: every bit pattern comes back (−0.0, NaN payloads, denormals, infinities). Top-level columns that are wholly
null are left out; readers put them back. Row groups stay small, so that one trajectory is found without reading its
neighbours.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolltape.schema.codec import conform
from rolltape.schema.render import arrow_schema
from rolltape.store.location import Location

MAX_GROUP_ROWS: Final = 256
MAX_GROUP_TOKENS: Final = 500_000
MAX_SCALAR_GROUP_ROWS: Final = 4_096
SMALL_ROWS: Final = 64

STATISTICS: Final = ("kind", "run_id", "log_topic", "log_partition", "log_offset", "trajectory_id", "group_id")


class _Leaf(NamedTuple):
    """One leaf column of a kind: its Parquet path and how it is written."""

    path: str
    is_bulk: bool
    has_dictionary: bool
    is_split: bool


def _leaf(path: str, type_: pa.DataType, in_list: bool) -> _Leaf:
    is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_)
    return _Leaf(
        path=path,
        is_bulk=in_list and not pa.types.is_string(type_),
        has_dictionary=not (in_list and is_number) and not pa.types.is_boolean(type_),
        is_split=in_list and pa.types.is_floating(type_),
    )


def _leaves(type_: pa.DataType, path: str, in_list: bool = False) -> Iterator[_Leaf]:
    if pa.types.is_struct(type_):
        for child in type_.fields:
            yield from _leaves(child.type, f"{path}.{child.name}", in_list)
    elif pa.types.is_list(type_):
        yield from _leaves(type_.value_type, f"{path}.list.element", True)
    else:
        yield _leaf(path, type_, in_list)


def _null_fields(arrays: Sequence[pa.StructArray], path: str) -> Iterator[str]:
    """Paths of the struct fields, at any depth, that hold nothing."""
    for at, child in enumerate(arrays[0].type.fields):
        children = [array.field(at) for array in arrays]
        if all(array.null_count == len(array) for array in children):
            yield f"{path}.{child.name}"
        elif pa.types.is_struct(child.type):
            yield from _null_fields(children, f"{path}.{child.name}")


def _writer_options(kind: str, table: pa.Table) -> dict[str, Any]:
    """How each leaf column of the table is encoded and compressed."""
    nulls: list[str] = []
    if kind in table.column_names and table.num_rows:
        nulls += _null_fields(table[kind].chunks, kind)
    split = [leaf.path for leaf in _leaves_of(kind) if leaf.is_split and _is_full(table, leaf.path)]
    return _options(kind, tuple(nulls), tuple(split), table.num_rows < SMALL_ROWS)


@cache
def _leaves_of(kind: str) -> tuple[_Leaf, ...]:
    return tuple(leaf for column in arrow_schema(kind) for leaf in _leaves(column.type, column.name))


@lru_cache(maxsize=1_024)
def _options(kind: str, nulls: tuple[str, ...], split: tuple[str, ...], small: bool) -> dict[str, Any]:
    """Options of a writer; columns that its table lacks do no harm.

    A compression context costs 20 µs a column and row group, a dictionary two pages: too much for a column of a few
    short values, or of none.
    """
    below = tuple(f"{path}." for path in nulls)
    compression, levels, dictionary = {}, {}, []
    for leaf in _leaves_of(kind):
        filled = leaf.path not in nulls and not leaf.path.startswith(below)
        codec = "none" if not filled else "snappy" if small and not leaf.is_bulk else "zstd"
        compression[leaf.path] = codec
        if codec == "zstd":
            levels[leaf.path] = 1
        if filled and leaf.has_dictionary and not small:
            dictionary.append(leaf.path)
    return {
        "compression": compression,
        "compression_level": levels,
        "use_dictionary": dictionary or False,
        "use_byte_stream_split": list(split),
    }


def token_column(kind: str) -> str | None:
    """The list column whose lengths say how large a row of ``kind`` is, where it has one."""
    return "token_ids" if "token_ids" in arrow_schema(kind).names else None


def row_group_ends(kind: str, table: pa.Table) -> list[int]:
    """Row numbers at which row groups end: at most 256 rows and, save for a single longer row, 0.5M tokens."""
    name = token_column(kind)
    num_rows: int = table.num_rows
    if name is None or name not in table.column_names:
        return [*range(MAX_SCALAR_GROUP_ROWS, num_rows, MAX_SCALAR_GROUP_ROWS), num_rows]
    return _group_ends(_list_ends(table[name]), num_rows)


def _list_ends(column: pa.ChunkedArray) -> np.ndarray:
    """Running number of list elements after each row, int64; null rows count none."""
    lengths = [
        np.diff(np.asarray(chunk.offsets, dtype=np.int64)) if chunk.null_count == 0 else _lengths_with_nulls(chunk)
        for chunk in column.chunks
    ]
    return np.cumsum(np.concatenate(lengths)) if lengths else np.zeros(0, np.int64)


def _lengths_with_nulls(chunk: pa.ListArray) -> np.ndarray:
    lengths: np.ndarray = chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _group_ends(token_ends: np.ndarray, num_rows: int) -> list[int]:
    ends: list[int] = []
    start = 0
    while start < num_rows:
        before = int(token_ends[start - 1]) if start else 0
        by_tokens = int(np.searchsorted(token_ends, before + MAX_GROUP_TOKENS, side="right"))
        start = min(num_rows, start + MAX_GROUP_ROWS, max(by_tokens, start + 1))
        ends.append(start)
    return ends


def drop_null_columns(table: pa.Table) -> pa.Table:
    """The table without the top-level columns that hold nothing (``kind`` always stays)."""
    num_rows: int = table.num_rows
    columns = zip(table.column_names, table.columns, strict=True)
    kept = [name for name, column in columns if column.null_count < num_rows]
    return table.select(kept)


def _is_full(table: pa.Table, path: str) -> bool:
    """Whether the leaf column has a value at every place: no nulls, no empty lists.

    parquet-java 1.12 (in Spark and in Delta Kernel) counts nulls as values of a BYTE_STREAM_SPLIT page and fails.
    """
    name, *steps = path.split(".")
    return name in table.column_names and all(_is_full_array(chunk, steps) for chunk in table[name].chunks)


def _is_full_array(array: pa.Array, steps: Sequence[str]) -> bool:
    if array.null_count:
        return False
    if not steps:
        return True
    if pa.types.is_struct(array.type):
        return _is_full_array(array.field(steps[0]), steps[1:])
    if bool(np.any(np.diff(array.offsets.to_numpy()) == 0)):
        return False
    return _is_full_array(array.flatten(), steps[2:])


def encode_file(kind: str, table: pa.Table) -> pa.Buffer:
    """The bytes of one data file that holds ``table``, all of one kind."""
    table = drop_null_columns(table)
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema, _writer_options(kind, table)) as writer:
        write_groups(writer, kind, table)
    return sink.getvalue()


def open_writer(sink: pa.NativeFile, schema: pa.Schema, options: Mapping[str, Any]) -> pq.ParquetWriter:
    """A writer of one data file; ``options`` as :func:`merged_options` gives them."""
    return pq.ParquetWriter(sink, schema, write_statistics=list(STATISTICS), store_schema=False, **options)


def write_groups(writer: pq.ParquetWriter, kind: str, table: pa.Table) -> None:
    """Write the rows of ``table`` as row groups of their own."""
    start = 0
    for end in row_group_ends(kind, table):
        writer.write_table(table.slice(start, end - start), row_group_size=max(end - start, 1))
        start = end


class Written(NamedTuple):
    """Paths of a file's leaf columns: all of them that are ``split`` (BYTE_STREAM_SPLIT), and all that hold something.

    All row groups of a file are written alike, and what holds nothing is not compressed.
    """

    split: frozenset[str]
    filled: frozenset[str]


def written_as(footer: pq.FileMetaData) -> Written:
    """How the columns of a file were written."""
    if not footer.num_row_groups:
        return Written(frozenset(), frozenset())
    columns = [footer.row_group(0).column(number) for number in range(footer.num_columns)]
    return Written(
        frozenset(column.path_in_schema for column in columns if "BYTE_STREAM_SPLIT" in column.encodings),
        frozenset(column.path_in_schema for column in columns if column.compression != "UNCOMPRESSED"),
    )


def merged_options(kind: str, sources: Sequence[Written]) -> dict[str, Any]:
    """How the columns of a file that holds the rows of several files are encoded and compressed.

    Floats are split only where they are in all of these files (see :func:`_is_full`).
    """
    filled = frozenset[str]().union(*(source.filled for source in sources))
    split = filled.intersection(*(source.split for source in sources))
    leaves = [leaf.path for leaf in _leaves_of(kind)]
    return _options(
        kind,
        tuple(path for path in leaves if path not in filled),
        tuple(path for path in leaves if path in split),
        False,
    )


def schema_of(kind: str, names: Collection[str]) -> pa.Schema:
    """The schema of a kind, of those columns alone that are named."""
    return pa.schema([field for field in arrow_schema(kind) if field.name in names])


MAX_FOOTER_BYTES: Final = 4 << 20
"""Bytes of footers, as files hold them, that are kept; parsed they take some twenty times as much memory."""


class _Footers:
    """Footers of data files that were read, newest use kept; files never change, so neither do footers."""

    def __init__(self, max_bytes: int = MAX_FOOTER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, url: str) -> pq.FileMetaData | None:
        """The footer, if it is known."""
        with self._lock:
            if url in self._kept:
                self._kept.move_to_end(url)
            return self._kept.get(url)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def put(self, url: str, footer: pq.FileMetaData) -> None:
        """Keep a footer, and forget those that were not used for longest."""
        with self._lock:
            self._drop(url)
            self._kept[url] = footer
            self._num_bytes += footer.serialized_size
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def drop(self, url: str) -> None:
        """Forget the footer of a file that the table holds no longer."""
        with self._lock:
            self._drop(url)

    def _drop(self, url: str) -> None:
        known = self._kept.pop(url, None)
        self._num_bytes -= 0 if known is None else known.serialized_size


_FOOTERS: Final = _Footers()


def forget_footers() -> None:
    """Forget what was read of data files, as a new process would not know it."""
    _FOOTERS.clear()


def forget_footer(location: Location) -> None:
    """Forget what was read of a data file that the table holds no longer."""
    _FOOTERS.drop(location.url)


def open_file(location: Location, size_bytes: int | None = None) -> pq.ParquetFile:
    """Open a data file; its footer is parsed once a process. A size that is known saves a request in object stores."""
    footer = _FOOTERS.get(location.url)
    file = pq.ParquetFile(location.open_unchanging(size_bytes), metadata=footer)
    if footer is None:
        _FOOTERS.put(location.url, file.metadata)
    return file


def groups_with_offsets(file: pq.ParquetFile, low: int, high: int) -> list[int]:
    """Row groups that may hold log offsets in [low, high)."""
    return _groups_within(file, "log_offset", low, high - 1)


def groups_with_ids(file: pq.ParquetFile, sorted_ids: Sequence[str]) -> list[int]:
    """Row groups that may hold one of the trajectory ids."""
    import bisect

    kept = []
    for group, (low, high) in enumerate(_group_ranges(file, "trajectory_id")):
        if low is None or high is None:
            kept.append(group)
            continue
        place = bisect.bisect_left(sorted_ids, low)
        if place < len(sorted_ids) and sorted_ids[place] <= high:
            kept.append(group)
    return kept


def _groups_within(file: pq.ParquetFile, column: str, low: Any, high: Any) -> list[int]:
    return [
        group
        for group, (least, most) in enumerate(_group_ranges(file, column))
        if least is None or most is None or (least <= high and most >= low)
    ]


def _group_ranges(file: pq.ParquetFile, column: str) -> Iterator[tuple[Any, Any]]:
    footer = file.metadata
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    place = names.index(column) if column in names else None
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(place).statistics if place is not None else None
        if statistics is None or not statistics.has_min_max:
            yield None, None
        else:
            yield statistics.min, statistics.max


def read_groups(
    file: pq.ParquetFile,
    kind: str,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    *,
    use_threads: bool = True,
) -> pa.Table:
    """Row groups of an open data file as a table of ``kind``'s schema, or of the columns named (in that order).

    A dotted name (``action_sampled.version_runs``) decodes that field of a struct alone; the other fields read as null.
    Files of older writers (other spellings of lists, fewer or other fields in a struct) come back in today's form.
    """
    theirs, wanted = file.schema_arrow, _wanted(kind, None if columns is None else tuple(columns))
    present = {field.name: field.type for field in theirs if field.name in wanted.types}
    if all(type_ == wanted.types[name] for name, type_ in present.items()):
        tops = wanted.columns if columns is not None else list(present)
        some = None if columns is None and len(present) == len(theirs) else _present(tops, present)
        return conform_columns(_decode(file, some, groups, use_threads), kind, columns)
    # Rewriting an older struct takes the columns beside it (see schema.upcast).
    beside = [name for name in ("token_ids", "run_epoch") if name in theirs.names and name not in present]
    table = conform(_decode(file, [*present, *beside], groups, use_threads), kind)
    return table.select(wanted.schema.names)


def _present(columns: Sequence[str], present: Mapping[str, pa.DataType]) -> list[str]:
    return [name for name in columns if name.split(".")[0] in present]


class _Wanted(NamedTuple):
    """What a read of a kind returns: the columns asked for (dotted), their schema and types by top-level name."""

    columns: tuple[str, ...]
    schema: pa.Schema
    types: dict[str, pa.DataType]


@lru_cache(maxsize=1_024)
def _wanted(kind: str, columns: tuple[str, ...] | None) -> _Wanted:
    schema = arrow_schema(kind)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in top_names(columns)])
    return _Wanted(columns or tuple(schema.names), schema, {field.name: field.type for field in schema})


def top_names(columns: Sequence[str]) -> list[str]:
    """The top-level columns of possibly dotted names, each once, in order."""
    return list(dict.fromkeys(name.split(".")[0] for name in columns))


def _decode(
    file: pq.ParquetFile, columns: Sequence[str] | None, groups: Sequence[int] | None, use_threads: bool
) -> pa.Table:
    if groups is None or len(groups) == file.num_row_groups:
        return file.read(columns=columns, use_threads=use_threads)
    return file.read_row_groups(list(groups), columns=columns, use_threads=use_threads)


def conform_columns(table: pa.Table, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
    """``table`` with the schema of ``kind``: all columns, or those named. Absent columns become null."""
    wanted = _wanted(kind, None if columns is None else tuple(columns))
    present = dict(zip(table.column_names, table.columns, strict=True))
    if any(name in wanted.types and column.type != wanted.types[name] for name, column in present.items()):
        return conform(table, kind).select(wanted.schema.names)
    return pa.Table.from_arrays(
        [present[name] if name in present else pa.nulls(table.num_rows, type_) for name, type_ in wanted.types.items()],
        schema=wanted.schema,
    )
