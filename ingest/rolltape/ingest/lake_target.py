"""A lake as what an archive commits to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rolltape.ingest.conflicts import rows_by_id
from rolltape.ingest.recent_events import recent_event_ids
from rolltape.store.lake import Commit, Lake


class LakeTarget:
    """A lake as what an archive commits to (see :class:`rolltape.ingest.archive.ArchiveTarget`)."""

    def __init__(self, lake: Lake) -> None:
        """Commit to ``lake``."""
        self.lake = lake
        self._looked_at: int | None = None

    def transactions(self) -> Mapping[str, int]:
        """Application transactions of the newest version."""
        return self.lake.snapshot().transactions

    def append(
        self, tables: Mapping[str, pa.Table], transactions: Mapping[str, int], expected: Mapping[str, int | None]
    ) -> Commit:
        """One commit of rows and transactions."""
        return self.lake.append(tables, transactions, expected)

    def read_events(
        self, kind: str, event_ids: Collection[str], trajectory_ids: Collection[str] | None
    ) -> Mapping[str, Mapping[str, Any]]:
        """Those of the events that are committed, as rows by id; all files are read only if some were not found."""
        found = rows_by_id(self.lake.read(kind, trajectory_ids=trajectory_ids), event_ids)
        if trajectory_ids is None or len(found) == len(event_ids):
            return found
        return rows_by_id(self.lake.read(kind), event_ids)

    def recent_event_ids(self, capacity: int, kinds: Collection[str] | None) -> Mapping[str, Sequence[str]]:
        """Ids of the newest committed events, by kind; of a version that was looked at before, none."""
        snapshot = self.lake.snapshot()
        if snapshot.version == self._looked_at:
            return {}
        self._looked_at = snapshot.version
        return recent_event_ids(self.lake, snapshot, capacity, kinds)
