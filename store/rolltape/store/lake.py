"""The lake: one append-only Delta table of events at one location, read and written.

One commit writes one data file a kind, in parallel, syncs them, and then adds one version of the transaction log that
carries the files, the log's new ends and the lanes' marks together. Whatever happens in between, the table holds all
of it or none.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rolltape.schema.crash import crash_window
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import CommitterFencedError, ConfigError, LakeFormatError, StoreError, VacuumedError
from rolltape.schema.kinds import kind_named
from rolltape.schema.render import arrow_schema, delta_schema_json
from rolltape.store import parquet
from rolltape.store.beside import beside
from rolltape.store.evolution import missing_fields
from rolltape.store.location import Location
from rolltape.store.log_actions import Actions, NewFile, describe_file
from rolltape.store.recent import RecentTables
from rolltape.store.row_filter import RowFilter
from rolltape.store.snapshot import VACUUM_TRANSACTION, DataFile, LogCommit, Snapshot
from rolltape.store.transaction_log import TransactionLog

if TYPE_CHECKING:
    from rolltape.store.sql import QueryResult

FORMAT_PROPERTY: Final = "rolltape.format"
FORMAT_MAJOR: Final = 1
FORMAT: Final = f"{FORMAT_MAJOR}.0"

# From so many data files on, each is decoded by one thread, several at a time; fewer are decoded column beside column.
MIN_FILES_BESIDE: Final = 4

_OTHER_NAME: Final = re.compile("%[0-9A-Fa-f]{2}")
_CONFIGURATION: Final = {
    "delta.appendOnly": "true",
    "delta.dataSkippingStatsColumns": "kind,log_topic,log_partition,log_offset,run_id,trajectory_id",
    # Checkpoints name every file that was replaced so recently. A week's, which is the default, would be millions: each
    # sink replaces some files a second. Only other programs' vacuums look at them; ours keeps files for a day.
    "delta.deletedFileRetentionDuration": "interval 1 hour",
    "delta.enableExpiredLogCleanup": "false",
    FORMAT_PROPERTY: FORMAT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit that is durable: its version, its data files and their bytes."""

    version: int
    files: tuple[DataFile, ...]
    num_bytes: int


