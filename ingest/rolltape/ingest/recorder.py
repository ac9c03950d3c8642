"""The recorder: the only way in which events are made.

It numbers, stamps and validates events, spools them as records of the log, and slows its caller down where the log
does not keep up. Events are handed over one at a time or, much cheaper, as columns of many trajectories' events at
once. A row that breaks its spec becomes a dead letter in its place; the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from rolltape.ingest.coalesce import Coalescer, LaneBatch, own, weight
from rolltape.ingest.encoder import Outbox
from rolltape.ingest.event_index import AttemptCounters, as_list, attempts_of
from rolltape.ingest.log import EventLog, Level, LogProducer
from rolltape.ingest.refused import dead_letter_batch, letter_of_refused_row, letter_of_row, microseconds
from rolltape.ingest.routing import Spread, partition_of, rows_by_partition, spread
from rolltape.schema.build import RefusedRow, build_batch, rows_of, with_columns
from rolltape.schema.codec import make_record, pruned
from rolltape.schema.convert import is_plain
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    BackpressureTimeout,
    ConfigError,
    RolltapeError,
    StorageFullError,
    ValidationError,
)
from rolltape.schema.identity import uuid7_many
from rolltape.schema.kinds import Kind, kind_named
from rolltape.schema.validate import Limits, validate

_RETRY_S: Final = 0.005
_FULL_DISK_RETRY_S: Final = 0.1
_ENCODING_S: Final = 0.002
_LOOKS_IN_VAIN: Final = 20
_OURS: Final = frozenset({"kind", "schema_version", "run_id", "run_epoch", "producer_id", "producer_epoch", "lane_seq"})
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What :meth:`Recorder.record_batch` did: the id of each row's event, and the rows that became dead letters."""

    event_ids: list[str]
    refused: tuple[RefusedRow, ...] = ()


