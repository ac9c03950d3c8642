"""One event id, one content: a window over recent records and event ids that notices the contrary.

What left the window is found by the full scan of ``rolltape verify``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import pyarrow as pa

from rolltape.ingest.lanes import Lane

WINDOW_EVENTS: Final = 65_536

K = TypeVar("K")
V = TypeVar("V")

_NOT_CONTENT: Final = frozenset(
    {"producer_id", "producer_epoch", "lane_seq", "log_topic", "log_partition", "log_offset", "recorded_at"}
)
"""Columns that say how an event travelled. Sent again on another lane they differ, and it is the same event still."""


class ContentLookup(Protocol):
    """Where events that are committed already can be read again."""

    def read_event(self, kind: str, event_id: str) -> Mapping[str, Any] | None:
        """The event as a row, or None if there is none."""
        ...


def content_of(row: Mapping[str, Any]) -> str:
    """A spelling of everything that an event says; equal for equal events, NaN included."""
    return repr(sorted((name, value) for name, value in row.items() if name not in _NOT_CONTENT))


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

    def known(self, keys: list[K]) -> set[K]:
        wanted = set(keys)
        return (wanted & self._young.keys()) | (wanted & self._old.keys())


def _differs(kind: str, event_id: str) -> str:
    return f"expected the content that event {event_id} came with before, got another {kind}; both are kept"


class ConflictWindow:
    """Recent records by lane position, and recent events by id."""

    def __init__(self, lookup: ContentLookup, *, capacity: int = WINDOW_EVENTS) -> None:
        """Remember about ``capacity`` events and as many records."""
        self._lookup = lookup
        self._records: _Generations[tuple[Lane, int], tuple[int, ...]] = _Generations(capacity)
        self._events: _Generations[str, str] = _Generations(capacity)
        self._staged: dict[str, tuple[pa.RecordBatch, int]] = {}

    def remember_record(self, lane: Lane, first_lane_seq: int, checksum: int) -> None:
        """Note a record that was accepted."""
        self._records.update({(lane, first_lane_seq): (checksum,)})

    def is_new_content(self, lane: Lane, first_lane_seq: int, checksum: int) -> bool:
        """Whether a repeated record is known to have come with other bytes; noted, so that it is reported once."""
        known = self._records.get((lane, first_lane_seq))
        if known is None or checksum in known:
            return False
        self._records.update({(lane, first_lane_seq): (*known, checksum)})
        return True

    def remember_rows(self, kind: str, batch: pa.RecordBatch) -> None:
        """Note events that are staged for the next commit."""
        ids = batch.column("event_id").to_pylist()
        self._staged.update({event_id: (batch, row) for row, event_id in enumerate(ids)})
        self._events.update(dict.fromkeys(ids, kind))

    def clear_staged(self) -> None:
        """The staged rows are committed, or forgotten."""
        self._staged.clear()

    def check(self, kind: str, batch: pa.RecordBatch) -> dict[int, str | None]:
        """Rows whose event id is known: None for the same content (a repetition), else what differs."""
        ids = batch.column("event_id").to_pylist()
        known = self._events.known(ids)
        if not known and len(set(ids)) == len(ids):
            return {}
        return self._compare(kind, batch, ids, known)

    def _compare(self, kind: str, batch: pa.RecordBatch, ids: list[str], known: set[str]) -> dict[int, str | None]:
        found: dict[int, str | None] = {}
        first_rows: dict[str, int] = {}
        for row, event_id in enumerate(ids):
            if event_id in first_rows:
                earlier: Mapping[str, Any] | None = batch.slice(first_rows[event_id], 1).to_pylist()[0]
            else:
                first_rows[event_id] = row
                earlier = self._earlier(event_id) if event_id in known else None
            if earlier is not None:
                same = content_of(earlier) == content_of(batch.slice(row, 1).to_pylist()[0])
                found[row] = None if same else _differs(kind, event_id)
        return found

    def _earlier(self, event_id: str) -> Mapping[str, Any] | None:
        if event_id in self._staged:
            batch, row = self._staged[event_id]
            staged: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
            return staged
        return self._lookup.read_event(self._events.get(event_id) or "", event_id)
