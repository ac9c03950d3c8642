"""From the brokers' messages to an archive: the one way in which sink and readers take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rolltape.ingest.archive import Archive, Outcome
from rolltape.ingest.kafka.client import Message
from rolltape.ingest.kafka.wire import Blobs, Foreign, Unresolved, from_message
from rolltape.ingest.parking import Refused
from rolltape.schema.cursor import Partition


class Fed(NamedTuple):
    """What one message came to. ``seek_to``: the broker's offset to go on at, where that is not the next one."""

    outcome: Outcome
    num_bytes: int
    timestamp_ms: int
    seek_to: int | None = None


def feed(
    archive: Archive,
    partition: Partition,
    messages: Sequence[Message],
    bases: Mapping[Partition, int],
    blobs: Blobs | None,
) -> Iterator[Fed]:
    """Offer the messages of one partition, one at a time, until one asks for others to be read again.

    Raises:
        StoreError, OSError: a claimed payload could not be fetched just now; nothing of that message was offered.
    """
    base = bases.get(partition, 0)
    for message in messages:
        offset = message.offset + base
        outcome, num_bytes = _offer(archive, message, offset, blobs)
        again = archive.reread_from(partition)
        seek_to = None if again is None or again == offset + 1 else again - base
        yield Fed(outcome, num_bytes, message.timestamp_ms, seek_to)
        if seek_to is not None:
            return


def _offer(archive: Archive, message: Message, offset: int, blobs: Blobs | None) -> tuple[Outcome, int]:
    time_us = message.timestamp_ms * 1000
    found = from_message(message, blobs)
    if isinstance(found, Foreign):
        outcome = archive.offer_foreign(
            message.partition, offset, detail=found.detail, payload=found.payload, time_us=time_us
        )
        return outcome, len(found.payload)
    refused = None
    if isinstance(found, Unresolved):
        refused, found = Refused(found.reason, found.detail), found.record
    return archive.offer(found, offset=offset, refused=refused, time_us=time_us), found.num_bytes
