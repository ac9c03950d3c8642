"""Dead letters: what was refused, looked at and sent again; and gaps whose loss an operator accepts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import pyarrow as pa

from rolltape.ingest.lanes import Lane
from rolltape.ingest.log import EventLog
from rolltape.ingest.losses import loss_letter
from rolltape.ingest.recorder import Recorder
from rolltape.ingest.refused import ARROW_IPC, JSON_LINE, UNKNOWN_RUN, dead_letter_batch
from rolltape.ingest.repairs import Repair, repair_named
from rolltape.ingest.spool_layout import LOSSES, make_folder, sync_folder
from rolltape.schema.build import build_batch
from rolltape.schema.codec import decode, make_record
from rolltape.schema.envelope import STAMPED_BY_LOG, STAMPED_BY_RECORDER
from rolltape.schema.errors import CodecError, ConfigError, ValidationError
from rolltape.schema.identity import derived_id
from rolltape.schema.jsonline import from_json_line
from rolltape.schema.kinds import Topic
from rolltape.schema.validate import Limits, validate
from rolltape.store.lake import Lake

PRODUCER_ID: Final = "redrive"
"""Who sends repaired events. One at a time: its lock is a producer's."""

_STAMPS: Final = frozenset({*STAMPED_BY_LOG, *STAMPED_BY_RECORDER, "extensions"})
_DRAIN_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One dead letter.

    ``fields`` are the columns of the kind (see docs/events.md), ``redriven_as`` the ids of the events that replaced it.
    """

    event_id: str
    run_id: str
    run_epoch: int
    trajectory_id: str | None
    attempt: int | None
    reason: str
    detail: str
    fields: Mapping[str, Any]
    redriven_as: tuple[str, ...] = ()

    @property
    def payload(self) -> bytes:
        """The refused bytes."""
        return self.fields["payload"] or b""


def list_dead_letters(lake: Lake, *, run_id: str | None = None, redriven: bool = False) -> list[DeadLetter]:
    """Dead letters in log order; those that were redriven only where ``redriven`` is true."""
    letters = _letters(lake, run_id)
    return [letter for letter in letters if redriven or not letter.redriven_as]


def _letters(lake: Lake, run_id: str | None) -> list[DeadLetter]:
    tables = lake.events(("dead_letter", "dead_letter_redriven"))
    replaced = {
        row["dead_letter_redriven"]["dead_letter_event_id"]: tuple(
            row["dead_letter_redriven"]["replacement_event_ids"] or ()
        )
        for row in tables["dead_letter_redriven"].to_pylist()
    }
    return [
        DeadLetter(
            event_id=row["event_id"],
            run_id=row["run_id"],
            run_epoch=row["run_epoch"],
            trajectory_id=row["trajectory_id"],
            attempt=row["attempt"],
            reason=row["dead_letter"]["reason"],
            detail=row["dead_letter"]["detail"] or "",
            fields=row["dead_letter"],
            redriven_as=replaced.get(row["event_id"], ()),
        )
        for row in tables["dead_letter"].to_pylist()
        if run_id is None or row["run_id"] == run_id
    ]


def redrive(
    log: EventLog,
    lake: Lake,
    dead_letter_event_id: str,
    repair: str | Repair | None = None,
    *,
    repaired_by: str | None = None,
    limits: Limits | None = None,
    timeout_s: float = 60.0,
) -> tuple[str, ...]:
    """Send the events of a dead letter again, repaired; returns their ids once they are logged.

    ``repair`` is the name of a rule (:data:`rolltape.ingest.repairs.REPAIRS`) or a function from an event's flat
    columns to the repaired ones; None sends them as they are (after an upgrade made them readable, say). The rule is
    recorded in ``dead_letter_redriven``, and what the dead letter had closed opens again. Doing it twice adds nothing.

    Raises:
        ValidationError: no such dead letter or rule, the rule does not apply, or the result breaks its spec.
        CodecError: the bytes cannot be read as events.
        ProducerFencedError: another redrive is at work.
        FlushTimeout: not proven logged, or what is logged not archived, in time; do it again to complete it.
    """
    letter = _find(lake, dead_letter_event_id)
    if letter.redriven_as:
        return letter.redriven_as
    rule = repair_named(repair) if isinstance(repair, str) else repair
    events = [rule(event) if rule else event for event in read_payload(letter)]
    kind = str(letter.fields["payload_kind"])
    _check(kind, events, limits or Limits())
    _send(log, lake, letter, kind, events, _name(repair), repaired_by, limits, timeout_s)
    return tuple(_replacement_ids(letter, len(events)))


def _find(lake: Lake, event_id: str) -> DeadLetter:
    for letter in _letters(lake, None):
        if letter.event_id == event_id:
            return letter
    raise ValidationError(
        f"expected the event id of a dead letter in {lake.location}, got {event_id!r}; list_dead_letters shows them"
    )


def _name(repair: str | Repair | None) -> str:
    if repair is None:
        return "none"
    return repair if isinstance(repair, str) else getattr(repair, "__name__", repr(repair))


def _replacement_ids(letter: DeadLetter, num_events: int) -> list[str]:
    return [derived_id("redriven", letter.event_id, number) for number in range(num_events)]


def read_payload(letter: DeadLetter) -> list[dict[str, Any]]:
    """The refused events as flat columns, without the stamps of recorder and log.

    Raises:
        CodecError: the bytes are no events: truncated, or of a kind or version that this release does not read.
    """
    kind, form = letter.fields["payload_kind"], letter.fields["payload_format"]
    if hashlib.sha256(letter.payload).hexdigest() != letter.fields["payload_sha256"]:
        raise CodecError(
            f"expected a payload with SHA-256 {letter.fields['payload_sha256']}, got other bytes in dead letter "
            f"{letter.event_id}"
        )
    if form == JSON_LINE and kind:
        return [_without_stamps(from_json_line(kind, letter.payload))]
    if form == ARROW_IPC and kind:
        return [_flat(row, kind) for row in decode(letter.payload, kind=kind).to_pylist()]
    raise CodecError(
        f"expected a payload of events as {ARROW_IPC} or {JSON_LINE}, got {form} of kind {kind!r} in dead letter "
        f"{letter.event_id}; it can only be looked at"
    )


def _flat(row: dict[str, Any], kind: str) -> dict[str, Any]:
    return _without_stamps({**row, **(row[kind] or {})}, kind)


def _without_stamps(event: Mapping[str, Any], kind: str = "") -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in _STAMPS and name != kind and value is not None}


def _check(kind: str, events: list[dict[str, Any]], limits: Limits) -> None:
    """Refuse before anything is sent: a repaired event that is still wrong must not become the next dead letter."""
    for number, event in enumerate(events):
        stamps = {
            **dict.fromkeys(("event_id", "run_id", "producer_id"), "check"),
            "run_epoch": 0,
            "producer_epoch": 1,
            "lane_seq": 0,
        }
        built = build_batch(
            kind, {name: [value] for name, value in {**event, **stamps, "recorded_at": _EPOCH_START}.items()}, 1
        )
        problems = [*built.refused, *(validate(built.batch, limits) if built.batch.num_rows else ())]
        if problems:
            raise ValidationError(
                f"expected a repaired {kind} that keeps its spec, got {problems[0].reason} in event {number}: "
                f"{problems[0].detail}; nothing was sent, choose another repair"
            )


_EPOCH_START: Final = pa.scalar(0, pa.timestamp("us", tz="UTC")).as_py()


def _send(
    log: EventLog,
    lake: Lake,
    letter: DeadLetter,
    kind: str,
    events: list[dict[str, Any]],
    repair: str,
    repaired_by: str | None,
    limits: Limits | None,
    timeout_s: float,
) -> None:
    with Recorder(
        log, producer_id=PRODUCER_ID, run_id=letter.run_id, run_epoch=letter.run_epoch, limits=limits
    ) as recorder:
        # What an earlier try spooled is logged and archived before it is asked what is there already.
        recorder.wait_for_older_epochs(_DRAIN_TIMEOUT_S)
        log.wait_until_archived(_DRAIN_TIMEOUT_S)
        ids = _replacement_ids(letter, len(events))
        present = set(lake.read(kind, columns=["event_id"])["event_id"].to_pylist()) & set(ids)
        for event_id, event in zip(ids, events, strict=True):
            if event_id not in present:
                recorder.record(kind, **{**event, "event_id": event_id})
        recorder.record(
            "dead_letter_redriven",
            event_id=derived_id("dead_letter_redriven", letter.event_id),
            trajectory_id=letter.trajectory_id,
            attempt=letter.attempt,
            dead_letter_event_id=letter.event_id,
            replacement_event_ids=ids,
            repair=repair,
            repaired_by=repaired_by,
        )
        recorder.flush("logged", timeout_s)


def accept_loss(lake: Lake, lane: Lane, through: int) -> None:
    """Accept that ``lane_seq`` up to ``through`` of a lane that stands still are lost.

    Durable when this returns; the lake's committer turns it into a dead letter that names the range, and the lane goes
    on. It is asked for in the spool of this machine, so run it where the committer runs.
    """
    folder = lake.spool_path / LOSSES
    make_folder(folder)
    name = hashlib.sha256(f"{lane.app_id} {through}".encode()).hexdigest()[:32]
    temporary = folder / f"{name}.new"
    with temporary.open("w") as file:
        json.dump({"lane": list(lane), "through": through}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / f"{name}.json")
    sync_folder(folder)


def accept_loss_in_log(log: EventLog, lane: Lane, through: int, *, first: int, timeout_s: float = 60.0) -> str:
    """Accept that ``lane_seq`` ``first`` to ``through`` of a lane that stands still are lost; returns the event's id.

    For logs that several archive and read (Kafka): the acceptance is an event in the lane's own partition, and whoever
    reads it closes the gap, at the same place. It must name the gap exactly, as its alarm does; another range is
    refused as a dead letter. Logged when this returns.

    Raises:
        FlushTimeout: not proven logged in time; do it again.
        ConfigError: a range without numbers.
    """
    if not 0 <= first <= through:
        raise ConfigError(f"expected a range of lane_seq such as 4 to 7, got {first} to {through}")
    letter = loss_letter(lane, first, through)
    # A producer of its own: operators on two machines do not share a spool.
    with contextlib.closing(log.producer(f"loss-{letter['event_id']}")) as producer:
        stamps = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch, "lane_seq": 0}
        record = make_record(dead_letter_batch([{**letter, **stamps}]), partition=lane.partition)
        producer.send(replace(record, topic=cast("Topic", lane.topic)))
        producer.flush("logged", timeout_s)
    return str(letter["event_id"])


__all__ = [
    "UNKNOWN_RUN",
    "DeadLetter",
    "accept_loss",
    "accept_loss_in_log",
    "list_dead_letters",
    "read_payload",
    "redrive",
]
