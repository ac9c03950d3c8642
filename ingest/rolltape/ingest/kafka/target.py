"""The lake as a sink commits to it: every commit is measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.kafka.metrics import SinkMetrics
from rolltape.ingest.lake_target import LakeTarget
from rolltape.store.lake import Commit, Lake


class MeasuredTarget(LakeTarget):
    """A lake whose commits count rows, dead letters and seconds."""

    def __init__(self, lake: Lake, metrics: SinkMetrics) -> None:
        """Commit to ``lake``, and tell ``metrics``."""
        super().__init__(lake)
        self._metrics = metrics

    def append(
        self, tables: Mapping[str, pa.Table], transactions: Mapping[str, int], expected: Mapping[str, int | None]
    ) -> Commit:
        """One commit of rows and transactions."""
        started = time.perf_counter()
        commit = super().append(tables, transactions, expected)
        letters: Counter[Any] = Counter()
        if "dead_letter" in tables:
            letters.update(pc.struct_field(tables["dead_letter"]["dead_letter"], "reason").to_pylist())
        rows = {kind: table.num_rows for kind, table in tables.items()}
        self._metrics.commit(time.perf_counter() - started, rows, letters)
        return commit
