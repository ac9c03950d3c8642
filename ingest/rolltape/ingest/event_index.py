"""Numbering the rollout-plane events of an attempt: gap-free from 0, by the one recorder that owns it (design §4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

_MAX_ENDED: Final = 65_536
_INDEX_LIMIT: Final = 2**31
_HASHABLE: Final = frozenset((str, bytes, int, float, bool, type(None)))

Attempt = tuple[Any, Any]


def as_list(value: Any, num_rows: int) -> list[Any]:
    """A column as a list: arrays converted, a plain value repeated."""
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        listed: list[Any] = value.to_pylist()
        return listed
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return list(value) if isinstance(value, (list, tuple)) else [value] * num_rows


def attempts_of(columns: Mapping[str, Any], num_rows: int) -> list[Attempt]:
    """The (trajectory, attempt) of each row, of whatever a caller gave, as something that can be looked up."""
    trajectories = as_list(columns.get("trajectory_id"), num_rows)
    attempts = as_list(columns.get("attempt"), num_rows)
    if not _HASHABLE.issuperset(map(type, trajectories)):
        trajectories = [_hashable(value) for value in trajectories]
    if not _HASHABLE.issuperset(map(type, attempts)):
        attempts = [_hashable(value) for value in attempts]
    return list(zip(trajectories, attempts, strict=True))


class AttemptCounters:
    """The next ``event_index`` of each (trajectory, attempt); of ended ones only the newest are remembered."""

    def __init__(self) -> None:
        """Start with no attempt."""
        self._next: dict[Attempt, int] = {}
        self._ended: OrderedDict[Attempt, int] = OrderedDict()

    def preview(self, attempts: Sequence[Attempt]) -> list[int]:
        """The next indexes of rows of these attempts. Nothing is counted yet."""
        if len(set(attempts)) == len(attempts):
            return [self._ended.get(attempt, 0) if index is None else index for attempt, index in self._known(attempts)]
        taken: dict[Attempt, int] = {}
        indexes = []
        for attempt in attempts:
            index = taken.get(attempt)
            if index is None:
                index = self._next.get(attempt, self._ended.get(attempt, 0))
            taken[attempt] = index + 1
            indexes.append(index)
        return indexes

    def _known(self, attempts: Sequence[Attempt]) -> Iterable[tuple[Attempt, int | None]]:
        return zip(attempts, map(self._next.get, attempts), strict=True)

    def advance(self, attempts: Sequence[Attempt], indexes: Sequence[int], *, ended: bool) -> None:
        """Count rows of ``attempts`` that took the ``indexes`` that :meth:`preview` gave for them just now.

        ``ended`` says that they were the attempts' last.
        """
        if len(set(attempts)) < len(attempts) or not self._ended.keys().isdisjoint(attempts):
            self.advance_to(attempts, indexes, ended=ended)
            return
        following = zip(attempts, [index + 1 for index in indexes], strict=True)
        if not ended:
            self._next.update(following)
            return
        for attempt in attempts:
            self._next.pop(attempt, None)
        self._ended.update(following)
        self._forget()

    def advance_to(self, attempts: Sequence[Attempt], indexes: Sequence[Any], *, ended: bool) -> None:
        """As :meth:`advance`, of indexes from anywhere."""
        for attempt, index in zip(attempts, indexes, strict=True):
            # An index that no event can have is refused with its row and must not become the attempt's next one.
            if not isinstance(index, int) or not 0 <= index < _INDEX_LIMIT:
                continue
            following = max(index + 1, self._next.pop(attempt, 0), self._ended.pop(attempt, 0))
            if ended:
                self._ended[attempt] = following
            else:
                self._next[attempt] = following
        self._forget()

    def _forget(self) -> None:
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, bytes, int, float)) or value is None else repr(value)
