"""A record as a log carries it: topic, partition, key, headers, value; and its headers on the wire (design §4).

Headers name kind, schema version, codec, row count, producer, epoch and lane range, and for rollout-plane records the
trajectories with their event-index ranges: a record whose payload cannot be read is still accounted for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.conform import conform
from rolltape.schema.envelope import SCHEMA_VERSION
from rolltape.schema.errors import CodecError, ValidationError
from rolltape.schema.kinds import Kind, Topic, kind_named
from rolltape.schema.stream import CODEC, encode, encode_pruned, kind_of

_FEW_ROWS: Final = 64


class EventRange(NamedTuple):
    """Consecutive events of one attempt: ``first`` to ``last`` event index, both included."""

    trajectory_id: str
    attempt: int
    first: int
    last: int


# As EventRange._make, at half the price: a record names a hundred of them.
_MAKE_RANGE: Final = partial(tuple.__new__, EventRange)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """What a record says of itself. ``event_ranges`` is empty outside the rollout plane.

    Example: kind ``action_sampled``, schema_version ``1.1``, num_rows 16, producer ``worker-0`` epoch 3, lane 48 to 63.
    """

    kind: str
    schema_version: str
    codec: str
    num_rows: int
    producer_id: str
    producer_epoch: int
    first_lane_seq: int
    last_lane_seq: int
    event_ranges: tuple[EventRange, ...] = ()

    def to_pairs(self) -> list[tuple[str, bytes]]:
        """The headers as a log carries them: names and bytes."""
        pairs = [
            ("rt-kind", self.kind.encode()),
            ("rt-schema", self.schema_version.encode()),
            ("rt-codec", self.codec.encode()),
            ("rt-rows", b"%d" % self.num_rows),
            ("rt-producer", self.producer_id.encode()),
            ("rt-epoch", b"%d" % self.producer_epoch),
            ("rt-first-seq", b"%d" % self.first_lane_seq),
            ("rt-last-seq", b"%d" % self.last_lane_seq),
        ]
        if self.event_ranges:
            pairs.append(("rt-events", json.dumps(self.event_ranges, separators=(",", ":")).encode()))
        return pairs

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, bytes]]) -> Headers:
        """The inverse of :meth:`to_pairs`; headers of other names are ignored.

        Raises:
            CodecError: a header is missing or cannot be read.
        """
        found = dict(pairs)
        try:
            return cls(
                kind=found["rt-kind"].decode(),
                schema_version=found["rt-schema"].decode(),
                codec=found["rt-codec"].decode(),
                num_rows=int(found["rt-rows"]),
                producer_id=found["rt-producer"].decode(),
                producer_epoch=int(found["rt-epoch"]),
                first_lane_seq=int(found["rt-first-seq"]),
                last_lane_seq=int(found["rt-last-seq"]),
                event_ranges=tuple(_event_range(*item) for item in json.loads(found.get("rt-events", b"[]"))),
            )
        except KeyError as error:
            raise CodecError(f"expected the record header {error}, got only {sorted(found)}") from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CodecError(f"expected readable record headers, got {found}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of a log. ``key`` is the group id (control planes: the run id)."""

    topic: Topic
    partition: int
    key: str
    headers: Headers
    value: pa.Buffer | bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the value."""
        return len(self.value)


def make_record(batch: pa.RecordBatch, *, partition: int = 0) -> Record:
    """The record of a stamped batch: rows of one producer epoch with consecutive ``lane_seq``.

    Raises:
        ValidationError: the stamps are missing, mixed, or not consecutive.
    """
    kind = kind_named(kind_of(batch))
    batch = conform(batch, kind.name)
    return Record(
        topic=kind.topic, partition=partition, key=_key(kind, batch), headers=make_headers(batch), value=encode(batch)
    )


def record_of_lane(
    kind: Kind, rows: pa.RecordBatch, *, partition: int, producer_id: str, producer_epoch: int, first_lane_seq: int
) -> Record:
    """The record of rows that one producer epoch stamped just now, next in their lane from ``first_lane_seq`` on.

    As :func:`make_record` for who stamps: nothing that the stamps say is looked up in the rows again. ``rows`` are
    pruned (:func:`rolltape.schema.stream.pruned`), or a slice of such.

    Raises:
        CodecError: there are no rows.
        ValidationError: nothing in the first row names a key.
    """
    headers = Headers(
        kind=kind.name,
        schema_version=SCHEMA_VERSION,
        codec=CODEC,
        num_rows=rows.num_rows,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        first_lane_seq=first_lane_seq,
        last_lane_seq=first_lane_seq + rows.num_rows - 1,
        event_ranges=event_ranges(rows) if kind.indexed else (),
    )
    value = encode_pruned(rows)
    return Record(topic=kind.topic, partition=partition, key=_key(kind, rows), headers=headers, value=value)


def make_headers(batch: pa.RecordBatch) -> Headers:
    """The headers of a stamped batch that has its kind's schema.

    Raises:
        ValidationError: the stamps are missing, mixed, or not consecutive.
    """
    kind = kind_named(kind_of(batch))
    first, last = _lane_range(batch)
    return Headers(
        kind=kind.name,
        schema_version=_newest_version(batch),
        codec=CODEC,
        num_rows=batch.num_rows,
        producer_id=str(_only(batch, "producer_id")),
        producer_epoch=int(_only(batch, "producer_epoch")),
        first_lane_seq=first,
        last_lane_seq=last,
        event_ranges=event_ranges(batch) if kind.indexed else (),
    )


def event_ranges(batch: pa.RecordBatch) -> tuple[EventRange, ...]:
    """The event indexes of a batch of a rollout-plane kind, as ranges by attempt in order of first appearance."""
    found = [_column(batch, name) for name in ("trajectory_id", "attempt", "event_index")]
    columns = [column for column in found if column is not None]
    if len(columns) < len(found):
        return ()
    trajectory_ids, attempts, numbers = (column.to_pylist() for column in columns)
    if (
        not any(column.null_count for column in columns)
        and len(set(zip(trajectory_ids, attempts, strict=True))) == batch.num_rows
    ):
        return tuple(map(_MAKE_RANGE, zip(trajectory_ids, attempts, numbers, numbers, strict=True)))
    indexes: dict[tuple[str, int], list[int]] = {}
    for trajectory_id, attempt, event_index in zip(trajectory_ids, attempts, numbers, strict=True):
        if trajectory_id is not None and attempt is not None and event_index is not None:
            indexes.setdefault((trajectory_id, attempt), []).append(event_index)
    return tuple(
        EventRange(trajectory_id, attempt, first, last)
        for (trajectory_id, attempt), taken in indexes.items()
        for first, last in _runs(taken)
    )


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    if len(numbers) == 1:
        return [(numbers[0], numbers[0])]
    runs = (list(run) for _, run in groupby(enumerate(sorted(set(numbers))), lambda item: item[1] - item[0]))
    return [(run[0][1], run[-1][1]) for run in runs]


def _event_range(trajectory_id: str, attempt: int, first: int, last: int) -> EventRange:
    return EventRange(str(trajectory_id), int(attempt), int(first), int(last))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """An envelope column; None where it was left out because no row has a value."""
    at = batch.schema.get_field_index(name)
    return None if at < 0 else batch.column(at)


def _only(batch: pa.RecordBatch, name: str) -> str | int:
    column = batch.column(name)
    values = list(set(column.to_pylist())) if len(column) <= _FEW_ROWS else pc.unique(column).to_pylist()
    if len(values) != 1 or values[0] is None:
        raise ValidationError(f"expected one {name} in all rows of a record, got {values[:5]}: stamp the batch first")
    value: str | int = values[0]
    return value


def _newest_version(batch: pa.RecordBatch) -> str:
    return str(_only(batch, "schema_version"))


def _lane_range(batch: pa.RecordBatch) -> tuple[int, int]:
    column = batch.column("lane_seq")
    if not len(column) or column.null_count:
        raise ValidationError("expected lane_seq in every row of a record: stamp the batch first")
    numbers = column.to_numpy()
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != len(numbers) - 1 or (numbers[1:] - numbers[:-1] != 1).any():
        raise ValidationError(f"expected consecutive lane_seq in a record, got {numbers[:10].tolist()} …")
    return first, last


def _key(kind: Kind, batch: pa.RecordBatch) -> str:
    names = ("group_id", "trajectory_id", "run_id") if kind.topic == "rollout" else ("run_id",)
    for name in names:
        column = _column(batch, name)
        value = None if column is None else column[0].as_py()
        if value is not None:
            return str(value)
    raise ValidationError(f"expected one of {', '.join(names)} in the first row of a record, got nulls")
