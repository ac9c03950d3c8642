"""Filling records: small batches of one lane and kind wait a moment for others (design §6).

A lane keeps its order: whatever comes for it goes behind what it holds already, and a batch of another kind first
sends the held one on its way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from rolltape.schema.codec import conform, pruned
from rolltape.schema.cursor import Partition
from rolltape.schema.envelope import EXTENSIONS, TOKEN_COLUMNS
from rolltape.schema.kinds import Kind

_LONG_COLUMNS: Final = (*(spec.name for spec in TOKEN_COLUMNS), EXTENSIONS.name)
_ROW_BYTES: Final = 300
"""What the rest of the envelope takes a row: ids, names, stamps."""

HELD_BYTES: Final = 512 << 10
"""A lane that holds so much waits for no more. Together with one more batch it stays below a record's 1 MiB."""


class LaneBatch(NamedTuple):
    """Stamped rows of one kind, next in their lane from ``first_lane_seq`` on; ``num_bytes`` as :func:`weight` says.

    ``rows`` are pruned: of a record's columns they have those with values (:func:`rolltape.schema.stream.pruned`).
    """

    spec: Kind
    partition: Partition
    first_lane_seq: int
    rows: pa.RecordBatch
    num_bytes: int


def weight(spec: Kind, rows: pa.RecordBatch) -> int:
    """About the bytes that pruned rows take before compression.

    Only the columns whose rows may be long are measured, because asking Arrow takes microseconds a column.
    """
    schema = rows.schema
    found = (schema.get_field_index(name) for name in (*_LONG_COLUMNS, spec.name))
    return int(_ROW_BYTES * rows.num_rows + sum(rows.column(at).nbytes for at in found if at >= 0))


@dataclass(slots=True)
class _Held:
    first: LaneBatch
    since: float
    batches: list[pa.RecordBatch] = field(default_factory=list)
    num_bytes: int = 0

    def joined(self) -> LaneBatch:
        rows = _joined(self.first.spec.name, self.batches)
        return self.first._replace(rows=rows, num_bytes=self.num_bytes)


def _joined(kind: str, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of pruned batches of one kind, pruned."""
    if len(batches) == 1:
        return batches[0]
    if any(batch.schema is not batches[0].schema and batch.schema != batches[0].schema for batch in batches):
        return pruned(pa.concat_batches([conform(batch, kind) for batch in batches]))
    return pa.concat_batches(batches)


class Coalescer:
    """Holds small batches by lane for at most ``linger_s``. For one thread at a time."""

    def __init__(self, linger_s: float) -> None:
        """Hold nothing; with 0, never."""
        self.linger_s = linger_s
        self._held: dict[Partition, _Held] = {}

    def __bool__(self) -> bool:
        """Whether something is held."""
        return bool(self._held)

    def add(self, batch: LaneBatch) -> list[LaneBatch]:
        """Take a batch, and give back what may be encoded now, in the lane's order."""
        if self.linger_s <= 0:
            return [batch]
        num_bytes = batch.num_bytes
        held = self._held.get(batch.partition)
        if held is not None and held.first.spec is batch.spec and num_bytes < HELD_BYTES:
            held.batches.append(batch.rows)
            held.num_bytes += num_bytes
            return self.take(batch.partition) if held.num_bytes >= HELD_BYTES else []
        ready = self.take(batch.partition)
        if num_bytes >= HELD_BYTES:
            return [*ready, batch]
        self._held[batch.partition] = _Held(batch, time.monotonic(), [batch.rows], num_bytes)
        return ready

    def take(self, partition: Partition) -> list[LaneBatch]:
        """What is held of one lane, which holds nothing then."""
        held = self._held.pop(partition, None)
        return [] if held is None else [held.joined()]

    def take_all(self) -> list[LaneBatch]:
        """Everything that is held."""
        return [batch for partition in list(self._held) for batch in self.take(partition)]

    def take_older(self, age_s: float) -> list[LaneBatch]:
        """What has waited for ``age_s`` or longer."""
        if not self._held:
            return []
        since = time.monotonic() - age_s
        late = [partition for partition, held in self._held.items() if held.since <= since]
        return [batch for partition in late for batch in self.take(partition)]

    def next_due_s(self) -> float | None:
        """Seconds until something has waited long enough; None while nothing is held."""
        if not self._held:
            return None
        return max(0.0, min(held.since for held in self._held.values()) + self.linger_s - time.monotonic())


def own(columns: Mapping[str, Any]) -> dict[str, Any]:
    """``columns`` with copies of NumPy arrays: their owner may change them while rows made of them are held.

    Arrays inside lists are copied anyway, when they become one column.
    """
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in columns.items()}
