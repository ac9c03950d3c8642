"""Snapshots: what the Delta table holds at one version, and which of its data files a question needs."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from rolltape.schema.cursor import Cursor, Partition

LOG_TRANSACTION: Final = "log"
LANE_TRANSACTION: Final = "lane"
KAFKA_TRANSACTION: Final = "kafka"
MAINTENANCE_TRANSACTION: Final = "maintenance"
VACUUM_TRANSACTION: Final = "vacuum"


def log_ends(transactions: Mapping[str, int]) -> Cursor:
    """The next offset of each partition that the transactions speak of (``log/<topic>/<partition>`` = last offset)."""
    offsets = {}
    for app, version in transactions.items():
        if app.startswith(f"{LOG_TRANSACTION}/"):
            _, topic, partition = app.split("/")
            offsets[Partition(topic, int(partition))] = version + 1
    return Cursor(offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One data file: rows of one kind.

    ``path`` is relative to the table's folder. The bounds are exact and inclusive; they are None where the column is
    null in every row (or the writer kept no statistics: then nothing is pruned).
    """

    path: str
    size_bytes: int
    num_rows: int
    kind: str
    min_log_topic: str | None = None
    max_log_topic: str | None = None
    min_log_partition: int | None = None
    max_log_partition: int | None = None
    min_log_offset: int | None = None
    max_log_offset: int | None = None
    min_run_id: str | None = None
    max_run_id: str | None = None
    min_trajectory_id: str | None = None
    max_trajectory_id: str | None = None

    @property
    def partition(self) -> Partition | None:
        """The one log partition that all rows come from; None where there are several, or it is unknown."""
        if self.min_log_topic is None or self.min_log_topic != self.max_log_topic:
            return None
        if self.min_log_partition is None or self.min_log_partition != self.max_log_partition:
            return None
        return Partition(self.min_log_topic, self.min_log_partition)

    @property
    def log_order(self) -> tuple[str, int, int]:
        """Sort key: where its first row lies in the log."""
        return (self.min_log_topic or "", self.min_log_partition or 0, self.min_log_offset or 0)

    def may_precede(self, as_of: Cursor) -> bool:
        """Whether some row may lie before the cursor."""
        if self.min_log_offset is None:
            return True
        if self.partition is not None:
            return self.min_log_offset < as_of[self.partition]
        return self.min_log_offset < max(as_of.offsets.values(), default=0)

    def wholly_precedes(self, as_of: Cursor) -> bool:
        """Whether all rows are known to lie before the cursor."""
        return (self.partition is not None and self.max_log_offset is not None) and self.max_log_offset < as_of[
            self.partition
        ]

    def may_follow(self, start: Cursor) -> bool:
        """Whether some row may lie at or after the cursor."""
        return not self.wholly_precedes(start)

    def may_hold_run(self, run_id: str) -> bool:
        """Whether the bounds allow a row of this run."""
        return self.min_run_id is None or self.max_run_id is None or self.min_run_id <= run_id <= self.max_run_id

    def may_hold_trajectory(self, sorted_ids: Sequence[str]) -> bool:
        """Whether the bounds allow a row of one of these trajectories."""
        if self.min_trajectory_id is None or self.max_trajectory_id is None:
            return True
        place = bisect.bisect_left(sorted_ids, self.min_trajectory_id)
        return place < len(sorted_ids) and sorted_ids[place] <= self.max_trajectory_id


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCommit:
    """One version of the table, as its log file says.

    ``added`` holds every data file that it names; of these ``new`` carry rows that the table did not have before
    (a compaction adds files but no rows).
    """

    version: int
    added: tuple[DataFile, ...] = ()
    new: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()
    transactions: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    table_id: str | None = None
    schema_json: str | None = None
    configuration: Mapping[str, str] | None = None
    protocol: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The table at one version. It stays readable until its data files are vacuumed.

    ``table_id`` is the identity that Delta gave the table when it was created: another one is another lake.
    """

    version: int
    by_kind: Mapping[str, tuple[DataFile, ...]]
    transactions: Mapping[str, int]
    table_id: str
    schema_json: str
    configuration: Mapping[str, str]
    protocol: Mapping[str, Any]

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """All data files."""
        return tuple(file for files in self.by_kind.values() for file in files)

    @cached_property
    def cursor(self) -> Cursor:
        """The end of the log as this version archived it: the next offset of each partition."""
        return log_ends(self.transactions)

    def files_of(
        self,
        kind: str,
        *,
        as_of: Cursor | None = None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
        since: Cursor | None = None,
    ) -> tuple[DataFile, ...]:
        """Data files that may hold rows of ``kind`` that satisfy the conditions, by their bounds; in log order."""
        files: Iterable[DataFile] = self.by_kind.get(kind, ())
        if as_of is not None:
            files = [file for file in files if file.may_precede(as_of)]
        if since is not None:
            files = [file for file in files if file.may_follow(since)]
        if run_id is not None:
            files = [file for file in files if file.may_hold_run(run_id)]
        if trajectory_ids is not None:
            sorted_ids = sorted(trajectory_ids)
            files = [file for file in files if file.may_hold_trajectory(sorted_ids)]
        return tuple(sorted(files, key=lambda file: file.log_order))

    def after(self, commit: LogCommit) -> Snapshot:
        """The table once ``commit`` is applied to this version."""
        by_kind = dict(self.by_kind)
        if commit.removed:
            gone = frozenset(commit.removed)
            for kind, files in self.by_kind.items():
                kept = tuple(file for file in files if file.path not in gone)
                if len(kept) != len(files):
                    by_kind[kind] = kept
        for file in commit.added:
            by_kind[file.kind] = (*by_kind.get(file.kind, ()), file)
        return Snapshot(
            version=commit.version,
            by_kind=MappingProxyType(by_kind),
            transactions=MappingProxyType({**self.transactions, **commit.transactions}),
            table_id=commit.table_id or self.table_id,
            schema_json=commit.schema_json or self.schema_json,
            configuration=self.configuration if commit.configuration is None else commit.configuration,
            protocol=commit.protocol or self.protocol,
        )


EMPTY: Final = Snapshot(
    version=-1,
    by_kind=MappingProxyType({}),
    transactions=MappingProxyType({}),
    table_id="",
    schema_json="",
    configuration=MappingProxyType({}),
    protocol=MappingProxyType({}),
)
