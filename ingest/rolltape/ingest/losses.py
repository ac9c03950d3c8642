"""Losses of a lane that an operator accepts: as a dead letter of the archive's own, or as an event in the log."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.lanes import Lane
from rolltape.ingest.refused import UNKNOWN_RUN, payload_fields
from rolltape.schema import reasons
from rolltape.schema.identity import derived_id


class AcceptedLoss(NamedTuple):
    """Row ``row`` of a batch of dead letters accepts the loss of ``first`` to ``last`` of a lane."""

    row: int
    lane: Lane
    first: int
    last: int


def loss_letter(lane: Lane, first: int, through: int, *, time_us: int | None = None) -> dict[str, Any]:
    """The dead letter, as flat columns, that accounts for a lost range of a lane."""
    return {
        "event_id": derived_id("dead_letter", reasons.LANE_GAP_ACCEPTED, lane.app_id, first, through),
        "run_id": UNKNOWN_RUN,
        "run_epoch": 0,
        "recorded_at": time.time_ns() // 1000 if time_us is None else time_us,
        "reason": reasons.LANE_GAP_ACCEPTED,
        "detail": f"an operator accepted the loss of lane_seq {first} to {through} of lane {lane}",
        "source_topic": lane.topic,
        "source_partition": lane.partition,
        "source_producer_id": lane.producer_id,
        "source_producer_epoch": lane.producer_epoch,
        "first_lane_seq": first,
        "last_lane_seq": through,
        **payload_fields(b"", "raw", None),
    }


def accepted_losses(batch: pa.RecordBatch) -> list[AcceptedLoss]:
    """The rows of a batch of dead letters that accept a loss, as an operator's producer sent them."""
    letters = batch.column("dead_letter")
    reason = pc.struct_field(letters, "reason")
    rows = pc.indices_nonzero(pc.fill_null(pc.equal(reason, reasons.LANE_GAP_ACCEPTED), False)).to_pylist()
    found = []
    for row in rows:
        letter = letters[row].as_py()
        lane = Lane(
            letter["source_producer_id"] or "",
            letter["source_producer_epoch"] or 0,
            letter["source_topic"] or "",
            -1 if letter["source_partition"] is None else letter["source_partition"],
        )
        first, last = letter["first_lane_seq"], letter["last_lane_seq"]
        found.append(AcceptedLoss(row, lane, -1 if first is None else first, -1 if last is None else last))
    return found
