"""Datasets over data files of an object store: what a scan needs is fetched first, then scanned from the local cache.

Conditions on the bounds of the files choose among them before anything is opened, exactly as they do on a disk. No call
from Arrow's threads comes back into Python: a scan that is broken off waits for those threads, and would wait for ever
where they wait for the interpreter.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from rolltape.store.beside import beside
from rolltape.store.location import Location
from rolltape.store.snapshot import DataFile

# So much is fetched and scanned at a time, while the next part is on its way.
PART_BYTES: Final = 256 << 20

_MAX_FRAGMENTS: Final = 1_024
_MAX_FRAGMENT_BYTES: Final = 4 << 30


class RemoteDataset(ds.FileSystemDataset):  # type: ignore[misc]  # pyarrow has no types
    """A dataset whose scans fetch the files that their condition leaves over."""

    def __init__(
        self,
        fragments: Sequence[ds.FileFragment],
        schema: pa.Schema,
        format_: ds.ParquetFileFormat,
        places: Mapping[str, tuple[Location, DataFile]],
    ) -> None:
        """Fragments by the paths that ``places`` explains; they are never opened under these."""
        super().__init__(fragments, schema, format_, fragments[0].filesystem)
        self._places = places

    def scanner(self, **options: Any) -> _Scan:
        """What DuckDB asks for: columns and a condition, among others."""
        return _Scan(self.schema, self.needed(options.get("filter")), options)

    def needed(self, condition: ds.Expression | None) -> list[tuple[Location, DataFile, ds.Expression]]:
        """The files that may hold rows of the condition, with what holds for all their rows."""
        found = [] if condition is None else self.get_fragments(filter=condition)
        found = self.get_fragments() if condition is None else found
        return [(*self._places[fragment.path], fragment.partition_expression) for fragment in found]


class _Scan:
    """One scan; :meth:`to_reader` runs it."""

    def __init__(
        self,
        schema: pa.Schema,
        files: Sequence[tuple[Location, DataFile, ds.Expression]],
        options: Mapping[str, Any],
    ) -> None:
        self._schema = schema
        self._files = files
        self._options = options

    def to_reader(self) -> pa.RecordBatchReader:
        """The batches, as they come."""
        columns = self._options.get("columns")
        empty = ds.dataset(self._schema.empty_table()).scanner(columns=columns)
        return pa.RecordBatchReader.from_batches(empty.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        parts = _parts(self._files)
        ahead = _start(parts[0]) if parts else []
        for number in range(len(parts)):
            fragments = [future.result() for future in ahead]
            ahead = _start(parts[number + 1]) if number + 1 < len(parts) else []
            dataset = ds.FileSystemDataset(fragments, self._schema, _FORMAT)
            yield from dataset.scanner(**self._options).to_batches()


def _parts(
    files: Sequence[tuple[Location, DataFile, ds.Expression]],
) -> list[list[tuple[Location, DataFile, ds.Expression]]]:
    parts: list[list[tuple[Location, DataFile, ds.Expression]]] = []
    total = PART_BYTES
    for each in files:
        if total >= PART_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(each)
        total += each[1].size_bytes
    return parts


def _start(part: Sequence[tuple[Location, DataFile, ds.Expression]]) -> list[Future[ds.Fragment]]:
    return [beside(_FRAGMENTS.get, *each) for each in part]


class _MappedFragments:
    """Fragments over mapped files that were scanned lately, with the footers that they parsed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[ds.Fragment, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, place: Location, file: DataFile, bounds: ds.Expression) -> ds.Fragment:
        """A fragment of the file, fetched if it must be."""
        with self._lock:
            if place.url in self._kept:
                self._kept.move_to_end(place.url)
                return self._kept[place.url][0]
        data, is_mapped = place.read_unchanging(file.size_bytes)
        made = _FORMAT.make_fragment(data, partition_expression=bounds)
        if is_mapped:
            with self._lock:
                self._put(place.url, made, file.size_bytes)
        return made

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _put(self, url: str, fragment: ds.Fragment, num_bytes: int) -> None:
        if url not in self._kept:
            self._num_bytes += num_bytes
        self._kept[url] = (fragment, num_bytes)
        while len(self._kept) > _MAX_FRAGMENTS or (self._num_bytes > _MAX_FRAGMENT_BYTES and len(self._kept) > 1):
            self._num_bytes -= self._kept.popitem(last=False)[1][1]


_FORMAT: Final = ds.ParquetFileFormat()
_FRAGMENTS: Final = _MappedFragments()


def forget_fragments() -> None:
    """Forget what was scanned, as a new process would not know it."""
    _FRAGMENTS.clear()
