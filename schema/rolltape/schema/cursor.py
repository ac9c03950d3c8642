"""Cursors: where a reader stands, as a vector of positions (topic, partition, offset)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from rolltape.schema.errors import CursorError


class Partition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next offset to read in each partition; a partition that is absent is read from 0.

    Written as ``rollout/0:1234,training/0:55``.

    >>> Cursor.parse("rollout/0:12")[Partition("rollout", 0)]
    12
    """

    offsets: Mapping[Partition, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for partition, offset in self.offsets.items():
            if offset < 0:
                raise CursorError(f"expected an offset of 0 or more for {partition}, got {offset}")
        object.__setattr__(self, "offsets", MappingProxyType(dict(sorted(self.offsets.items()))))

    def __getitem__(self, partition: Partition) -> int:
        return self.offsets.get(partition, 0)

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.offsets)

    def __hash__(self) -> int:
        return hash(tuple(self.offsets.items()))

    def __str__(self) -> str:
        return ",".join(f"{partition}:{offset}" for partition, offset in self.offsets.items())

    def covers(self, partition: Partition, offset: int) -> bool:
        """Whether the record at ``offset`` lies before the cursor."""
        return offset < self[partition]

    def advanced(self, partition: Partition, next_offset: int) -> Cursor:
        """This cursor, moved to ``next_offset`` in one partition (never backwards)."""
        return Cursor({**self.offsets, partition: max(next_offset, self[partition])})

    def to_rows(self) -> list[dict[str, str | int]]:
        """The form that ``batch_formed`` stores."""
        return [{"topic": p.topic, "partition": p.partition, "offset": o} for p, o in self.offsets.items()]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, str | int]] | None) -> Cursor:
        """The inverse of :meth:`to_rows`."""
        return cls({Partition(str(r["topic"]), int(r["partition"])): int(r["offset"]) for r in rows or ()})

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read the written form.

        Raises:
            CursorError: the text is not ``topic/partition:offset`` joined by commas.
        """
        offsets: dict[Partition, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            try:
                place, offset = part.rsplit(":", 1)
                topic, partition = place.rsplit("/", 1)
                offsets[Partition(topic, int(partition))] = int(offset)
            except ValueError:
                raise CursorError(f"expected topic/partition:offset as in 'rollout/0:1234', got {part!r}") from None
        return cls(offsets)
