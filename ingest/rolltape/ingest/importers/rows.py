"""Events of an import while they are collected: columns by kind, with ids that derive from the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.schema.identity import derived_id


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids that are a function of the file's digest and a place in it.

    >>> Ids("ab" * 32).of("trajectory", 3) == Ids("ab" * 32).of("trajectory", 3)
    True
    """

    sha256: str

    def of(self, what: str, *place: str | int) -> str:
        """The id of one thing; ``place`` tells it from others of its sort in the file."""
        return derived_id("import", self.sha256, what, *place)


@dataclass(slots=True)
class EventRows:
    """Collected events as columns by kind, in the order in which kinds were first added.

    A column that a row does not name is null in that row.
    """

    _columns: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    _num_rows: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, **fields: Any) -> None:
        """Add one event. ``fields`` are flat names of the envelope and of the kind's own columns."""
        columns = self._columns.setdefault(kind, {})
        num_rows = self._num_rows.get(kind, 0)
        for name in fields.keys() - columns.keys():
            columns[name] = [None] * num_rows
        for name, values in columns.items():
            values.append(fields.get(name))
        self._num_rows[kind] = num_rows + 1

    def extend(self, other: EventRows) -> None:
        """Add all events of ``other`` (a row is collected apart and taken over once it is whole)."""
        for kind, columns in other._columns.items():
            for index in range(other._num_rows[kind]):
                self.add(kind, **{name: values[index] for name, values in columns.items()})

    def take_new(self, known: set[str]) -> EventRows:
        """The events whose id is not in ``known``, each id once; adds their ids to ``known``."""
        kept = EventRows()
        for kind, columns in self._columns.items():
            keep = []
            for index, event_id in enumerate(columns["event_id"]):
                if event_id not in known:
                    known.add(event_id)
                    keep.append(index)
            if keep:
                kept._columns[kind] = {name: [values[index] for index in keep] for name, values in columns.items()}
                kept._num_rows[kind] = len(keep)
        return kept

    def batches(self) -> Iterator[tuple[str, Mapping[str, list[Any]], int]]:
        """Kind, columns and number of rows of each kind."""
        for kind, columns in self._columns.items():
            yield kind, columns, self._num_rows[kind]

    def __len__(self) -> int:
        return sum(self._num_rows.values())

    def count(self, kind: str) -> int:
        """Events of one kind."""
        return self._num_rows.get(kind, 0)