class Lake:
    """A handle on a lake. Cheap to keep and safe to share between threads; refreshes itself commit by commit."""

    def __init__(
        self, location: Location, snapshot: Snapshot, *, read_only: bool = False, log: TransactionLog | None = None
    ) -> None:
        self.location = location
        self.read_only = read_only
        self.table = location.child("events")
        self.log = log or TransactionLog(self.table)
        self.recent = RecentTables()
        self._snapshot = snapshot
        self._lock = threading.RLock()

    # Opening

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str] | Location,
        *,
        exist_ok: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> Lake:
        """Make an empty lake, or open the one that is there.

        Raises:
            ConfigError: other readers of Delta would look for it under another name.
            StoreError: there is one and ``exist_ok`` is false; or the place cannot be written.
        """
        place = Location.parse(location, options)
        log = TransactionLog(place.child("events"))
        is_new = not log.exists()
        if is_new:
            _check_name(place)
        made = is_new and log.create(
            delta_schema_json(), _CONFIGURATION, name="events", description="Rolltape: every event of the lake"
        )
        if not made and not exist_ok:
            raise StoreError(f"expected no lake at {place}, found one; open it, or pass exist_ok=True")
        return cls.open(place)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str] | Location,
        *,
        read_only: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> Lake:
        """Open a lake.

        Raises:
            LakeNotFoundError: there is none.
            LakeFormatError: it is of a newer format, or a Delta table of somebody else.
        """
        place = Location.parse(location, options)
        log = TransactionLog(place.child("events"))
        snapshot = log.load()
        _check_format(snapshot, place)
        lake = cls(place, snapshot, read_only=read_only, log=log)
        if not read_only:
            lake._grow_schema()
        return lake

    @property
    def spool_path(self) -> pathlib.Path:
        """Folder on this machine for what is not in the lake yet: spools and the recent window.

        For a lake in an object store it lies under ``XDG_STATE_HOME`` (``~/.local/state``), by the table's identity: a
        lake that was made anew at the same URL never gets what was spooled for its predecessor.
        """
        if self.location.is_local:
            return self.location.child("spool").local_path()
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        digest = hashlib.sha256(f"{self.location.url} {self._snapshot.table_id}".encode()).hexdigest()[:16]
        return pathlib.Path(state).expanduser() / "rolltape" / digest

    # Reading

    def snapshot(self) -> Snapshot:
        """The newest version; costs the reading of the versions that came since."""
        with self._lock:
            self._snapshot = self.log.refresh(self._snapshot)
            return self._snapshot

    def known_snapshot(self) -> Snapshot:
        """The newest version that this handle knows, committed or read; asks nobody."""
        return self._snapshot

    def cursor(self) -> Cursor:
        """The end of the log as archived now."""
        return self.snapshot().cursor

    def read(
        self,
        kind: str,
        *,
        columns: Sequence[str] | None = None,
        as_of: Cursor | None = None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
        min_offset: int | Cursor | None = None,
        snapshot: Snapshot | None = None,
    ) -> pa.Table:
        """Rows of one kind as a table of its schema, in chunks as the data files and row groups gave them.

        Args:
            kind: the event kind.
            columns: only these (``struct.field`` decodes one field of a struct and leaves the others null).
            as_of: only rows before this cursor.
            run_id: only rows of this run.
            trajectory_ids: only rows of these trajectories.
            min_offset: only rows at or after this log offset (of every partition), or at or after this cursor.
            snapshot: of this snapshot instead of the newest.
        """
        at = self.snapshot() if snapshot is None else snapshot
        since = Cursor(dict.fromkeys(at.cursor, min_offset)) if isinstance(min_offset, int) else min_offset
        files = at.files_of(kind, as_of=as_of, run_id=run_id, trajectory_ids=trajectory_ids, since=since)
        wanted = RowFilter(as_of=as_of, run_id=run_id, trajectory_ids=trajectory_ids, since=since)
        return self.read_files(files, kind, columns, wanted)

    def events(
        self,
        kinds: Iterable[str],
        *,
        columns: Sequence[str] | None = None,
        as_of: Cursor | None = None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
        min_offset: int | Cursor | None = None,
    ) -> dict[str, pa.Table]:
        """:meth:`read` of several kinds, all of one snapshot."""
        at = self.snapshot()
        return {
            kind: self.read(
                kind,
                columns=columns,
                as_of=as_of,
                run_id=run_id,
                trajectory_ids=trajectory_ids,
                min_offset=min_offset,
                snapshot=at,
            )
            for kind in kinds
        }

    def sql(self, query: str, as_of: Cursor | None = None) -> QueryResult:
        """The answer to one SELECT over the projections and kinds (see :mod:`rolltape.store.sql`)."""
        from rolltape.store.sql import run_sql

        return run_sql(self, query, as_of=as_of)

    def read_files(
        self,
        files: Sequence[DataFile],
        kind: str,
        columns: Sequence[str] | None = None,
        wanted: RowFilter | None = None,
    ) -> pa.Table:
        """Rows of the data files that ``wanted`` lets through."""
        row_filter = wanted or RowFilter()
        needed = row_filter.columns_with(columns)
        if len(files) < MIN_FILES_BESIDE:
            found = [self._read_file(file, kind, needed, row_filter) for file in files]
        else:
            futures = [beside(self._read_file, file, kind, needed, row_filter, use_threads=False) for file in files]
            found = [future.result() for future in futures]
        parts = [part for part in found if part.num_rows]
        if not parts:
            empty = arrow_schema(kind).empty_table()
            return parquet.conform_columns(empty, kind, columns)
        table = pa.concat_tables(parts)
        if needed is not columns and columns is not None:
            table = table.select(parquet.top_names(columns))
        return table

    def _read_file(
        self,
        data_file: DataFile,
        kind: str,
        columns: Sequence[str] | None,
        row_filter: RowFilter,
        *,
        use_threads: bool = True,
    ) -> pa.Table:
        try:
            file = parquet.open_file(self.table.child(data_file.path), data_file.size_bytes)
        except FileNotFoundError as error:
            raise VacuumedError(
                f"data file {data_file.path} of {self.table} is gone: this snapshot was vacuumed; take a new one"
            ) from error
        with file:
            groups = row_filter.row_groups(file, data_file)
            table = parquet.read_groups(file, kind, columns, groups, use_threads=use_threads)
        return row_filter.apply(table, data_file)

    # Writing

    def append(
        self,
        tables: Mapping[str, pa.Table],
        transactions: Mapping[str, int],
        expected: Mapping[str, int | None] | None = None,
    ) -> Commit:
        """Commit rows and application transactions as one version, durable when this returns.

        Args:
            tables: kind → its rows, stamped with their log positions and in offset order.
            transactions: application id → its new version, which must be above the present one.
            expected: application id → the version that the caller's decisions rest on (None: none yet). By default
                what this handle last saw of each id in ``transactions``.

        Raises:
            CommitterFencedError: a transaction is not at its expected version: somebody else committed.
            StorageFullError: no room; nothing of this commit is in the table.
            StoreError: the lake is read-only.
        """
        kept = {kind: table for kind, table in tables.items() if table.num_rows}
        for kind in kept:
            kind_named(kind)
        with self._lock:
            return self._append(kept, transactions, expected)

    def _append(
        self, tables: Mapping[str, pa.Table], transactions: Mapping[str, int], expected: Mapping[str, int | None] | None
    ) -> Commit:
        if expected is None:
            expected = {app: self._snapshot.transactions.get(app) for app in transactions}

        def allowed(snapshot: Snapshot) -> None:
            _check_expected(snapshot, transactions, expected, self.location)

        def write() -> Actions:
            files = self.write_files(tables)
            crash_window("data_file_written")
            return Actions(operation="WRITE", added=files, transactions=transactions)

        return self.commit(write, allowed)

    def write_files(self, tables: Mapping[str, pa.Table]) -> tuple[NewFile, ...]:
        """Write one data file a kind; the commit makes them durable and part of the table."""
        futures = [beside(self._write_file, kind, table) for kind, table in tables.items()]
        concurrent.futures.wait(futures)
        if any(future.exception() for future in futures):
            for future in futures:
                if not future.exception():
                    self.table.child(future.result().file.path).delete()
        return tuple(future.result() for future in futures)

    def _write_file(self, kind: str, table: pa.Table) -> NewFile:
        data = parquet.encode_file(kind, table)
        path = f"{kind}-{uuid.uuid4().hex}.parquet"
        self.table.child(path).write_unique(data)
        self.recent.put(path, table)
        return describe_file(path, data.size, kind, table)

    def commit(self, write: Callable[[], Actions], allowed: Callable[[Snapshot], None]) -> Commit:
        """Write data files and commit them after the newest version, as often as others come first.

        ``allowed`` is asked before every try, with the snapshot that the version would follow. Files that were
        written before a vacuum and not yet committed are void (it may have deleted them) and are written again.
        """
        if self.read_only:
            raise StoreError(f"expected a lake opened for writing, {self.location} was opened with read_only=True")
        with self._lock:
            written: list[Actions] = []
            try:
                done = self._commit_after_others(write, allowed, written)
            except BaseException as error:
                if self.location.is_local or isinstance(error, CommitterFencedError):
                    self._discard(written)
                raise
            self._discard(written[:-1])
            crash_window("after_commit")
            return Commit(version=done.version, files=done.added, num_bytes=sum(file.size_bytes for file in done.added))

    def _commit_after_others(
        self, write: Callable[[], Actions], allowed: Callable[[Snapshot], None], written: list[Actions]
    ) -> LogCommit:
        """Try until a version is ours; returns it and leaves the tries in ``written``."""
        fence: int | None = None
        while True:
            if not self.log.may_trust():
                self._snapshot = self.log.refresh(self._snapshot)
            base = self._snapshot
            allowed(base)
            if not written or fence != base.transactions.get(VACUUM_TRANSACTION):
                fence = base.transactions.get(VACUUM_TRANSACTION)
                written.append(write())
            done = self.log.try_commit(base, written[-1])
            if done is not None:
                self._snapshot = base.after(done)
                return done
            self._snapshot = self.log.refresh(base)
            if self._snapshot.version == base.version:
                raise StoreError(f"{self.location} refused version {base.version + 1} and shows no other one")

    def _discard(self, written: Sequence[Actions]) -> None:
        """Delete data files that no version names; whatever is in doubt stays for the vacuum."""
        if not any(actions.added for actions in written):
            return
        with contextlib.suppress(Exception):
            live = {file.path for file in self.snapshot().files}
            for actions in written:
                for new in actions.added:
                    if new.file.path not in live:
                        self.table.child(new.file.path).delete()

    def _grow_schema(self) -> None:
        """Extend the table's schema by what this version of Rolltape adds (a newer minor version does)."""
        if not missing_fields(self._snapshot.schema_json):
            return
        from rolltape.store.delta import grow_schema

        try:
            grow_schema(self.table, delta_schema_json())
        except StoreError:
            # Another process that opened the lake at the same time may have done it.
            if missing_fields(self.snapshot().schema_json):
                raise
        self.log.sync()
        self.snapshot()


