"""A lake as what an archive commits to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from rolltape.ingest.conflicts import rows_by_id
from rolltape.store.lake import Commit, Lake


class LakeTarget:
    """A lake as what an archive commits to (see :class:`rolltape.ingest.archive.ArchiveTarget`)."""

    def __init__(self, lake: Lake) -> None:
        """Commit to ``lake``."""
        self.lake = lake

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
