"""Dead letters as rows: what was refused, why, and what it accounts for (design §5.7)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rolltape.ingest.event_index import as_list
from rolltape.schema import reasons
from rolltape.schema.build import RefusedRow
from rolltape.schema.codec import Record, encode
from rolltape.schema.columns import TIMESTAMP_US
from rolltape.schema.cursor import Partition
from rolltape.schema.envelope import SCHEMA_VERSION
from rolltape.schema.errors import CodecError, HeaderMismatchError, SchemaVersionError, UnknownKindError
from rolltape.schema.identity import derived_id
from rolltape.schema.render import arrow_schema

ARROW_IPC: Final = "arrow_ipc"
JSON_LINE: Final = "json_line"
RAW: Final = "raw"

_KEPT_ENVELOPE: Final = (
    "run_id",
    "run_epoch",
    "tenant",
    "subject_id",
    "trajectory_id",
    "attempt",
    "group_id",
    "problem_id",
    "root_rollout_id",
    "segment_index",
    "turn_index",
    "recorded_at",
)
_ENVELOPE_TYPES: Final = {
    **dict.fromkeys(
        ("event_id", "tenant", "subject_id", "trajectory_id", "group_id", "problem_id", "root_rollout_id"), str
    ),
    **dict.fromkeys(("attempt", "segment_index", "turn_index", "event_index"), int),
}
UNKNOWN_RUN: Final = "unknown"


def reason_of(error: Exception) -> str:
    """The named reason for which a record that raised ``error`` is refused."""
    named = getattr(error, "reason", None)
    if isinstance(named, str):
        return named
    match error:
        case UnknownKindError():
            return reasons.UNKNOWN_KIND
        case SchemaVersionError():
            return reasons.SCHEMA_VERSION
        case UnicodeDecodeError():
            return reasons.BROKEN_UTF8
        case HeaderMismatchError():
            return reasons.HEADER_MISMATCH
        case CodecError() | pa.ArrowException():
            return reasons.TRUNCATED_PAYLOAD
        case _:
            return reasons.BAD_VALUE


def payload_fields(payload: bytes, payload_format: str, kind: str | None) -> dict[str, Any]:
    """The fields of a dead letter that keep the refused bytes."""
    return {
        "payload": payload,
        "payload_sha256": hashlib.sha256(payload).hexdigest(),
        "payload_kind": kind,
        "payload_format": payload_format,
    }


def letter_of_row(batch: pa.RecordBatch, row: int, *, kind: str, reason: str, detail: str) -> dict[str, Any]:
    """A dead letter of one decoded row: flat columns, without the writer's own lane."""
    single = batch.slice(row, 1)
    values = single.select(
        [name for name in (*_KEPT_ENVELOPE, "event_id", "event_index", "lane_seq") if name in batch.schema.names]
    )
    event = values.to_pylist()[0]
    lane_seq, event_index = event.pop("lane_seq", None), event.pop("event_index", None)
    return {
        **{name: value for name, value in event.items() if name != "event_id"},
        "event_id": derived_id("dead_letter", reason, event.get("event_id") or "", *_lane_parts(single)),
        "reason": reason,
        "detail": detail,
        "source_event_id": event.get("event_id"),
        "first_lane_seq": lane_seq,
        "last_lane_seq": lane_seq,
        "first_event_index": event_index,
        "last_event_index": event_index,
        **payload_fields(encode(single).to_pybytes(), ARROW_IPC, kind),
    }


def _lane_parts(single: pa.RecordBatch) -> list[str | int]:
    names = [name for name in ("producer_id", "producer_epoch", "lane_seq") if name in single.schema.names]
    values = single.select(names).to_pylist()[0]
    return [values[name] if values[name] is not None else "" for name in names]


