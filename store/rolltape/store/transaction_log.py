"""The Delta transaction log: reading it version by version, and adding one version.

Written to the Delta protocol (https://github.com/delta-io/delta/blob/master/PROTOCOL.md): a version is the file
``_delta_log/<version>.json`` of one action a line, and it exists as a whole or not at all: it is put where nothing is
yet, by a hard link on a disk and by a conditional put in an object store. This costs a sync or a request, whatever the
table's size.

A version that was deleted (because a checkpoint took its place) looks like one that never was. Versions younger than
``SAFE_LOG_AGE_S`` are never deleted, so whoever knew the newest version less than half of that ago may trust that a
missing one is to come; after a longer time the newest checkpoint tells.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Final

import pyarrow.parquet as pq

from rolltape.schema.errors import LakeFormatError, LakeNotFoundError, StoreUnreachableError
from rolltape.store.beside import beside
from rolltape.store.location import Location
from rolltape.store.log_actions import (
    MAX_READER_VERSION,
    MAX_WRITER_VERSION,
    Actions,
    added_file,
    commit_name,
    format_commit,
    format_creation,
    parse_commit,
)
from rolltape.store.snapshot import EMPTY, DataFile, LogCommit, Snapshot

SAFE_LOG_AGE_S: Final = 60.0
_TRUST_S: Final = SAFE_LOG_AGE_S / 2

# How long a commit whose answer was lost is asked after before the committer is told.
UNCLEAR_S: Final = 60.0
# In an object store so many versions are asked for at once by a reader that is behind.
_MAX_AHEAD: Final = 16

_CHECKPOINT_NAME: Final = re.compile(r"^(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet$")
_COMMIT_NAME: Final = re.compile(r"^(\d{20})\.json$")


class TransactionLog:
    """The log of one table. Holds no state of the table (:class:`Snapshot` does), only when it last knew the newest."""

    def __init__(self, table: Location) -> None:
        self.table = table
        self.folder = table.child("_delta_log")
        # A look costs next to nothing on a disk.
        self._trust_s = 0.0 if table.is_local else _TRUST_S
        self._known_s = float("-inf")

    def exists(self) -> bool:
        """Whether there is a table."""
        return any(info.path.endswith((".json", ".parquet")) for info in self.folder.list())

    def sync(self) -> None:
        """Make every version durable that another writer than this one wrote: delta-rs syncs nothing."""
        if not self.table.is_local:
            return
        for info in self.folder.list():
            self.folder.child(info.path).sync()
        self.folder.sync()
        self.table.sync()

    def read_commit(self, version: int) -> LogCommit | None:
        """One version, or None where its file does not exist (not yet, or not any more)."""
        data = self.read_bytes(version)
        return None if data is None else parse_commit(version, data)

    def read_bytes(self, version: int) -> bytes | None:
        """The file of one version, or None."""
        try:
            return self.folder.child(commit_name(version)).read_bytes()
        except FileNotFoundError:
            return None

    def checkpoint_version(self) -> int:
        """The version that ``_last_checkpoint`` names, −1 where there is none."""
        try:
            return int(json.loads(self.folder.child("_last_checkpoint").read_bytes())["version"])
        except FileNotFoundError:
            return -1

    def commits_after(self, version: int) -> Iterator[LogCommit]:
        """The versions that follow ``version``, as far as their files go on without a gap."""
        if self.table.is_local:
            while (commit := self.read_commit(version + 1)) is not None:
                yield commit
                version = commit.version
            return
        num_ahead = 1
        while True:
            asked = [beside(self.read_commit, version + 1 + ahead) for ahead in range(num_ahead)]
            found = list(itertools.takewhile(lambda commit: commit is not None, (each.result() for each in asked)))
            for commit in found:
                assert commit is not None
                yield commit
            if len(found) < num_ahead:
                return
            version += num_ahead
            num_ahead = min(2 * num_ahead, _MAX_AHEAD)

    def load(self) -> Snapshot:
        """The newest snapshot, from the newest checkpoint and the versions after it.

        Raises:
            LakeNotFoundError: there is no log.
            LakeFormatError: the log has holes, or asks for a newer protocol.
        """
        names = [info.path for info in self.folder.list()]
        snapshot = _newest_checkpoint(self.folder, names)
        if snapshot is None:
            if not any(_COMMIT_NAME.match(name) for name in names):
                raise LakeNotFoundError(f"there is no lake at {self.table.parent()}; create one with Lake.create")
            snapshot = EMPTY
        snapshot = self.refresh(snapshot)
        if snapshot.version < 0 or not snapshot.schema_json:
            raise LakeFormatError(
                f"expected version 0 or a checkpoint in {self.folder}, found neither: log files are gone"
            )
        return snapshot

    def refresh(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with all later versions applied; loads anew where the log was cleaned past it."""
        before, started_s = snapshot, time.monotonic()
        for commit in self.commits_after(snapshot.version):
            snapshot = snapshot.after(commit)
        if snapshot.protocol is not before.protocol:
            check_protocol(snapshot.protocol, self.table)
        unsure = snapshot is before and before.version >= 0 and not self.may_trust()
        if unsure and self.cleaned_past(before.version):
            return self.load()
        self._known_s = started_s
        return snapshot

    def may_trust(self) -> bool:
        """Whether the newest version was known so lately that none after it can have been deleted since."""
        return time.monotonic() - self._known_s <= self._trust_s

    def cleaned_past(self, version: int) -> bool:
        """Whether the version after this one exists no more because a checkpoint took its place."""
        return self.checkpoint_version() > version and self.read_bytes(version + 1) is None

    # Writing

    def create(self, schema_json: str, configuration: Mapping[str, str], *, name: str, description: str) -> bool:
        """Create an empty table, durably; False where there is one already (also if another made it just now)."""
        self.folder.make_folder()
        data = format_creation(schema_json, configuration, name=name, description=description)
        return self.folder.child(commit_name(0)).write_if_absent(data)

    def try_commit(self, base: Snapshot, actions: Actions) -> LogCommit | None:
        """Make the files durable and add the version after ``base``; returns it.

        None where somebody else's version stands there, or where a vacuum took a file meanwhile. A name that is taken
        by these very bytes counts as done: an answer that was lost is asked after, by the same bytes again.

        Raises:
            StoreUnreachableError: no answer for long; the version may be there. A new snapshot tells.
        """
        version, data = base.version + 1, format_commit(actions)
        # One wait for the disk in place of one a file: all that the version names is synced while it is written.
        syncs = (
            [] if not self.table.is_local else [beside(self.table.child(new.file.path).sync) for new in actions.added]
        )
        syncs += [beside(self.table.sync)] if syncs else []
        started_s = time.monotonic()
        try:
            done = self._put_version(version, data, syncs)
        except FileNotFoundError:
            return None
        if not done:
            return None
        self._check_no_hole(version)
        self._known_s = started_s
        return parse_commit(version, data)

    def _put_version(self, version: int, data: bytes, syncs: Sequence[Future[None]]) -> bool:
        """Whether the version is these bytes, asked again and again while the store does not answer."""
        place = self.folder.child(commit_name(version))
        deadline = time.monotonic() + UNCLEAR_S
        for pause_s in _pauses():
            try:
                return place.write_if_absent(data, lambda: [s.result() for s in syncs]) or place.read_bytes() == data
            except StoreUnreachableError:
                if time.monotonic() + pause_s > deadline:
                    raise
                time.sleep(pause_s)
        raise AssertionError

    def _check_no_hole(self, version: int) -> None:
        """Make sure that a version that was just added follows the newest one, and fills no hole of a cleaned log.

        Where a checkpoint is beyond it nobody needs its file, so it may go in either case.
        """
        in_time = time.monotonic() - self._known_s <= _TRUST_S
        if in_time or self.checkpoint_version() <= version:
            return
        self.folder.child(commit_name(version)).delete()
        raise StoreUnreachableError(
            f"version {version} of {self.table} was added so late that others may have cleaned the log past it; "
            "nothing acknowledged was lost: take the newest snapshot, and commit again what it lacks"
        )


