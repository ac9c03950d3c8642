"""The codec's public names: rows to bytes and back, records and their headers, conforming to today's schema."""

from rolltape.schema.conform import conform
from rolltape.schema.records import EventRange, Headers, Record, event_ranges, make_headers, make_record, record_of_lane
from rolltape.schema.stream import (
    CODEC,
    Written,
    decode,
    decode_written,
    encode,
    join_written,
    kind_of,
    parse_version,
    pruned,
    read_written,
)

__all__ = [
    "CODEC",
    "EventRange",
    "Headers",
    "Record",
    "Written",
    "conform",
    "decode",
    "decode_written",
    "encode",
    "event_ranges",
    "join_written",
    "kind_of",
    "make_headers",
    "make_record",
    "parse_version",
    "pruned",
    "read_written",
    "record_of_lane",
]
