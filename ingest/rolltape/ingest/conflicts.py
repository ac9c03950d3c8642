"""One event id, one content: a window over recent records and event ids that notices the contrary.

Whoever starts takes the newest committed events into its window. What left it is found by the full scan of ``rolltape
verify``.

Which content counts, what is archived says: a row is never taken back. Partitions have no order among each other, so
between two of them it is the one that was read first. Both are kept either way: as a row and a dead letter, or as two
rows, where two sinks archived them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.lanes import Lane

WINDOW_EVENTS: Final = 65_536
WINDOW_RECORDS: Final = 8_192

K = TypeVar("K")
V = TypeVar("V")

_NOT_CONTENT: Final = frozenset(
    {"producer_id", "producer_epoch", "lane_seq", "log_topic", "log_partition", "log_offset", "recorded_at"}
)
"""Columns that say how an event travelled. Sent again on another lane they differ, and it is the same event still."""


class ContentLookup(Protocol):
    """Where events that are committed already can be read again."""

    def read_events(
        self, kind: str, event_ids: Collection[str], trajectory_ids: Collection[str] | None
    ) -> Mapping[str, Mapping[str, Any]]:
        """Those of the events that are committed, as rows by id; ``trajectory_ids`` says where to look first."""
        ...

    def recent_event_ids(self, capacity: int, kinds: Collection[str] | None) -> Mapping[str, Sequence[str]]:
        """Ids of about ``capacity`` of the newest committed events, by kind; of these kinds alone, or of all."""
        ...


def content_of(row: Mapping[str, Any]) -> str:
    """A spelling of everything that an event says; equal for equal events, NaN included."""
    return repr(sorted((name, value) for name, value in row.items() if name not in _NOT_CONTENT))


def rows_by_id(table: pa.Table, event_ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """The rows of ``table`` with these event ids, by id."""
    rows = table.filter(pc.is_in(table["event_id"], pa.array(sorted(event_ids), pa.string()))).to_pylist()
    return {row["event_id"]: row for row in rows}


class _Generations(Generic[K, V]):
    """A mapping that forgets its oldest half when it is full."""

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        return self._old.get(key) if value is None else value

    def update(self, entries: dict[K, V]) -> None:
        self._young.update(entries)
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def discard(self, keys: Iterable[K]) -> None:
        for key in keys:
            self._young.pop(key, None)
            self._old.pop(key, None)

    def known(self, keys: list[K]) -> set[K]:
        wanted = set(keys)
        return (wanted & self._young.keys()) | (wanted & self._old.keys())


def _differs(kind: str, event_id: str) -> str:
    return f"expected the content that event {event_id} came with before, got another {kind}; both are kept"


class ConflictWindow:
    """Recent records by lane position, and recent events by id."""

    def __init__(self, lookup: ContentLookup, *, capacity: int = WINDOW_EVENTS) -> None:
        """Remember about ``capacity`` events, and the last :data:`WINDOW_RECORDS` records at most."""
        self._lookup = lookup
        self._capacity = capacity
        self._records: _Generations[tuple[Lane, int], tuple[int, ...]] = _Generations(min(capacity, WINDOW_RECORDS))
        self._events: _Generations[str, str] = _Generations(capacity)
        self._staged_records: dict[tuple[Lane, int], tuple[int, ...]] = {}
        self._staged: dict[str, tuple[pa.RecordBatch, int]] = {}
        # Batches are looked into only once an event of them comes again.
        self._unindexed: list[tuple[list[str], pa.RecordBatch]] = []

    def look_back(self, kinds: Collection[str] | None) -> None:
        """Remember the newest committed events: others committed them, or an earlier start of this one."""
        for kind, event_ids in self._lookup.recent_event_ids(self._capacity // 2, kinds).items():
            self._events.update(dict.fromkeys(event_ids, kind))

    def remember_record(self, lane: Lane, first_lane_seq: int, checksum: int) -> None:
        """Note a record that was accepted."""
        self._staged_records[lane, first_lane_seq] = (checksum,)

    def is_new_content(self, lane: Lane, first_lane_seq: int, checksum: int) -> bool:
        """Whether a repeated record is known to have come with other bytes; noted, so that it is reported once."""
        place = (lane, first_lane_seq)
        known = self._staged_records.get(place) or self._records.get(place)
        if known is None or checksum in known:
            return False
        self._staged_records[place] = (*known, checksum)
        return True

    def remember_rows(self, kind: str, batch: pa.RecordBatch) -> None:
        """Note events that are staged for the next commit."""
        self._remember(kind, batch.column("event_id").to_pylist(), batch)

    def remember_new(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> bool:
        """Note events of several kinds as :meth:`remember_rows` does; False, and none of them, if any is known."""
        ids = [batch.column("event_id").to_pylist() for _, batch in parts]
        several = [event_id for some in ids for event_id in some]
        if len(set(several)) < len(several) or self._events.known(several):
            return False
        for (kind, batch), some in zip(parts, ids, strict=True):
            self._remember(kind, some, batch)
        return True

    def _remember(self, kind: str, ids: list[str], batch: pa.RecordBatch) -> None:
        self._unindexed.append((ids, batch))
        self._events.update(dict.fromkeys(ids, kind))

    def _staged_rows(self) -> dict[str, tuple[pa.RecordBatch, int]]:
        """Where each staged event lies."""
        for ids, batch in self._unindexed:
            self._staged.update({event_id: (batch, row) for row, event_id in enumerate(ids)})
        self._unindexed.clear()
        return self._staged

    def staged_are_committed(self) -> None:
        """The staged rows are to be read from the target from now on."""
        self._records.update(self._staged_records)
        self._clear_staged()

    def forget_staged(self) -> None:
        """The staged rows were not committed; they will be offered again."""
        self._events.discard(self._staged_rows())
        self._clear_staged()

    def _clear_staged(self) -> None:
        self._staged_records = {}
        self._staged.clear()
        self._unindexed.clear()

    def check(self, kind: str, batch: pa.RecordBatch) -> dict[int, str | None]:
        """Rows whose event id is known: None for the same content (a repetition), else what differs."""
        ids = batch.column("event_id").to_pylist()
        known = self._events.known(ids)
        if not known and len(set(ids)) == len(ids):
            return {}
        return self._compare(kind, batch, ids, known)

    def _compare(self, kind: str, batch: pa.RecordBatch, ids: list[str], known: set[str]) -> dict[int, str | None]:
        found: dict[int, str | None] = {}
        earlier = self._earlier(kind, batch, known)
        for row, event_id in enumerate(ids):
            content = content_of(batch.slice(row, 1).to_pylist()[0])
            if event_id in earlier:
                found[row] = None if earlier[event_id] == content else _differs(kind, event_id)
            else:
                earlier[event_id] = content
        return found

    def _earlier(self, kind: str, batch: pa.RecordBatch, known: set[str]) -> dict[str, str]:
        """Contents that known ids came with: of staged rows, else of committed ones."""
        rows: dict[str, Mapping[str, Any]] = {}
        staged_rows = self._staged_rows()
        for event_id in known & staged_rows.keys():
            staged, row = staged_rows[event_id]
            rows[event_id] = staged.slice(row, 1).to_pylist()[0]
        committed: dict[str, set[str]] = {}
        for event_id in known - staged_rows.keys():
            committed.setdefault(self._events.get(event_id) or kind, set()).add(event_id)
        trajectory_ids = set(filter(None, batch.column("trajectory_id").to_pylist()))
        for of_kind, event_ids in committed.items():
            rows.update(self._lookup.read_events(of_kind, event_ids, trajectory_ids or None))
        return {event_id: content_of(row) for event_id, row in rows.items()}
