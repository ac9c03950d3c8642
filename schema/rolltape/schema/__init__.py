"""What an event is. Needs pyarrow (and the numpy that comes beside it), nothing heavier."""

from rolltape.schema.build import Built, RefusedRow, build_batch, set_aside, with_columns
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
    "set_aside",
    "table_schema",
    "uuid7",
    "with_columns",
]
