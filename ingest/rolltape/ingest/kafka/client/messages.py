"""What goes to the brokers and comes from them, in our own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rolltape.ingest.kafka.client.vendor import DefaultRecordBatchBuilder
from rolltape.schema.cursor import Partition

Headers = list[tuple[str, bytes]]
"""Headers of a message as the brokers keep them."""


class Message(NamedTuple):
    """One record as the brokers keep it; ``partition`` has our topic's name, ``offset`` is the broker's."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | memoryview | None
    headers: Headers
    timestamp_ms: int


class TopicInfo(NamedTuple):
    """What the brokers say of a topic: our name, identity, shape and settings."""

    name: str
    topic_id: str
    num_partitions: int
    replication: int
    configs: Mapping[str, str]


class Pending(Protocol):
    """A record on its way to the brokers."""

    def done(self) -> bool:
        """Whether it is decided."""
        ...

    def error(self) -> Exception | None:
        """Why it failed; None while undecided and where it succeeded."""
        ...

    @property
    def offset(self) -> int:
        """The broker's offset once it succeeded, else -1."""
        ...


def record_bytes(key: bytes | None, value: Any, headers: Headers) -> int:
    """Upper bound of what a message takes in a request and in the broker's log: key, value, headers and overhead."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers))
