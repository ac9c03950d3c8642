"""Maintenance: compaction, checkpoints, cleaning of the log, vacuum. Rows are never changed, only where they lie.

Everything here may be interrupted anywhere and may run while others append:

* a compaction is one commit of removals and additions without data change, fenced by the application transaction
  ``maintenance``: of two at the same time one is refused, and no row is doubled;
* log files go only once a checkpoint that replaces them is on the disk;
* a vacuum first commits a fence (application transaction ``vacuum``), then deletes only files that no version names and
  that were written long before it. A committer that finds a fence between its files and its commit writes them again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rolltape.schema.errors import CommitterFencedError, StoreError
from rolltape.schema.render import arrow_schema
from rolltape.store import merging, parquet
from rolltape.store.beside import beside
from rolltape.store.lake import Lake
from rolltape.store.log_actions import Actions, commit_name
from rolltape.store.snapshot import MAINTENANCE_TRANSACTION, VACUUM_TRANSACTION, DataFile, Snapshot
from rolltape.store.transaction_log import SAFE_LOG_AGE_S

TARGET_BYTES: Final = 128 << 20
DAY_S: Final = 86_400.0

_LOG_FILE: Final = re.compile(r"^(\d{20})\.(json|checkpoint\..*parquet|checkpoint\.parquet)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a committer stops for maintenance.

    Attributes:
        min_files: compact a kind once so many of its files of one size class lie side by side.
        tiers_bytes: upper bounds of the size classes; a row is rewritten once a class at most.
        checkpoint_interval: commits between two checkpoints.
        keep_versions: log files kept behind a checkpoint, so that live tails can go on reading them.
        log_age_s: log files younger than this stay too (see :func:`clean_logs`).
        commits_between: look no more often than this.
        vacuum_interval: commits between two vacuums.
        vacuum_age_s: files that a compaction replaced stay this long, for readers of older snapshots.
    """

    min_files: int = 32
    tiers_bytes: tuple[int, ...] = (256 << 10, 4 << 20, 64 << 20)
    checkpoint_interval: int = 100
    keep_versions: int = 50
    log_age_s: float = SAFE_LOG_AGE_S
    commits_between: int = 8
    vacuum_interval: int = 2_000
    vacuum_age_s: float = DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What a compaction did; ``version`` is None where there was nothing to do."""

    version: int | None = None
    removed: tuple[DataFile, ...] = ()
    added: tuple[DataFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """What one round of maintenance did."""

    compaction: Compaction | None = None
    checkpoint_version: int | None = None
    num_log_files_deleted: int = 0
    num_data_files_deleted: int = 0


def maintain(lake: Lake, commits_since: int, policy: Policy | None = None) -> Maintenance | None:
    """One bounded round, to be called by the committer between commits, best when it is idle.

    It compacts one run of files of one kind (the longest that is due), and writes a checkpoint or vacuums when due.
    ``commits_since`` counts the commits since a call that did not return None. Bad luck against another maintainer is
    no error: it did the work.
    """
    rule = policy or Policy()
    if commits_since < rule.commits_between:
        return None
    snapshot = lake.snapshot()
    compaction = None
    runs = [run for files in snapshot.by_kind.values() for run in _tier_runs(files, rule)]
    if runs:
        try:
            compaction = _replace(lake, snapshot, [max(runs, key=len)])
        except CommitterFencedError:
            compaction = Compaction()
    before = max(lake.log.checkpoint_version(), 0)
    if lake.snapshot().version - before < rule.checkpoint_interval:
        return Maintenance(compaction=compaction)
    written = checkpoint(lake)
    due = written // rule.vacuum_interval > before // rule.vacuum_interval
    return Maintenance(
        compaction=compaction,
        checkpoint_version=written,
        num_log_files_deleted=clean_logs(lake, keep_versions=rule.keep_versions, safe_age_s=rule.log_age_s),
        num_data_files_deleted=len(vacuum(lake, safe_age_s=rule.vacuum_age_s)) if due else 0,
    )


# Compaction


def compact(lake: Lake, *, kinds: Collection[str] | None = None, target_bytes: int = TARGET_BYTES) -> Compaction:
    """Merge the small files of each kind, in log order, into files of about ``target_bytes``.

    Raises:
        CommitterFencedError: another maintenance ran at the same time; nothing was changed.
    """
    snapshot = lake.snapshot()
    runs = [
        run
        for kind, files in snapshot.by_kind.items()
        if kinds is None or kind in kinds
        for run in _runs(files, target_bytes // 2, target_bytes, min_files=2)
    ]
    return _replace(lake, snapshot, runs) if runs else Compaction()


def _tier_runs(files: Sequence[DataFile], rule: Policy) -> list[list[DataFile]]:
    """Runs that are due, at most one size class of a kind at a time (the smallest that is due)."""
    if len(files) < rule.min_files:
        return []
    for below in rule.tiers_bytes:
        runs = _runs(files, below, max(TARGET_BYTES, below), min_files=rule.min_files)
        if runs:
            return runs
    return []


def _runs(files: Iterable[DataFile], small_bytes: int, target_bytes: int, min_files: int) -> list[list[DataFile]]:
    """Neighbours in log order that are small and of one partition, together at most ``target_bytes``."""
    runs: list[list[DataFile]] = [[]]
    total = 0
    for file in sorted(files, key=lambda file: file.log_order):
        small = file.size_bytes < small_bytes
        fits = runs[-1] and runs[-1][-1].partition == file.partition and total + file.size_bytes <= target_bytes
        if not small or not fits:
            runs.append([])
            total = 0
        if small:
            runs[-1].append(file)
            total += file.size_bytes
    return [run for run in runs if len(run) >= min_files]


def _replace(lake: Lake, snapshot: Snapshot, runs: Sequence[Sequence[DataFile]]) -> Compaction:
    """Commit one merged file for each run in place of its files."""
    asked = [[beside(_is_known, lake, file) for file in run] for run in runs]
    known = [run for run, answers in zip(runs, asked, strict=True) if all(answer.result() for answer in answers)]
    if not known:
        return Compaction()
    number = snapshot.transactions.get(MAINTENANCE_TRANSACTION, 0)
    removed = [file for run in known for file in run]
    gone = {file.path for file in removed}

    def allowed(base: Snapshot) -> None:
        if base.transactions.get(MAINTENANCE_TRANSACTION, 0) != number or len(gone & _paths(base)) != len(gone):
            raise CommitterFencedError(
                f"expected maintenance {number} of {lake.location} to be the newest: another maintenance ran at the "
                "same time; nothing was changed, run it again"
            )

    def write() -> Actions:
        return Actions(
            operation="OPTIMIZE",
            removed=removed,
            added=[merging.merge_files(lake, run) for run in known],
            transactions={MAINTENANCE_TRANSACTION: number + 1},
            data_change=False,
        )

    commit = lake.commit(write, allowed)
    return Compaction(version=commit.version, removed=tuple(removed), added=commit.files)


def _paths(snapshot: Snapshot) -> set[str]:
    return {file.path for file in snapshot.files}


def _is_known(lake: Lake, data_file: DataFile) -> bool:
    """Whether this version knows every field of the file; rewriting others would lose what a newer version wrote."""
    if data_file.path in lake.recent:
        return True
    place = lake.table.child(data_file.path)
    with parquet.open_file(place, data_file.size_bytes) as file:
        theirs, ours = file.schema_arrow, arrow_schema(data_file.kind)
    # Of files that are many and about to go, no footer is kept.
    parquet.forget_footer(place)
    return all(field.name in ours.names and _covers(ours.field(field.name).type, field.type) for field in theirs)


def _covers(ours: pa.DataType, theirs: pa.DataType) -> bool:
    if pa.types.is_struct(theirs):
        names = {field.name: field.type for field in ours.fields} if pa.types.is_struct(ours) else {}
        return all(field.name in names and _covers(names[field.name], field.type) for field in theirs.fields)
    if pa.types.is_list(theirs) or pa.types.is_large_list(theirs):
        return (pa.types.is_list(ours) or pa.types.is_large_list(ours)) and _covers(ours.value_type, theirs.value_type)
    return True


# Checkpoints and the log


def checkpoint(lake: Lake) -> int:
    """Write a checkpoint of the newest version, durably; returns that version."""
    if lake.read_only:
        raise StoreError(f"expected a lake opened for writing, {lake.location} was opened with read_only=True")
    from rolltape.store.delta import write_checkpoint

    version = write_checkpoint(lake.table)
    folder = lake.log.folder
    if lake.location.is_local:
        for info in folder.list():
            if info.path.startswith(f"{version:020d}.checkpoint") or info.path == "_last_checkpoint":
                folder.child(info.path).sync()
        folder.sync()
    return version


def clean_logs(lake: Lake, *, keep_versions: int = 0, safe_age_s: float = SAFE_LOG_AGE_S) -> int:
    """Delete log files that the newest checkpoint replaces, but for the last ``keep_versions``; returns how many.

    Versions younger than ``safe_age_s`` stay: so long a committer may take between a look at the newest version and its
    own, and a version that was deleted looks like one that never was (:meth:`TransactionLog.try_commit`). A tail that
    lags further behind goes on from a snapshot; *as of* is a cursor and does not need old versions.
    """
    newest = lake.log.checkpoint_version()
    found = lake.log.folder.list()
    old_s = max((info.modified_s for info in found), default=0.0) - safe_age_s
    replaced = []
    for info in found:
        match = _LOG_FILE.match(info.path)
        if match is None:
            continue
        kept_from = newest if "checkpoint" in info.path else newest - keep_versions
        if int(match.group(1)) < kept_from and ("checkpoint" in info.path or info.modified_s <= old_s):
            replaced.append(info.path)
    lake.log.folder.delete_files(replaced)
    return len(replaced)


# Vacuum


def vacuum(lake: Lake, *, safe_age_s: float = 7 * DAY_S, dry_run: bool = False) -> tuple[str, ...]:
    """Delete data files that the table does not name and that are older than ``safe_age_s``; returns their paths.

    These are files that a compaction replaced, and orphans of interrupted commits. A reader that still holds a snapshot
    from before a compaction loses it once the files go: the safe age is for such readers. Committers need none.
    """
    if dry_run:
        limit_s = time.time() - safe_age_s
        return tuple(path for path, modified_s in _unnamed_files(lake) if modified_s < limit_s)
    fenced_s = _fence(lake)
    deleted = [path for path, modified_s in _unnamed_files(lake) if modified_s < fenced_s - safe_age_s]
    lake.table.delete_files(deleted)
    return tuple(deleted)


def _fence(lake: Lake) -> float:
    """Commit a fence; returns when, by the clock of the file system that also dates the data files."""
    newest = lake.snapshot()

    def allowed(base: Snapshot) -> None:
        nonlocal newest
        newest = base

    def write() -> Actions:
        return Actions(operation="VACUUM START", transactions={VACUUM_TRANSACTION: newest.version + 1})

    version = lake.commit(write, allowed).version
    return next(info.modified_s for info in lake.log.folder.list() if info.path == commit_name(version))


def _unnamed_files(lake: Lake) -> list[tuple[str, float]]:
    """Files in the table's folder that its newest version does not name, with their ages; the log's files aside."""
    found = lake.table.list()
    named = _paths(lake.snapshot())
    return [
        (info.path, info.modified_s)
        for info in found
        if info.path not in named and (info.path.endswith((".parquet", ".tmp")))
    ]
