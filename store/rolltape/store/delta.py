"""delta-rs: checkpoints, and a schema that grows.

The only module that imports ``deltalake``. Its runtime does not survive ``fork``: start processes with ``spawn``.
"""

from __future__ import annotations

import contextlib
import os
import re
import string
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

from deltalake import DeltaTable, Field, PostCommitHookProperties, Schema
from deltalake.exceptions import DeltaError

from rolltape.schema.errors import StoreError, StoreUnreachableError
from rolltape.store.location import Location

# Checkpoints and the cleaning of the log are maintenance, not a side effect of somebody's commit.
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

# What a store answered, in what delta-rs says; the rest of it may quote a key.
_ANSWER: Final = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_NO_ANSWER: Final = ("error sending request", "timed out", "retry_timeout", "status code: 5", "connection")

# What a URL of a key may hold unquoted: delta-rs would read ``#`` and ``?`` as the key's end.
_AS_IT_IS: Final = "".join(character for character in string.punctuation if character not in "#?%")

_PID: Final = os.getpid()


def open_table(table: Location, version: int | None = None) -> DeltaTable:
    """A delta-rs handle on the table, at the newest version or the one named."""
    with _errors(table):
        address = table.path if table.is_local else quote(table.url, safe=_AS_IT_IS)
        return DeltaTable(address, version=version, storage_options=table.storage_options)


def write_checkpoint(table: Location) -> int:
    """Write a checkpoint of the newest version; returns that version."""
    handle = open_table(table)
    with _errors(table):
        handle.create_checkpoint()
    return handle.version()


def grow_schema(table: Location, schema_json: str) -> None:
    """Add the columns and nested fields that ``schema_json`` has and the table lacks.

    Raises:
        StoreError: delta-rs refuses the new schema.
    """
    fields: list[Field] = list(Schema.from_json(schema_json).fields)
    handle = open_table(table)
    with _errors(table):
        handle.alter.add_columns(fields, post_commithook_properties=_NO_HOOKS)


@contextlib.contextmanager
def _errors(table: Location) -> Iterator[None]:
    """Raise what delta-rs complains of as an error of the store, without what an object store quoted."""
    if os.getpid() != _PID:
        raise StoreError(
            f"{table} cannot be maintained by a forked process: delta-rs does not survive that; start processes with "
            "the 'spawn' method"
        )
    try:
        yield
    except (DeltaError, OSError) as error:
        said = str(error)
        answer = _ANSWER.search(said)
        short = ": ".join(part for part in answer.groups() if part) if answer else said.split("\n", 1)[0][:300]
        kind = StoreUnreachableError if any(sign in said.lower() for sign in _NO_ANSWER) else StoreError
        raise kind(f"delta-rs failed at {table}: {short}") from (error if table.is_local else None)
