"""The actions of the Delta transaction log: what one version says, as bytes and read back.

Written to the Delta protocol (https://github.com/delta-io/delta/blob/master/PROTOCOL.md): one action a line.
"""

from __future__ import annotations

import json
import time
import urllib.parse
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.errors import LakeFormatError
from rolltape.store.snapshot import DataFile, LogCommit

STATISTICS_COLUMNS: Final = ("kind", "log_topic", "log_partition", "log_offset", "run_id", "trajectory_id")

# What this code understands of the protocol: no column mapping, no deletion vectors, no V2 checkpoints.
MAX_READER_VERSION: Final = 1
MAX_WRITER_VERSION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A data file that was written and is to be committed; ``stats`` is the JSON that Delta keeps beside it."""

    file: DataFile
    stats: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What one commit is to say.

    ``data_change`` is false where the same rows only move to other files.
    """

    operation: str
    added: Sequence[NewFile] = ()
    removed: Sequence[DataFile] = ()
    transactions: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    data_change: bool = True


def commit_name(version: int) -> str:
    """File name of a version."""
    return f"{version:020d}.json"


# Statistics


class FileBounds:
    """A data file's statistics, gathered from the tables that are written to it one after the other."""

    def __init__(self) -> None:
        """Of no rows yet."""
        self.num_rows = 0
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self._nulls = dict.fromkeys(STATISTICS_COLUMNS, 0)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table."""
        self.num_rows += table.num_rows
        for name in STATISTICS_COLUMNS:
            column = table[name] if name in table.column_names else None
            self._nulls[name] += table.num_rows if column is None else column.null_count
            if column is not None and column.null_count < table.num_rows:
                bounds = pc.min_max(column).as_py()
                self._least[name] = min(bounds["min"], self._least.get(name, bounds["min"]))
                self._most[name] = max(bounds["max"], self._most.get(name, bounds["max"]))

    def describe(self, path: str, size_bytes: int, kind: str) -> NewFile:
        """The data file's bounds and statistics."""
        stats = {
            "numRecords": self.num_rows,
            "minValues": self._least,
            "maxValues": self._most,
            "nullCount": self._nulls,
        }
        file = _data_file(path, size_bytes, stats, kind)
        return NewFile(file=file, stats=json.dumps(stats, separators=(",", ":")))


def describe_file(path: str, size_bytes: int, kind: str, table: pa.Table) -> NewFile:
    """The data file's bounds and statistics, taken from the rows that were written to it."""
    bounds = FileBounds()
    bounds.add(table)
    return bounds.describe(path, size_bytes, kind)


def _data_file(path: str, size_bytes: int, stats: Mapping[str, Any], kind: str | None = None) -> DataFile:
    least, most = stats.get("minValues") or {}, stats.get("maxValues") or {}
    bounds: dict[str, Any] = {}
    for name in STATISTICS_COLUMNS[1:]:
        bounds[f"min_{name}"], bounds[f"max_{name}"] = least.get(name), most.get(name)
    found = kind or least.get("kind")
    if found is None or (kind is None and found != most.get("kind")):
        raise LakeFormatError(
            f"expected a data file of one kind with statistics, got {path!r}; it was not written by Rolltape"
        )
    return DataFile(path=path, size_bytes=size_bytes, num_rows=stats.get("numRecords", 0), kind=found, **bounds)


def added_file(add: Mapping[str, Any]) -> DataFile:
    """The data file that an ``add`` action names."""
    stats = json.loads(add.get("stats") or "{}")
    return _data_file(urllib.parse.unquote(add["path"]), add["size"], stats)


# Reading


def parse_commit(version: int, data: bytes) -> LogCommit:
    """Read the actions of one version."""
    added, new, removed = [], [], []
    transactions: dict[str, int] = {}
    table_id = schema_json = configuration = protocol = None
    for line in data.splitlines():
        if not line.strip():
            continue
        action = json.loads(line)
        if "add" in action:
            file = added_file(action["add"])
            added.append(file)
            if action["add"]["dataChange"]:
                new.append(file)
        elif "remove" in action:
            removed.append(urllib.parse.unquote(action["remove"]["path"]))
        elif "txn" in action:
            transactions[action["txn"]["appId"]] = action["txn"]["version"]
        elif "metaData" in action:
            table_id = action["metaData"]["id"]
            schema_json = action["metaData"]["schemaString"]
            configuration = MappingProxyType(action["metaData"].get("configuration") or {})
        elif "protocol" in action:
            protocol = MappingProxyType(action["protocol"])
    return LogCommit(
        version=version,
        added=tuple(added),
        new=tuple(new),
        removed=tuple(removed),
        transactions=MappingProxyType(transactions),
        table_id=table_id,
        schema_json=schema_json,
        configuration=configuration,
        protocol=protocol,
    )


def format_commit(actions: Actions) -> bytes:
    """The bytes of one version."""
    now_ms = time.time_ns() // 1_000_000
    lines: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": actions.operation,
                "operationParameters": {"mode": "Append"},
                "isBlindAppend": not actions.removed,
                "engineInfo": "rolltape",
                "txnId": str(uuid.uuid4()),
            }
        }
    ]
    lines += [
        {"txn": {"appId": app, "version": version, "lastUpdated": now_ms}}
        for app, version in actions.transactions.items()
    ]
    lines += [
        {
            "remove": {
                "path": file.path,
                "deletionTimestamp": now_ms,
                "dataChange": actions.data_change,
                "extendedFileMetadata": True,
                "partitionValues": {},
                "size": file.size_bytes,
            }
        }
        for file in actions.removed
    ]
    lines += [
        {
            "add": {
                "path": added.file.path,
                "partitionValues": {},
                "size": added.file.size_bytes,
                "modificationTime": now_ms,
                "dataChange": actions.data_change,
                "stats": added.stats,
            }
        }
        for added in actions.added
    ]
    return _lines(lines)


def format_creation(schema_json: str, configuration: Mapping[str, str], *, name: str, description: str) -> bytes:
    """The bytes of version 0 of an empty table."""
    now_ms = time.time_ns() // 1_000_000
    lines: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": now_ms, "operation": "CREATE TABLE", "engineInfo": "rolltape"}},
        {"protocol": {"minReaderVersion": MAX_READER_VERSION, "minWriterVersion": MAX_WRITER_VERSION}},
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "name": name,
                "description": description,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": schema_json,
                "partitionColumns": [],
                "configuration": dict(configuration),
                "createdTime": now_ms,
            }
        },
    ]
    return _lines(lines)


def _lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