def _pauses() -> Iterator[float]:
    """Seconds to wait between tries: from 0.1 to 2, doubling, with jitter."""
    for number in itertools.count():
        yield min(2.0, 0.1 * 2**number) * random.uniform(0.5, 1.0)  # noqa: S311 (jitter, no secret)


def check_protocol(protocol: Mapping[str, Any], table: Location) -> None:
    """Refuse a table that asks for more than this code understands.

    Raises:
        LakeFormatError: with what the table asks for.
    """
    reader, writer = protocol.get("minReaderVersion", 0), protocol.get("minWriterVersion", 0)
    if reader > MAX_READER_VERSION or writer > MAX_WRITER_VERSION:
        raise LakeFormatError(
            f"expected Delta reader/writer versions up to {MAX_READER_VERSION}/{MAX_WRITER_VERSION} at {table}, "
            f"got {reader}/{writer}; read it with a newer Rolltape"
        )


# Checkpoints


def _newest_checkpoint(folder: Location, names: Iterable[str]) -> Snapshot | None:
    parts: dict[tuple[int, int], list[str]] = {}
    for name in names:
        match = _CHECKPOINT_NAME.match(name)
        if match:
            version, _, count = match.groups()
            parts.setdefault((int(version), int(count or 1)), []).append(name)
    whole = [key for key, found in parts.items() if len(found) == key[1]]
    if not whole:
        return None
    newest = max(whole)
    return _read_checkpoint([folder.child(name) for name in sorted(parts[newest])], newest[0], folder.parent())


def _read_checkpoint(files: Sequence[Location], version: int, table: Location) -> Snapshot:
    rows: list[dict[str, Any]] = []
    wanted = {
        "txn": ("appId", "version"),
        "add": ("path", "size", "stats"),
        "metaData": ("id", "schemaString", "configuration"),
        "protocol": ("minReaderVersion", "minWriterVersion"),
    }
    for location in files:
        file = pq.ParquetFile(location.open_input())
        present = set(file.schema_arrow.names)
        columns = [f"{name}.{leaf}" for name, fields in wanted.items() if name in present for leaf in fields]
        rows += file.read(columns=columns).to_pylist()
    by_kind: dict[str, list[DataFile]] = {}
    transactions: dict[str, int] = {}
    metadata: dict[str, Any] = {}
    protocol: dict[str, Any] = {}
    for row in rows:
        if (row.get("add") or {}).get("path") is not None:
            added = added_file(row["add"])
            by_kind.setdefault(added.kind, []).append(added)
        elif (row.get("txn") or {}).get("appId") is not None:
            transactions[row["txn"]["appId"]] = row["txn"]["version"]
        elif (row.get("metaData") or {}).get("schemaString") is not None:
            metadata = row["metaData"]
        elif (row.get("protocol") or {}).get("minReaderVersion") is not None:
            protocol = row["protocol"]
    check_protocol(protocol, table)
    return Snapshot(
        version=version,
        by_kind=MappingProxyType({kind: tuple(found) for kind, found in by_kind.items()}),
        transactions=MappingProxyType(transactions),
        table_id=metadata.get("id", ""),
        schema_json=metadata.get("schemaString", ""),
        configuration=MappingProxyType(dict(metadata.get("configuration") or ())),
        protocol=MappingProxyType(protocol),
    )
