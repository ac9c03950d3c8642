"""Where views take their rows from: event tables in memory, or a lake's data files, unread until needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from rolltape.schema.cursor import Cursor
from rolltape.schema.envelope import ENVELOPE, TOKEN_COLUMNS
from rolltape.schema.kinds import KINDS
from rolltape.schema.render import arrow_schema
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.remote_dataset import RemoteDataset
from rolltape.store.snapshot import DataFile, Snapshot

Rows: TypeAlias = "pa.Table | ds.Dataset"

EVENTS_SCHEMA: Final = pa.schema([spec.field for spec in (*ENVELOPE, *TOKEN_COLUMNS)])

# Bounds that the data files carry, by column: conditions on these skip whole files without opening them.
_BOUNDED: Final = ("log_topic", "log_partition", "log_offset", "run_id", "trajectory_id")
_NEVER_NULL: Final = ("log_topic", "log_partition", "log_offset", "run_id")


class EventSource(Protocol):
    """Events of one state of a tape. Rows at or after the cursor may be among them: views filter by position."""

    def key(self) -> tuple[str, int] | None:
        """What identifies the state, for caches; None: do not cache."""
        ...

    def kind(self, kind: str, as_of: Cursor | None) -> Rows:
        """Rows of one kind with the columns of ``arrow_schema(kind)``."""
        ...

    def events(self, as_of: Cursor | None) -> Rows:
        """Rows of all kinds with the columns of ``EVENTS_SCHEMA``."""
        ...

    def read(
        self,
        kinds: Iterable[str],
        *,
        as_of: Cursor | None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
    ) -> dict[str, pa.Table]:
        """Rows before the cursor, conformed, by kind; kinds without rows may be left out."""
        ...


class TableSource:
    """Event tables in memory, by kind, each with the columns of ``arrow_schema(kind)``."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        self._tables = dict(tables)

    def key(self) -> tuple[str, int] | None:
        """Tables in memory are not cached."""
        return None

    def kind(self, kind: str, as_of: Cursor | None) -> Rows:
        """The table of the kind, or an empty one."""
        del as_of
        return self._tables.get(kind, arrow_schema(kind).empty_table())

    def events(self, as_of: Cursor | None) -> Rows:
        """All tables as one."""
        del as_of
        return pa.concat_tables([EVENTS_SCHEMA.empty_table(), *map(_as_events, self._tables.values())])

    def read(
        self,
        kinds: Iterable[str],
        *,
        as_of: Cursor | None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
    ) -> dict[str, pa.Table]:
        """The tables, filtered."""
        condition = _condition(as_of, run_id, trajectory_ids)
        return {
            kind: self._tables[kind] if condition is None else self._tables[kind].filter(condition)
            for kind in kinds
            if kind in self._tables
        }


class LakeSource:
    """One snapshot of a lake. Data files are opened only as far as a statement asks for their rows and columns."""

    def __init__(self, lake: Lake, snapshot: Snapshot | None = None) -> None:
        self.lake = lake
        self.snapshot = lake.snapshot() if snapshot is None else snapshot

    def key(self) -> tuple[str, int] | None:
        """The table, by its place and id (a table may be made anew at one place), and its version."""
        return f"{self.lake.table.url}#{self.snapshot.table_id}", self.snapshot.version

    def kind(self, kind: str, as_of: Cursor | None) -> Rows:
        """A dataset over the kind's data files; conditions on bounded columns skip files."""
        return self._dataset(self.snapshot.files_of(kind, as_of=as_of), arrow_schema(kind))

    def events(self, as_of: Cursor | None) -> Rows:
        """A dataset over all data files."""
        files = [file for kind in KINDS for file in self.snapshot.files_of(kind, as_of=as_of)]
        return self._dataset(files, EVENTS_SCHEMA)

    def read(
        self,
        kinds: Iterable[str],
        *,
        as_of: Cursor | None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
    ) -> dict[str, pa.Table]:
        """What :meth:`Lake.read` gives at this snapshot."""
        return {
            kind: self.lake.read(
                kind, as_of=as_of, run_id=run_id, trajectory_ids=trajectory_ids, snapshot=self.snapshot
            )
            for kind in kinds
            if kind in self.snapshot.by_kind
        }

    def _dataset(self, files: Iterable[DataFile], schema: pa.Schema) -> Rows:
        format_ = ds.ParquetFileFormat()
        table = self.lake.table
        places = {table.child(file.path).path: (table.child(file.path), file) for file in files}
        fragments = [_FRAGMENTS.get(place, file, format_) for place, file in places.values()]
        if not fragments:
            return schema.empty_table()
        if table.is_local:
            return ds.FileSystemDataset(fragments, schema, format_, fragments[0].filesystem)
        return RemoteDataset(fragments, schema, format_, places)


class _Fragments:
    """Fragments of data files that were used lately, with the footers that they parsed: data files never change."""

    def __init__(self, capacity: int = 1_024) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, ds.Fragment] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, place: Location, file: DataFile, format_: ds.ParquetFileFormat) -> ds.Fragment:
        with self._lock:
            if place.url in self._kept:
                self._kept.move_to_end(place.url)
                return self._kept[place.url]
        made = format_.make_fragment(place.path, pafs.LocalFileSystem(), partition_expression=_bounds(file))
        with self._lock:
            self._kept[place.url] = made
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return made


_FRAGMENTS: Final = _Fragments()


def _as_events(table: pa.Table) -> pa.Table:
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in EVENTS_SCHEMA
    ]
    return pa.table(columns, schema=EVENTS_SCHEMA)


def _bounds(file: DataFile) -> ds.Expression:
    """What holds for every row of the file, as far as its bounds say."""
    held = ds.field("kind") == file.kind
    for name in _BOUNDED:
        least, most = getattr(file, f"min_{name}"), getattr(file, f"max_{name}")
        if least is not None and most is not None:
            column = ds.field(name)
            if name in _NEVER_NULL:
                held &= (column == least) if least == most else (column >= least) & (column <= most)
            else:
                # Bounds say nothing of rows where the column is null, and IS NULL must still find those.
                held &= (column >= least) | column.is_null()
                held &= (column <= most) | column.is_null()
    return held


def _condition(
    as_of: Cursor | None, run_id: str | None, trajectory_ids: Collection[str] | None
) -> ds.Expression | None:
    conditions: list[ds.Expression] = []
    if as_of is not None:
        before = ds.scalar(False)
        for place in as_of:
            here = (ds.field("log_topic") == place.topic) & (ds.field("log_partition") == place.partition)
            before |= here & (ds.field("log_offset") < as_of[place])
        conditions.append(before)
    if run_id is not None:
        conditions.append(ds.field("run_id") == run_id)
    if trajectory_ids is not None:
        conditions.append(ds.field("trajectory_id").isin(pa.array(sorted(trajectory_ids), pa.string())))
    combined = None
    for condition in conditions:
        combined = condition if combined is None else combined & condition
    return combined