class Recorder:
    """Records the events of one producer. Threads may share it.

    ``max_unacknowledged_bytes`` bounds what the log does not have yet: beyond it recording waits, at most
    ``backpressure_timeout_s``. ``limits`` are those of validation, ``vocab_size`` among them.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        producer_id: str,
        run_id: str,
        run_epoch: int = 1,
        limits: Limits | None = None,
        tenant: str | None = None,
        max_unacknowledged_bytes: int = 256 << 20,
        backpressure_timeout_s: float = 60.0,
    ) -> None:
        """Open the producer.

        Raises:
            ProducerFencedError: another live writer uses this producer id.
            ConfigError: a bound that is not above 0.
        """
        if max_unacknowledged_bytes <= 0 or backpressure_timeout_s < 0:
            raise ConfigError(
                "max_unacknowledged_bytes, backpressure_timeout_s: expected more than 0 and at least 0, got "
                f"{max_unacknowledged_bytes}, {backpressure_timeout_s}"
            )
        self._log = log
        self._producer: LogProducer = log.producer(producer_id)
        self._run_id = run_id
        self._run_epoch = run_epoch
        self._tenant = tenant
        self._limits = limits or Limits()
        self._max_unacknowledged_bytes = max_unacknowledged_bytes
        self._backpressure_timeout_s = backpressure_timeout_s
        self._next_seq: dict[Partition, int] = {}
        self._attempts = AttemptCounters()
        self._outbox = Outbox(self._producer.producer_id, self._producer.epoch)
        self._held = Coalescer(log.linger_s)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._lingerer: threading.Thread | None = None
        self._lingers_idly = True
        self._was_refused = False
        self.num_recorded = 0
        self.num_refused = 0

    @property
    def producer(self) -> LogProducer:
        """The producer that records go through."""
        return self._producer

    @property
    def run_id(self) -> str:
        """The run that events are stamped with."""
        return self._run_id

    @property
    def run_epoch(self) -> int:
        """The run epoch that events are stamped with."""
        return self._run_epoch

    def set_run_epoch(self, run_epoch: int) -> None:
        """Stamp later events with ``run_epoch``."""
        with self._lock:
            self._run_epoch = run_epoch

    def record(self, kind: str, **fields: Any) -> str:
        """Record one event of flat fields and return its id.

        An event that breaks its spec becomes a dead letter with this id as its ``source_event_id``, is logged as a
        warning and counted in :attr:`num_refused`.

        Raises:
            UnknownKindError, ValidationError: no such kind or field.
            BackpressureTimeout, StorageFullError: as :meth:`record_batch`.
        """
        # Plain values stand for all rows, which is one here; what is not plain becomes a column of one value.
        columns = {name: value if is_plain(value) else [value] for name, value in fields.items()}
        return self.record_batch(kind, columns, 1).event_ids[0]

    def record_batch(self, kind: str, columns: Mapping[str, Any], num_rows: int | None = None) -> Receipt:
        """Record events of one kind, given as flat columns.

        A column is a list, a NumPy or an Arrow array, or a plain value that stands for all rows. ``event_id``,
        ``event_index`` and ``recorded_at`` may be given (importers do); else ids are minted and indexes assigned.

        Raises:
            UnknownKindError, ValidationError: no such kind or column, or columns of different lengths; nothing is
                recorded.
            BackpressureTimeout: the log did not take what is spooled in time.
            StorageFullError: no room in the spool for as long. In both cases the events are kept in memory and go
                first at the next call or flush; they must not be recorded again.
        """
        spec = kind_named(kind)
        forbidden = _OURS & columns.keys()
        if forbidden:
            raise ValidationError(
                f"{kind}: expected columns that the recorder does not fill itself, got {sorted(forbidden)}"
            )
        with self._lock:
            if self._was_refused:
                self._send_outbox()
            prepared = self._prepare(spec, columns, _count_rows(columns, num_rows))
            # Who records often sends the others' batches too, before the thread that waits for them has to.
            self._outbox.add(self._held.take_older(self._held.linger_s / 2))
            self._send_outbox(wait=False)
            if (self._held or self._outbox) and self._lingers_idly:
                self._start_waiting()
        if prepared.refused:
            first = prepared.refused[0]
            _LOG.warning(
                "%d of %d %s events became dead letters; the first (row %d): %s: %s",
                *(len(prepared.refused), len(prepared.event_ids), kind, first.row, first.reason, first.detail),
            )
        return prepared

    def _prepare(self, spec: Kind, columns: Mapping[str, Any], num_rows: int) -> Receipt:
        stamped = dict(columns)
        event_ids = as_list(columns.get("event_id"), num_rows) if "event_id" in columns else uuid7_many(num_rows)
        stamped["event_id"] = event_ids
        if "recorded_at" not in columns:
            stamped["recorded_at"] = microseconds(time.time_ns() // 1000, num_rows)
        if self._tenant is not None:
            stamped.setdefault("tenant", self._tenant)
        attempts = attempts_of(columns, num_rows) if spec.indexed else []
        if spec.indexed:
            if "event_index" not in columns:
                stamped["event_index"] = self._attempts.preview(attempts)
            if spec.name == "rollout_ended":
                stamped.setdefault("last_event_index", stamped["event_index"])
        lanes = spread(stamped, self._run_id, spec.topic, self._log.num_partitions(spec.topic), num_rows)
        refused: tuple[RefusedRow, ...] = ()
        if lanes is None or not num_rows or not self._enqueue_sound(spec, stamped, lanes):
            refused = self._enqueue_sifted(spec, stamped, num_rows, lanes)
        if spec.indexed:
            advance = self._attempts.advance_to if "event_index" in columns else self._attempts.advance
            advance(attempts, as_list(stamped["event_index"], num_rows), ended=spec.name == "rollout_ended")
        self.num_recorded += num_rows - len(refused)
        self.num_refused += len(refused)
        return Receipt(event_ids=event_ids, refused=refused)

    def _enqueue_sound(self, spec: Kind, stamped: dict[str, Any], lanes: Spread) -> bool:
        """Queue rows that all keep their spec, by slices of one batch; False, and nothing is queued, where some do not.

        The columns are sorted by partition before the batch is built: its rows are never copied again.
        """
        if lanes.order is not None:
            stamped = {name: rows_of(value, lanes.order) for name, value in stamped.items()}
        elif self._held.linger_s:
            stamped = own(stamped)
        firsts = [(self._next_seq.get(Partition(spec.topic, at), 0), rows) for at, rows in lanes.num_rows.items()]
        lane_seq = np.concatenate([np.arange(first, first + rows, dtype=np.int64) for first, rows in firsts])
        built = build_batch(spec.name, {**stamped, **self._stamps(), "lane_seq": lane_seq}, len(lane_seq))
        if built.refused or validate(built.batch, self._limits):
            return False
        batch, start, ready = pruned(built.batch), 0, []
        for number, rows in lanes.num_rows.items():
            ready += self._numbered(spec, Partition(spec.topic, number), batch.slice(start, rows))
            start += rows
        self._outbox.add(ready)
        return True

    def _enqueue_sifted(
        self, spec: Kind, stamped: dict[str, Any], num_rows: int, lanes: Spread | None
    ) -> tuple[RefusedRow, ...]:
        """Queue the rows that keep their spec, and a dead letter behind them for each that does not."""
        if self._held.linger_s:
            stamped = own(stamped)
        # As they would be in one lane. They are given anew once it is known which rows stay.
        only = next(iter(lanes.num_rows)) if lanes is not None and len(lanes.num_rows) == 1 else 0
        first = self._next_seq.get(Partition(spec.topic, only), 0)
        stamped = {**stamped, **self._stamps(), "lane_seq": np.arange(first, first + num_rows, dtype=np.int64)}
        built = build_batch(spec.name, stamped, num_rows)
        refused, batch = self._set_aside(spec.name, built.batch, built.kept_rows)
        letters = [letter_of_refused_row(spec.name, row, stamped, num_rows) for row in built.refused]
        letters += [letter for _, letter in refused]
        self._enqueue_by_key(spec, batch, letters)
        return tuple(sorted((*built.refused, *(row for row, _ in refused)), key=lambda row: row.row))

    def _stamps(self) -> dict[str, Any]:
        """What the recorder alone fills, but for the lane numbers."""
        return {
            "run_id": self._run_id,
            "run_epoch": self._run_epoch,
            "producer_id": self._producer.producer_id,
            "producer_epoch": self._producer.epoch,
        }

    def _set_aside(
        self, kind: str, batch: pa.RecordBatch, kept_rows: np.ndarray
    ) -> tuple[list[tuple[RefusedRow, dict[str, Any]]], pa.RecordBatch]:
        """Validate; the rows that break their spec as dead letters, and the batch without them."""
        refusals = {refusal.row: refusal for refusal in validate(batch, self._limits)}
        if not refusals:
            return [], batch
        found = []
        for row, refusal in sorted(refusals.items()):
            letter = letter_of_row(batch, row, kind=kind, reason=refusal.reason, detail=refusal.detail)
            refused = RefusedRow(
                row=int(kept_rows[row]),
                reason=refusal.reason,
                detail=refusal.detail,
                payload=letter["payload"],
                payload_format=letter["payload_format"],
            )
            found.append((refused, letter))
        return found, batch.filter(pa.array([row not in refusals for row in range(batch.num_rows)]))

    # From batches to records of lanes.

    def _enqueue_by_key(self, spec: Kind, batch: pa.RecordBatch, letters: list[dict[str, Any]]) -> None:
        num_partitions = self._log.num_partitions(spec.topic)
        by_partition = rows_by_partition(batch, spec.topic, num_partitions)
        letters_by: dict[int, list[dict[str, Any]]] = {}
        for letter in letters:
            key = letter.get("group_id") or letter.get("trajectory_id") or self._run_id
            letters_by.setdefault(partition_of(key, num_partitions), []).append(letter)
        for number in sorted(by_partition.keys() | letters_by.keys()):
            partition, part = Partition(spec.topic, number), by_partition.get(number, batch.slice(0, 0))
            first = self._next_seq.get(partition, 0)
            if part.num_rows:
                numbers = np.arange(first, first + part.num_rows, dtype=np.int64)
                part = pruned(with_columns(part, {"lane_seq": numbers}))
            self._enqueue_lane(spec, partition, part, letters_by.get(number, []))

    def _enqueue_lane(
        self, spec: Kind, partition: Partition, rows: pa.RecordBatch, letters: list[dict[str, Any]]
    ) -> None:
        """Queue pruned rows that have the lane's next numbers, and the dead letters behind them."""
        if rows.num_rows:
            self._outbox.add(self._numbered(spec, partition, rows))
        if letters:
            self._outbox.add(self._held.take(partition))
            first = self._next_seq.get(partition, 0)
            record = make_record(self._letter_batch(letters, first), partition=partition.partition)
            # Beside the events that it stands in for, so that readers of their topic see it in its place.
            self._outbox.add_record(replace(record, topic=spec.topic))
            self._next_seq[partition] = first + len(letters)

    def _numbered(self, spec: Kind, partition: Partition, rows: pa.RecordBatch) -> list[LaneBatch]:
        """Count pruned rows that have the lane's next numbers; what of the lane is to be encoded now."""
        first = self._next_seq.get(partition, 0)
        self._next_seq[partition] = first + rows.num_rows
        return self._held.add(LaneBatch(spec, partition, first, rows, weight(spec, rows)))

    def _letter_batch(self, letters: list[dict[str, Any]], first_seq: int) -> pa.RecordBatch:
        now = time.time_ns() // 1000
        rows = []
        for number, letter in enumerate(letters, first_seq):
            own = {
                "run_id": self._run_id,
                "run_epoch": self._run_epoch,
                "producer_id": self._producer.producer_id,
                "producer_epoch": self._producer.epoch,
                "lane_seq": number,
                "first_lane_seq": number,
                "last_lane_seq": number,
                "source_producer_id": self._producer.producer_id,
                "source_producer_epoch": self._producer.epoch,
                "tenant": self._tenant,
            }
            rows.append({**letter, **own, "recorded_at": now})
        return dead_letter_batch(rows)

    # Small batches wait for others of their lane and kind.

    def _start_waiting(self) -> None:
        if self._lingerer is None:
            self._lingerer = threading.Thread(target=self._send_due, name="rolltape-recorder", daemon=True)
            self._lingerer.start()
        self._lingers_idly = False
        self._changed.notify()

    def _send_due(self) -> None:
        """The thread that sends what waited long enough, or was encoded, while nobody records anything."""
        looks_in_vain = 0
        with self._changed:
            while not self._closed:
                left = self._held.next_due_s()
                is_encoding = bool(self._outbox) and not self._was_refused
                looks_in_vain = looks_in_vain + 1 if left is None and not is_encoding else 0
                if looks_in_vain:
                    # Under load something is held again at once: waking this thread for it costs more than looking.
                    self._lingers_idly = looks_in_vain > _LOOKS_IN_VAIN
                    self._changed.wait(None if self._lingers_idly else self._held.linger_s)
                    continue
                if left is None or left > 0:
                    self._changed.wait(min(left or _ENCODING_S, _ENCODING_S) if is_encoding else left)
                    if self._closed or not is_encoding:
                        continue
                self._outbox.add(self._held.take_older(self._held.linger_s))
                try:
                    self._send_outbox(wait=False)
                except RolltapeError as error:
                    # The next call or flush sends it first, and says so to who can do something about it.
                    _LOG.warning("what was recorded waits in memory: %s", error)

    def _send_outbox(self, *, wait: bool = True) -> None:
        """Send what waits; without ``wait``, what is still being encoded may stay for the next call or the thread.

        Where no lane holds anything back, rows may lie in the caller's own arrays: those are encoded in any case.
        """
        may_stay = not wait and self._held.linger_s > 0
        self._was_refused = True
        try:
            self._send_all(time.monotonic() + self._backpressure_timeout_s, may_stay=may_stay)
            self._was_refused = False
        finally:
            if not may_stay:
                # Whatever ended it, the caller's arrays are the caller's again.
                self._outbox.finish_encoding()

    def _send_all(self, deadline: float, *, may_stay: bool) -> None:
        while self._outbox:
            if may_stay and self._outbox.may_wait:
                return
            self._wait_for_room(deadline)
            try:
                self._producer.send(self._outbox.first, more=len(self._outbox) > 1)
            except StorageFullError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_FULL_DISK_RETRY_S)
                continue
            self._outbox.remove_first()

    def _wait_for_room(self, deadline: float) -> None:
        while self._producer.unacknowledged_bytes >= self._max_unacknowledged_bytes:
            if time.monotonic() >= deadline:
                raise BackpressureTimeout(
                    f"expected the log to take what is spooled within {self._backpressure_timeout_s} s, got "
                    f"{self._producer.unacknowledged_bytes} bytes that it does not have (limit "
                    f"{self._max_unacknowledged_bytes}); {len(self._outbox)} records wait in memory and go first at "
                    "the next call or flush"
                )
            time.sleep(_RETRY_S)

    # Guarantees.

    def flush(self, level: Level = "logged", timeout_s: float = 60.0) -> None:
        """Return once everything recorded is proven durable at ``level``.

        Raises:
            FlushTimeout: not proven in time; nothing is lost.
            BackpressureTimeout, StorageFullError: what waits in memory found no room.
        """
        with self._lock:
            self._outbox.add(self._held.take_all())
            self._send_outbox()
        self._producer.flush(level, timeout_s)

    def wait_for_older_epochs(self, timeout_s: float = 60.0) -> None:
        """Return once everything that earlier starts of this producer spooled is logged.

        Raises:
            FlushTimeout: not proven in time.
        """
        self._producer.wait_for_older_epochs(timeout_s)

    def close(self) -> None:
        """Make everything durable at level ``spooled`` and give the producer id back. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            try:
                self._outbox.add(self._held.take_all())
                self._send_outbox()
            finally:
                self._outbox.close()
                self._producer.close()
        if self._lingerer is not None:
            self._lingerer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _count_rows(columns: Mapping[str, Any], num_rows: int | None) -> int:
    if num_rows is not None:
        return num_rows
    return next((len(value) for value in columns.values() if not is_plain(value)), 1)
