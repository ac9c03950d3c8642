"""Alarms about lanes that stand still, as rows: staged by an archive, or sent by a sink as an event."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from rolltape.ingest.lanes import Gap
from rolltape.ingest.refused import UNKNOWN_RUN
from rolltape.schema.codec import Record, make_record
from rolltape.schema.envelope import SCHEMA_VERSION
from rolltape.schema.identity import derived_id
from rolltape.schema.render import arrow_schema

_ALARM: Final = "alarm_raised"


def alarm_batch(gap: Gap, event_id: str, time_us: int, stamps: dict[str, Any]) -> pa.RecordBatch:
    """The alarm about a gap; ``stamps`` are its lane and, where the archive numbers, its place in the log."""
    row = {
        "event_id": event_id,
        "kind": _ALARM,
        "schema_version": SCHEMA_VERSION,
        "run_id": UNKNOWN_RUN,
        "run_epoch": 0,
        "recorded_at": time_us,
        _ALARM: {
            "alarm": "lane_gap",
            "severity": "error",
            "value": float(gap.last - gap.first + 1),
            "detail": str(gap),
        },
        **stamps,
    }
    return pa.RecordBatch.from_pylist([row], schema=arrow_schema(_ALARM))


def alarm_record(gap: Gap, time_us: int) -> Record:
    """The alarm as a record of a lane that is the alarm's alone: whoever sends it again sends the same bytes."""
    event_id = derived_id(_ALARM, "lane_gap", gap.lane.app_id, gap.first, gap.last)
    stamps = {"producer_id": f"alarm-{event_id}", "producer_epoch": 1, "lane_seq": 0}
    return make_record(alarm_batch(gap, event_id, time_us, stamps))
