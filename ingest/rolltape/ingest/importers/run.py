"""The act of importing: a file's rows become events of a run of their own, each at most once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.importers.formats import ImportFormat, detect_format, format_named
from rolltape.ingest.importers.reading import canonical_json
from rolltape.ingest.importers.rows import EventRows, Ids
from rolltape.ingest.importers.source import MalformedRowError, Row, Source
from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.schema import reasons
from rolltape.schema.cursor import Cursor
from rolltape.schema.kinds import KINDS
from rolltape.store.lake import Lake

_CHUNK_EVENTS: Final = 4096
_DRAIN_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import did.

    ``num_events`` are those that the file holds, ``num_new`` those of them that this call added; ``refused`` counts
    dead letters of this call by reason.
    """

    run_id: str
    format_name: str
    file_name: str
    file_sha256: str
    num_rows: int
    num_trajectories: int
    num_events: int
    num_new: int
    refused: Mapping[str, int]


@dataclass(slots=True)
class _Progress:
    """Counters of one import while it runs, the ids that it met, and those that need not be recorded any more."""

    known: set[str]
    seen: set[str] = field(default_factory=set)
    num_rows: int = 0
    num_trajectories: int = 0
    num_events: int = 0
    num_new: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def import_file(
    target: EventLog | Lake,
    path: str,
    *,
    format: str | None = None,  # noqa: A002  # the word of the command line
    timeout_s: float = 600.0,
) -> ImportReport:
    """Record the rollouts or problems in a file as events of the run ``import-<digest of the file>``.

    The same bytes make the same run and the same event ids: what the log holds already is left out, so importing again
    adds nothing, and completes an import that was killed. Returns once all is logged. A row that cannot be read is a
    dead letter and the rest goes on.

    Args:
        target: the log that the events go to, or a lake: its embedded log is then opened for the import.
        path: path or URL of the file.
        format: a name of ``FORMATS``; told from the first row when None.
        timeout_s: time allowed for the events to be logged, seconds.

    Raises:
        ConfigError: there is no such file, or no format knows it.
        ProducerFencedError: another process imports the same file on this machine.
        FlushTimeout: not proven logged in time; run it again to complete it.
    """
    source = Source.open(path)
    entry = detect_format(source) if format is None else format_named(format)
    if isinstance(target, Lake):
        with EmbeddedLog(target) as log:
            return _import(log, source, entry, timeout_s)
    return _import(target, source, entry, timeout_s)


def _import(log: EventLog, source: Source, entry: ImportFormat, timeout_s: float) -> ImportReport:
    with Recorder(log, producer_id=source.run_id, run_id=source.run_id) as recorder:
        recorder.wait_for_older_epochs(_DRAIN_TIMEOUT_S)
        progress = _Progress(known=_known_event_ids(log, source.run_id))
        for rows in _chunks(source, entry, progress):
            _record(recorder, rows, progress)
        recorder.flush("logged", timeout_s)
    return ImportReport(
        run_id=source.run_id,
        format_name=entry.name,
        file_name=source.name,
        file_sha256=source.sha256,
        num_rows=progress.num_rows,
        num_trajectories=progress.num_trajectories,
        num_events=progress.num_events,
        num_new=progress.num_new,
        refused=dict(progress.refused),
    )


def _chunks(source: Source, entry: ImportFormat, progress: _Progress) -> Iterator[EventRows]:
    """Events of the file in order, some thousands at a time, so that memory does not grow with the file."""
    ids = Ids(source.sha256)
    chunk = EventRows()
    _add_run(ids, source, entry, chunk)
    for row in source.rows():
        progress.num_rows += 1
        chunk.extend(_convert(ids, row, entry))
        if len(chunk) >= _CHUNK_EVENTS:
            yield chunk
            chunk = EventRows()
    yield chunk


def _convert(ids: Ids, row: Row, entry: ImportFormat) -> EventRows:
    """The events of one row, or the one dead letter that stands for it."""
    rows = EventRows()
    try:
        entry.convert(ids, row.number, row.document(), rows)
    except MalformedRowError as error:
        return _dead_letter(ids, row, error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The row comes from elsewhere: a shape that the format does not have is its fault, and must not stop the rest.
        return _dead_letter(ids, row, _malformed(row, error))
    return rows


def _malformed(row: Row, error: Exception) -> MalformedRowError:
    reason = reasons.BAD_VALUE
    if isinstance(error, OverflowError):
        reason = reasons.ID_OVERFLOW
    elif isinstance(error, UnicodeError):
        reason = reasons.BROKEN_UTF8
    detail = f"expected row {row.number} to have the shape of its format, got {type(error).__name__}: {error}"
    return MalformedRowError(reason, detail)


def _add_run(ids: Ids, source: Source, entry: ImportFormat, rows: EventRows) -> None:
    first = source.first_document()
    config = canonical_json({"format": entry.name, "file": source.name})
    rows.add(
        "run_started",
        event_id=ids.of("event", "run"),
        purpose="import",
        config_json=config,
        config_digest=f"sha256:{hashlib.sha256(config.encode()).hexdigest()}",
        model_name=None if first is None else entry.model_name(first),
        input_files=[{"name": source.name, "digest": f"sha256:{source.sha256}"}],
    )


def _dead_letter(ids: Ids, row: Row, error: MalformedRowError) -> EventRows:
    rows = EventRows()
    rows.add(
        "dead_letter",
        event_id=ids.of("event", row.number, "dead_letter"),
        reason=error.reason,
        detail=error.detail,
        payload=row.payload,
        payload_sha256=hashlib.sha256(row.payload).hexdigest(),
        payload_format="json_line",
    )
    return rows


def _record(recorder: Recorder, rows: EventRows, progress: _Progress) -> None:
    distinct = rows.take_new(progress.seen)
    progress.num_events += len(distinct)
    progress.num_trajectories += distinct.count("rollout_started")
    for kind, columns, num_rows in distinct.take_new(progress.known).batches():
        receipt = recorder.record_batch(kind, columns, num_rows)
        progress.num_new += num_rows
        progress.refused.update(refused.reason for refused in receipt.refused)
        if kind == "dead_letter":
            progress.refused.update(columns["reason"])


def _known_event_ids(log: EventLog, run_id: str) -> set[str]:
    """Ids of the run's events that are logged, and those that its dead letters stand for."""
    known: set[str] = set()
    for table in _tables_of_run(log, run_id):
        known.update(table["event_id"].to_pylist())
        if "dead_letter" in table.column_names:
            letters = table["dead_letter"].combine_chunks()
            known.update(filter(None, letters.field("source_event_id").to_pylist()))
    return known


def _tables_of_run(log: EventLog, run_id: str) -> Iterator[Any]:
    """Tables with ``event_id`` (and ``dead_letter``) of the run's events, one kind each.

    A lake prunes files by run; of another log everything is read.
    """
    if isinstance(log, EmbeddedLog):
        for kind in KINDS:
            columns = ["event_id", "dead_letter"] if kind == "dead_letter" else ["event_id"]
            yield log.lake.read(kind, columns=columns, run_id=run_id)
        return
    import pyarrow.compute as pc

    reader = log.reader(Cursor())
    end = log.end()
    try:
        while any(not reader.cursor.covers(partition, end[partition] - 1) for partition in end if end[partition]):
            for delivery in reader.poll(_POLL_S):
                yield delivery.table.filter(pc.equal(delivery.table["run_id"], run_id))
    finally:
        reader.close()
