"""The codec's public names: rows to bytes and back, records and their headers, conforming to today's schema."""

from rolltape.schema.conform import conform
from rolltape.schema.records import EventRange, Headers, Record, event_ranges, make_headers, make_record, record_of_lane
from rolltape.schema.stream import CODEC, decode, encode, kind_of, parse_version, pruned

__all__ = [
    "CODEC",
    "EventRange",
    "Headers",
    "Record",
    "conform",
    "decode",
    "encode",
    "event_ranges",
    "kind_of",
    "make_headers",
    "make_record",
    "parse_version",
    "pruned",
    "record_of_lane",
]
