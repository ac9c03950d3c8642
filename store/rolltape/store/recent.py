"""Small tables as they were just written, so that a compaction by the same handle need not decode their files again.

Decoding a small data file costs 2 ms, nearly all of it per column; a committer that compacts its own files would spend
as much on that as on writing them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

import pyarrow as pa
import pyarrow.ipc

from rolltape.store.parquet import conform_columns, drop_null_columns

MAX_BYTES: Final = 32 << 20
MAX_TABLE_BYTES: Final = 512 << 10


class RecentTables:
    """Tables by the path of their data file, the oldest dropped beyond a bound in bytes.

    Kept as copies: a caller's table may be a slice of a mapped spool file, which must not outlive its use.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, pa.Buffer] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, path: str, table: pa.Table) -> None:
        """Keep what was written to ``path``, if it is small."""
        if table.nbytes > min(MAX_TABLE_BYTES, self._max_bytes):
            return
        sink = pa.BufferOutputStream()
        kept = drop_null_columns(table)
        with pa.ipc.new_stream(sink, kept.schema) as writer:
            writer.write_table(kept)
        with self._lock:
            self._kept[path] = sink.getvalue()
            self._num_bytes += self._kept[path].size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].size

    def __contains__(self, path: str) -> bool:
        with self._lock:
            return path in self._kept

    def discard(self, path: str) -> None:
        """Forget what was written to ``path``."""
        with self._lock:
            buffer = self._kept.pop(path, None)
            self._num_bytes -= 0 if buffer is None else buffer.size

    def take(self, path: str, kind: str) -> pa.Table | None:
        """The table of ``kind`` that was written to ``path``, once; None if it is not kept."""
        with self._lock:
            buffer = self._kept.pop(path, None)
            if buffer is None:
                return None
            self._num_bytes -= buffer.size
        return conform_columns(pa.ipc.open_stream(buffer).read_all(), kind)
