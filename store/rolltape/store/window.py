"""The recent window: the newest rows of a lake as memory-mapped Arrow IPC files, for readers that are in a hurry.

A cache beside the spool, bounded in bytes and never authoritative: whatever is missing or damaged is read from the lake
again. A segment holds all rows of one kind and one partition between two log offsets, both in its name, together with
the CRC-32 of its bytes; the segments of a kind form a chain without gaps up to where the window was refreshed last.
Reads are slices of mapped memory.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import ConfigError
from rolltape.schema.kinds import KINDS
from rolltape.schema.render import arrow_schema
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.parquet import conform_columns, drop_null_columns
from rolltape.store.row_filter import RowFilter, rows_where
from rolltape.store.snapshot import DataFile, Snapshot
from rolltape.store.tail import split_by_partition

DEFAULT_BYTES: Final = 1 << 30
SEGMENT_BYTES: Final = 64 << 20

# A chain of more small segments than this is merged, so that a read touches few files.
_MAX_SMALL: Final = 64
_SMALL_BYTES: Final = 1 << 20

# Decoded size over Parquet size, to guess before decoding what fits (measured: 2.1 for tokens, 4 for short events).
_EXPANSION: Final = 3

_NAME: Final = re.compile(
    r"^(?P<kind>\w+)--(?P<topic>\w+)\.(?P<number>\d+)--(?P<first>\d+)-(?P<end>\d+)--(?P<crc>[0-9a-f]{8})\.arrow$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """All rows of one kind and partition with first ≤ log offset < end, and the file that maps them."""

    kind: str
    partition: Partition
    first: int
    end: int
    name: str
    size_bytes: int
    modified_s: float

    @property
    def crc(self) -> int:
        """CRC-32 of the file, from its name."""
        return int(self.name[-14:-6], 16)


class Window:
    """The newest rows of a lake, mapped. For one thread; several processes may share the folder.

    Call :meth:`refresh` to take in what was committed since.
    """

    def __init__(
        self,
        lake: Lake,
        max_bytes: int = DEFAULT_BYTES,
        *,
        kinds: Collection[str] | None = None,
        folder: Location | None = None,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(f"expected max_bytes of the window above 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self._lake = lake
        self._kinds = tuple(KINDS) if kinds is None else tuple(kinds)
        self._folder = (folder or Location.parse(lake.spool_path / "window")).child(lake.snapshot().table_id)
        self._folder.make_folder()
        self._chains: dict[tuple[str, Partition], list[Segment]] = {}
        self._tables: dict[str, pa.Table] = {}
        self._starts: dict[tuple[str, Partition], int] = {}
        self.cursor = Cursor()
        self._load_chains()

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size_bytes for chain in self._chains.values() for segment in chain)

    def start(self, kind: str) -> Cursor:
        """From here on, up to ``cursor``, the window holds every row of the kind."""
        return Cursor({place: self._starts.get((kind, place), 0) for place in self.cursor})

    # Taking in

    def refresh(self) -> Cursor:
        """Take in what the lake got since; drop the oldest beyond the bound. Returns the new end."""
        snapshot = self._lake.snapshot()
        end = snapshot.cursor
        floor = self._floor(snapshot)
        for kind in self._kinds:
            since = self._ends_of(kind, end, floor)
            files = snapshot.files_of(kind, since=since, as_of=end)
            for batch in _batches(files):
                self._take_in(kind, batch, since, end)
            for place in end:
                self._starts.setdefault((kind, place), since[place])
        self.cursor = end
        self._merge_small()
        self._evict()
        return end

    def _ends_of(self, kind: str, end: Cursor, floor: Cursor) -> Cursor:
        """Up to where the kind's chains reach; the floor where there is no chain."""
        reached = {}
        for place in end:
            chain = self._chains.get((kind, place))
            known = chain[-1].end if chain else self._starts.get((kind, place), floor[place])
            reached[place] = max(known, self.cursor[place])
        return Cursor(reached)

    def _floor(self, snapshot: Snapshot) -> Cursor:
        """Where a window that starts empty begins: so far back that about ``max_bytes`` fit."""
        places: dict[Partition, list[DataFile]] = {}
        for kind in self._kinds:
            for file in snapshot.by_kind.get(kind, ()):
                if file.partition is not None:
                    places.setdefault(file.partition, []).append(file)
        return Cursor({place: _floor_offset(files, self.max_bytes) for place, files in places.items()})

    def _take_in(self, kind: str, files: Sequence[DataFile], since: Cursor, end: Cursor) -> None:
        table = self._lake.read_files(files, kind, None, RowFilter(since=since, as_of=end))
        if table.num_rows == 0:
            return
        for place, rows in split_by_partition(table):
            chain = self._chains.setdefault((kind, place), [])
            first = chain[-1].end if chain else since[place]
            last = int(rows["log_offset"][-1].as_py())
            chain.append(self._write(kind, place, first, last + 1, rows))

    def _write(self, kind: str, place: Partition, first: int, end: int, rows: pa.Table) -> Segment:
        data = _encode(rows)
        name = f"{kind}--{place.topic}.{place.partition}--{first}-{end}--{zlib.crc32(data):08x}.arrow"
        self._folder.child(name).write_bytes(data, durable=False)
        segment = Segment(
            kind=kind, partition=place, first=first, end=end, name=name, size_bytes=data.size, modified_s=0.0
        )
        self._tables[name] = self._map(segment)
        return segment

    # Reading

    def read(
        self,
        kind: str,
        *,
        trajectory_ids: Collection[str] | None = None,
        min_offset: int | Cursor | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Rows of the kind that the window holds, as slices of mapped memory where they lie side by side.

        Rows older than :meth:`start` are not among them: ask the lake, or use :meth:`read_through`.
        """
        since = Cursor(dict.fromkeys(self.cursor, min_offset)) if isinstance(min_offset, int) else min_offset
        ids = None if trajectory_ids is None else pa.array(sorted(trajectory_ids), pa.string())
        parts = []
        for (of_kind, place), chain in self._chains.items():
            if of_kind != kind:
                continue
            for table in self._tables_of(chain, 0 if since is None else since[place]):
                rows = table if ids is None else rows_where(table, _holds(table, ids))
                if rows.num_rows:
                    parts.append(conform_columns(rows, kind, columns))
        if not parts:
            return conform_columns(arrow_schema(kind).empty_table(), kind, columns)
        return pa.concat_tables(parts)

    def read_through(
        self,
        kind: str,
        *,
        trajectory_ids: Collection[str] | None = None,
        min_offset: int | Cursor | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """:meth:`read`, completed from the lake with the rows that are older than the window."""
        recent = self.read(kind, trajectory_ids=trajectory_ids, min_offset=min_offset, columns=columns)
        older = self._lake.read(
            kind, trajectory_ids=trajectory_ids, min_offset=min_offset, columns=columns, as_of=self.start(kind)
        )
        return pa.concat_tables([older, recent]) if older.num_rows else recent

    def _tables_of(self, chain: list[Segment], since: int) -> Iterator[pa.Table]:
        for place, segment in enumerate(chain):
            if segment.end <= since:
                continue
            table = self._table(segment)
            if table is None:
                table = self._rebuild(chain, place)
            if segment.first < since:
                table = rows_where(table, table["log_offset"].to_numpy() >= since)
            yield table

    def _table(self, segment: Segment) -> pa.Table | None:
        """The segment's rows, or None where its file is gone or damaged."""
        if segment.name not in self._tables:
            try:
                data = self._folder.child(segment.name).open_input().read_buffer()
                if zlib.crc32(data) != segment.crc:
                    return None
                self._tables[segment.name] = self._map(segment)
            except (OSError, pa.ArrowInvalid):
                return None
        return self._tables[segment.name]

    def _map(self, segment: Segment) -> pa.Table:
        source = self._folder.child(segment.name).open_input()
        return conform_columns(pa.ipc.open_file(source).read_all(), segment.kind)

    def _rebuild(self, chain: list[Segment], place: int) -> pa.Table:
        """Read a lost segment's rows from the lake and write it again."""
        lost = chain[place]
        self._folder.child(lost.name).delete()
        rows = self._lake.read(
            lost.kind,
            min_offset=Cursor({lost.partition: lost.first}),
            as_of=Cursor({lost.partition: lost.end}),
        )
        chain[place] = self._write(lost.kind, lost.partition, lost.first, lost.end, rows)
        return self._tables[chain[place].name]

    # Keeping

    def _load_chains(self) -> None:
        """Find the chains that earlier processes left; whatever does not fit into one is deleted."""
        found: dict[tuple[str, Partition], list[Segment]] = {}
        for info in self._folder.list():
            match = _NAME.match(info.path)
            if match is None or match["kind"] not in KINDS:
                continue
            place = Partition(match["topic"], int(match["number"]))
            segment = Segment(
                kind=match["kind"],
                partition=place,
                first=int(match["first"]),
                end=int(match["end"]),
                name=info.path,
                size_bytes=info.size_bytes,
                modified_s=info.modified_s,
            )
            found.setdefault((segment.kind, place), []).append(segment)
        newest = self._lake.snapshot().cursor
        for key, segments in found.items():
            chain = _newest_chain(segments, newest[key[1]])
            for segment in segments:
                if segment not in chain:
                    self._folder.child(segment.name).delete()
            if chain and key[0] in self._kinds:
                self._chains[key] = chain
                self._starts[key] = chain[0].first

    def _merge_small(self) -> None:
        for (kind, place), chain in self._chains.items():
            small = [segment for segment in chain if segment.size_bytes < _SMALL_BYTES]
            if len(small) <= _MAX_SMALL:
                continue
            start = next(i for i, segment in enumerate(chain) if segment.size_bytes < _SMALL_BYTES)
            old = chain[start:]
            tables = list(self._tables_of(old, 0))
            merged = self._write(kind, place, old[0].first, old[-1].end, pa.concat_tables(tables))
            chain[start:] = [merged]
            self._drop(segment for segment in old if segment.name != merged.name)

    def _evict(self) -> None:
        """Drop the oldest segments until the rest fits; the newest of a chain goes last."""
        excess = self.size_bytes - self.max_bytes
        every = [(segment, key) for key, chain in self._chains.items() for segment in chain]
        newest = self.cursor
        every.sort(key=lambda item: newest[item[0].partition] - item[0].end, reverse=True)
        for segment, key in every:
            if excess <= 0:
                break
            self._chains[key].remove(segment)
            self._starts[key] = segment.end
            self._drop([segment])
            excess -= segment.size_bytes

    def _drop(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._tables.pop(segment.name, None)
            self._folder.child(segment.name).delete()


def _encode(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    # One record batch: what is read of a segment is then one slice, and the fold joins nothing.
    kept = drop_null_columns(rows).combine_chunks()
    with pa.ipc.new_file(sink, kept.schema) as writer:
        writer.write_table(kept)
    return sink.getvalue()


def _holds(table: pa.Table, ids: pa.Array) -> np.ndarray:
    held: np.ndarray = pc.is_in(table["trajectory_id"], value_set=ids).to_numpy()
    return held


def _batches(files: Iterable[DataFile]) -> Iterator[list[DataFile]]:
    """Files in log order, together as long as they decode to little, and always together where they overlap."""
    batch: list[DataFile] = []
    total, last = 0, -1
    for file in sorted(files, key=lambda file: file.log_order):
        overlaps = (file.min_log_offset or 0) <= last
        if batch and not overlaps and total + file.size_bytes * _EXPANSION > SEGMENT_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(file)
        total += file.size_bytes * _EXPANSION
        last = max(last, file.max_log_offset or 0)
    if batch:
        yield batch


def _floor_offset(files: Sequence[DataFile], max_bytes: int) -> int:
    total = 0
    floor = None
    for file in sorted(files, key=lambda file: file.max_log_offset or 0, reverse=True):
        total += file.size_bytes * _EXPANSION
        if total > max_bytes and floor is not None:
            return floor
        floor = file.min_log_offset or 0
    return 0


def _newest_chain(segments: Sequence[Segment], lake_end: int) -> list[Segment]:
    """The segments that join without a gap and end latest; none that claims offsets the lake does not have."""
    by_end: dict[int, Segment] = {}
    for segment in segments:
        if segment.end <= lake_end and (segment.end not in by_end or segment.first < by_end[segment.end].first):
            by_end[segment.end] = segment
    chain: list[Segment] = []
    step = by_end.get(max(by_end, default=-1))
    while step is not None:
        chain.append(step)
        step = by_end.get(step.first)
    return chain[::-1]