def _check_name(place: Location) -> None:
    """Refuse what delta-rs takes for another name: no checkpoint could ever be written."""
    if _OTHER_NAME.search(place.path) or (place.is_local and "\\" in place.path):
        raise ConfigError(
            f"expected a lake's name without %XX{' and backslash' if place.is_local else ''}, got {place}: readers of "
            "Delta tables take those for other characters; write the name as it is, not as part of a URL, or choose "
            "another"
        )


def _check_format(snapshot: Snapshot, place: Location) -> None:
    found = snapshot.configuration.get(FORMAT_PROPERTY)
    if found is None:
        raise LakeFormatError(f"expected a lake at {place}, found a Delta table without the property {FORMAT_PROPERTY}")
    if int(found.split(".")[0]) > FORMAT_MAJOR:
        raise LakeFormatError(
            f"expected a lake of format {FORMAT_MAJOR}.x at {place}, got {found}; install a newer Rolltape to open it"
        )


def _check_expected(
    snapshot: Snapshot, transactions: Mapping[str, int], expected: Mapping[str, int | None], place: Location
) -> None:
    for app, version in expected.items():
        found = snapshot.transactions.get(app)
        if found != version:
            raise CommitterFencedError(
                f"expected transaction {app} of {place} at {version}, found {found}: another committer wrote in "
                "between; stop this one, and start again from the lake's own marks"
            )
    for app, version in transactions.items():
        found = snapshot.transactions.get(app)
        if found is not None and version <= found:
            raise CommitterFencedError(
                f"expected transaction {app} of {place} above {found}, got {version}: that was committed before"
            )
