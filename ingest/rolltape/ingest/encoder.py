"""From rows that are next in their lanes to records of at most about 1 MiB, several at a time where they are large.

Compressing is most of what recording costs, and it holds no lock of the interpreter: where one call made several large
records, threads encode them while the caller sends the first, or goes on to record more.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from rolltape.ingest.coalesce import LaneBatch, weight
from rolltape.schema.codec import Record, record_of_lane

MAX_RECORD_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 128 << 10
"""Below it, handing a record to a thread costs about what it saves."""
_MAX_THREADS: Final = 4
_KEPT_BYTES: Final = 8 << 20
"""So much, before compression, may wait in memory for its encoding while the caller goes on."""


class Outbox:
    """The records that one producer epoch sends next, in order; of some the encoding is under way.

    For one thread at a time.
    """

    def __init__(self, producer_id: str, producer_epoch: int) -> None:
        """Hold nothing. Threads are started when they are first of use."""
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch
        self._next: deque[Record | Future[Record]] = deque()
        self._num_bytes: deque[int] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._num_threads = min(_MAX_THREADS, _num_cpus())

    def __len__(self) -> int:
        """How many records wait."""
        return len(self._next)

    def add(self, batches: Iterable[LaneBatch]) -> None:
        """Encode what waits no longer, as records of at most about 1 MiB."""
        parts = [part for batch in batches for part in split(batch)]
        self._num_bytes += [part.num_bytes for part in parts]
        if self._num_threads < 2 or sum(part.num_bytes >= _LARGE_BYTES for part in parts) < 2:
            self._next += map(self._record, parts)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="rolltape-encode")
        for part in parts:
            self._next.append(self._threads.submit(self._record, part))

    def add_record(self, record: Record) -> None:
        """Put a record behind the others."""
        self._next.append(record)
        self._num_bytes.append(record.num_bytes)

    @property
    def may_wait(self) -> bool:
        """Whether the first is being encoded, and all that wait for it are few enough to be kept."""
        first = self._next[0]
        return isinstance(first, Future) and not first.done() and sum(self._num_bytes) <= _KEPT_BYTES

    @property
    def first(self) -> Record:
        """The record that goes next, once it is encoded."""
        first = self._next[0] = _encoded(self._next[0])
        return first

    def remove_first(self) -> None:
        """The first was sent."""
        self._next.popleft()
        self._num_bytes.popleft()

    def finish_encoding(self) -> None:
        """Wait until what records are made of is needed no more."""
        self._next = deque(map(_encoded, self._next))

    def close(self) -> None:
        """End the threads, after what they have to do. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _record(self, batch: LaneBatch) -> Record:
        return record_of_lane(
            batch.spec,
            batch.rows,
            partition=batch.partition.partition,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            first_lane_seq=batch.first_lane_seq,
        )


def _encoded(record: Record | Future[Record]) -> Record:
    return record.result() if isinstance(record, Future) else record


def split(batch: LaneBatch) -> list[LaneBatch]:
    """Parts of at most about 1 MiB before compression, of at least one row each."""
    rows = batch.rows
    if rows.num_rows < 2 or batch.num_bytes <= MAX_RECORD_BYTES:
        return [batch]
    middle = rows.num_rows // 2
    return [*split(_part(batch, rows.slice(0, middle), 0)), *split(_part(batch, rows.slice(middle), middle))]


def _part(batch: LaneBatch, rows: pa.RecordBatch, start: int) -> LaneBatch:
    return batch._replace(rows=rows, first_lane_seq=batch.first_lane_seq + start, num_bytes=weight(batch.spec, rows))


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
