"""delta-rs: creating the table, checkpoints, commits in object stores, and a schema that grows.

The only module that imports ``deltalake``. Its runtime does not survive ``fork``: start processes with ``spawn``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction, Transaction, create_table_with_add_actions

from rolltape.schema.errors import StoreError
from rolltape.store.location import Location
from rolltape.store.snapshot import Snapshot
from rolltape.store.transaction_log import Actions

# Checkpoints and the cleaning of the log are maintenance, not a side effect of somebody's commit.
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


def _address(table: Location) -> str:
    return table.path if table.is_local else table.url


def _options(table: Location) -> dict[str, str]:
    return dict(table.storage_options)


def open_table(table: Location, version: int | None = None) -> DeltaTable:
    """A delta-rs handle on the table, at the newest version or the one named."""
    return DeltaTable(_address(table), version=version, storage_options=_options(table))


def create_table(table: Location, schema_json: str, configuration: Mapping[str, str]) -> bool:
    """Create an empty table; False where there is one already (also if another process made it just now)."""
    try:
        create_table_with_add_actions(
            _address(table),
            Schema.from_json(schema_json),
            [],
            mode="error",
            name="events",
            description="Rolltape: every event of the lake",
            configuration=dict(configuration),
            storage_options=_options(table),
        )
    except Exception:
        if DeltaTable.is_deltatable(_address(table), storage_options=_options(table)):
            return False
        raise
    return True


def set_properties(table: Location, properties: Mapping[str, str]) -> None:
    """Set table properties that Delta itself does not know (refused while a table is created, allowed afterwards)."""
    open_table(table).alter.set_table_properties(dict(properties), raise_if_not_exists=False)


def commit_remotely(table: Location, base: Snapshot, actions: Actions) -> bool:
    """Commit the version after ``base`` through delta-rs; False where another version took the place."""
    handle = open_table(table, base.version)
    now_ms = time.time_ns() // 1_000_000
    added = [
        AddAction(new.file.path, new.file.size_bytes, {}, now_ms, actions.data_change, new.stats)
        for new in actions.added
    ]
    removed = [RemoveAction(file.path, actions.data_change, now_ms, file.size_bytes) for file in actions.removed]
    transactions = [Transaction(app, version) for app, version in actions.transactions.items()]
    try:
        handle.create_write_transaction(
            [*removed, *added],
            mode="append",
            schema=handle.schema(),
            commit_properties=CommitProperties(app_transactions=transactions, max_commit_retries=0),
            post_commithook_properties=_NO_HOOKS,
        )
    except CommitFailedError:
        return False
    return True


def write_checkpoint(table: Location) -> int:
    """Write a checkpoint of the newest version; returns that version."""
    handle = open_table(table)
    handle.create_checkpoint()
    return handle.version()


def grow_schema(table: Location, schema_json: str) -> None:
    """Add the columns and nested fields that ``schema_json`` has and the table lacks.

    Raises:
        StoreError: delta-rs refuses the new schema.
    """
    fields: list[Field] = list(Schema.from_json(schema_json).fields)
    try:
        open_table(table).alter.add_columns(fields, post_commithook_properties=_NO_HOOKS)
    except Exception as error:
        raise StoreError(f"the schema of {table} could not be extended: {error}") from error
