"""What an event is. Needs pyarrow (and the numpy that comes beside it), nothing heavier.

The names below are imported when they are first asked for: the command line's ``--help`` needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rolltape.schema.build import Built, RefusedRow, build_batch, with_columns
    from rolltape.schema.codec import Headers, Record, conform, decode, encode, make_record
    from rolltape.schema.cursor import Cursor, Partition
    from rolltape.schema.digest import content_digests, prefix_digest
    from rolltape.schema.envelope import SCHEMA_VERSION
    from rolltape.schema.identity import derived_id, uuid7
    from rolltape.schema.kinds import KINDS, TOPICS, kind_named
    from rolltape.schema.render import arrow_schema, table_schema

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "TOPICS",
    "Built",
    "Cursor",
    "Headers",
    "Partition",
    "Record",
    "RefusedRow",
    "arrow_schema",
    "build_batch",
    "conform",
    "content_digests",
    "decode",
    "derived_id",
    "encode",
    "kind_named",
    "make_record",
    "prefix_digest",
    "table_schema",
    "uuid7",
    "with_columns",
]

_PLACES: Final = {
    "Built": "build",
    "Cursor": "cursor",
    "Headers": "codec",
    "KINDS": "kinds",
    "Partition": "cursor",
    "Record": "codec",
    "RefusedRow": "build",
    "SCHEMA_VERSION": "envelope",
    "TOPICS": "kinds",
    "arrow_schema": "render",
    "build_batch": "build",
    "conform": "codec",
    "content_digests": "digest",
    "decode": "codec",
    "derived_id": "identity",
    "encode": "codec",
    "kind_named": "kinds",
    "make_record": "codec",
    "prefix_digest": "digest",
    "table_schema": "render",
    "uuid7": "identity",
    "with_columns": "build",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