def letters_of_record(record: Record, *, reason: str, detail: str) -> list[dict[str, Any]]:
    """Dead letters of a record whose payload cannot be read: one of each trajectory that its headers name.

    The first carries the bytes and the lane range, so both are there once.
    """
    headers = record.headers
    payload = bytes(memoryview(record.value))
    place = (headers.producer_id, headers.producer_epoch, record.topic, record.partition, headers.first_lane_seq)
    whole = {
        "run_id": UNKNOWN_RUN,
        "run_epoch": 0,
        "reason": reason,
        "detail": detail,
        **payload_fields(payload, ARROW_IPC if headers.codec.startswith("arrow") else RAW, headers.kind),
        "first_lane_seq": headers.first_lane_seq,
        "last_lane_seq": headers.last_lane_seq,
    }
    ranges: Sequence[tuple[str | None, int | None, int | None, int | None]]
    ranges = headers.event_ranges or ((None, None, None, None),)
    letters = [
        {
            **whole,
            "event_id": derived_id("dead_letter", reason, *place, number),
            "trajectory_id": trajectory_id,
            "attempt": attempt,
            "first_event_index": first,
            "last_event_index": last,
        }
        for number, (trajectory_id, attempt, first, last) in enumerate(ranges)
    ]
    for letter in letters[1:]:
        letter.update(payload=None, first_lane_seq=None, last_lane_seq=None)
    return letters


def letter_of_foreign(partition: Partition, offset: int, *, detail: str, payload: bytes) -> dict[str, Any]:
    """A dead letter of a message that is no record of ours: nothing is known of it but its place and its bytes."""
    return {
        "event_id": derived_id("dead_letter", reasons.FOREIGN_MESSAGE, *partition, offset),
        "run_id": UNKNOWN_RUN,
        "run_epoch": 0,
        "reason": reasons.FOREIGN_MESSAGE,
        "detail": detail,
        "source_topic": partition.topic,
        "source_partition": partition.partition,
        "source_offset": offset,
        **payload_fields(payload, RAW, None),
    }


def dead_letter_batch(letters: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows of kind ``dead_letter`` from flat columns; what a letter does not name is null."""
    schema = arrow_schema("dead_letter")
    fields = [field.name for field in schema.field("dead_letter").type.fields]
    columns = {
        name: pa.array([letter.get(name) for letter in letters], type=schema.field(name).type)
        for name in schema.names
        if name != "dead_letter"
    }
    columns["kind"] = pa.repeat(pa.scalar("dead_letter"), len(letters))
    columns["schema_version"] = pa.repeat(pa.scalar(SCHEMA_VERSION), len(letters))
    structs = [{name: letter.get(name) for name in fields} for letter in letters]
    columns["dead_letter"] = pa.array(structs, type=schema.field("dead_letter").type)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def microseconds(time_us: int, num_rows: int) -> pa.Array:
    """A ``recorded_at`` column of ``num_rows`` times the same clock reading."""
    return pa.repeat(pa.scalar(time_us, type=TIMESTAMP_US), num_rows)


def letter_of_refused_row(kind: str, refused: RefusedRow, columns: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """A dead letter of a row that could not even be built; what of its envelope is sound is kept."""
    values = {
        name: _sound(_value(columns[name], refused.row, num_rows), type_)
        for name, type_ in _ENVELOPE_TYPES.items()
        if name in columns
    }
    event_id, event_index = values.pop("event_id", None), values.pop("event_index", None)
    return {
        **values,
        "event_id": derived_id("dead_letter", refused.reason, event_id or "", refused.payload),
        "reason": refused.reason,
        "detail": refused.detail,
        "source_event_id": event_id,
        "first_event_index": event_index,
        "last_event_index": event_index,
        **payload_fields(refused.payload, refused.payload_format, kind),
    }


def _value(column: Any, row: int, num_rows: int) -> Any:
    return as_list(column, num_rows)[row]


def _sound(value: Any, type_: type) -> Any:
    """``value`` if a dead letter can carry it, else None."""
    if not isinstance(value, type_) or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return value if value.isascii() or value.encode(errors="replace").decode() == value else None
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else None
