"""The newest events of a lake, by id: what an archive that starts now has to know of those before it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from rolltape.store.lake import Lake
from rolltape.store.snapshot import DataFile, Snapshot

MAX_FILES: Final = 64
"""A start reads no more than these: through an object store each costs milliseconds."""


def recent_event_ids(
    lake: Lake, snapshot: Snapshot, capacity: int, kinds: Collection[str] | None = None
) -> dict[str, Sequence[str]]:
    """Ids of about ``capacity`` events, of these kinds or all, in the files nearest to the ends of their partitions.

    Raises:
        StoreError: a file cannot be read.
    """
    chosen: dict[str, list[DataFile]] = {}
    room = capacity
    for file in _newest(snapshot, kinds):
        if room <= 0:
            break
        chosen.setdefault(file.kind, []).append(file)
        room -= file.num_rows
    found: dict[str, Sequence[str]] = {}
    for kind, files in chosen.items():
        # Of a large file, as compaction makes them, the last rows only.
        ids = lake.read_files(files, kind, ["event_id"])["event_id"]
        found[kind] = ids.slice(max(0, len(ids) - capacity)).to_pylist()
    return found


def _newest(snapshot: Snapshot, kinds: Collection[str] | None) -> list[DataFile]:
    files = (file for file in snapshot.files if kinds is None or file.kind in kinds)
    ends = _ends_by_topic(snapshot)
    return heapq.nsmallest(MAX_FILES, files, key=lambda file: _distance(file, snapshot, ends))


def _distance(file: DataFile, snapshot: Snapshot, ends: Mapping[str, int]) -> int:
    """How many offsets lie behind the file's last row; 0 where nobody knows."""
    if file.max_log_offset is None or file.max_log_topic is None:
        return 0
    end = ends.get(file.max_log_topic, 0) if file.partition is None else snapshot.cursor[file.partition]
    return max(0, end - 1 - file.max_log_offset)


def _ends_by_topic(snapshot: Snapshot) -> dict[str, int]:
    ends: dict[str, int] = {}
    for partition, offset in snapshot.cursor.offsets.items():
        ends[partition.topic] = max(offset, ends.get(partition.topic, 0))
    return ends
