"""Numbering the rollout-plane events of an attempt: gap-free from 0, by the one recorder that owns it (design §4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

_MAX_ENDED: Final = 65_536
_INDEX_LIMIT: Final = 2**31

Attempt = tuple[Any, Any]


def as_list(value: Any, num_rows: int) -> list[Any]:
    """A column as a list: arrays converted, a plain value repeated."""
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        listed: list[Any] = value.to_pylist()
        return listed
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return list(value) if isinstance(value, (list, tuple)) else [value] * num_rows


class AttemptCounters:
    """The next ``event_index`` of each (trajectory, attempt); of ended ones only the newest are remembered."""

    def __init__(self) -> None:
        """Start with no attempt."""
        self._next: dict[Attempt, int] = {}
        self._ended: OrderedDict[Attempt, int] = OrderedDict()

    def preview(self, columns: Mapping[str, Any], num_rows: int) -> Any:
        """Indexes of the rows: those given, else the next ones. Nothing is counted yet."""
        if "event_index" in columns:
            return columns["event_index"]
        taken: dict[Attempt, int] = {}
        indexes = []
        for attempt in _attempts(columns, num_rows):
            index = taken.get(attempt)
            if index is None:
                index = self._next.get(attempt, self._ended.get(attempt, 0))
            taken[attempt] = index + 1
            indexes.append(index)
        return indexes

    def advance(self, columns: Mapping[str, Any], indexes: Any, num_rows: int, *, ended: bool) -> None:
        """Count rows that took ``indexes``; ``ended`` says that they were the attempts' last."""
        for attempt, index in zip(_attempts(columns, num_rows), as_list(indexes, num_rows), strict=True):
            # An index that no event can have is refused with its row and must not become the attempt's next one.
            if not isinstance(index, int) or not 0 <= index < _INDEX_LIMIT:
                continue
            following = max(index + 1, self._next.pop(attempt, 0), self._ended.pop(attempt, 0))
            if ended:
                self._ended[attempt] = following
            else:
                self._next[attempt] = following
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


def _attempts(columns: Mapping[str, Any], num_rows: int) -> list[Attempt]:
    trajectories = as_list(columns.get("trajectory_id"), num_rows)
    attempts = as_list(columns.get("attempt"), num_rows)
    return [
        (_hashable(trajectory), _hashable(attempt)) for trajectory, attempt in zip(trajectories, attempts, strict=True)
    ]


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, bytes, int, float)) or value is None else repr(value)
