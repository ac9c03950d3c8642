"""Which payloads travel in their message, and which lie beside the lake: decided by what is really sent (case D18)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from rolltape.ingest.kafka.blobs import BlobStore
from rolltape.ingest.kafka.client import Headers, record_bytes
from rolltape.ingest.kafka.topics import MAX_MESSAGE_BYTES
from rolltape.ingest.kafka.wire import Outgoing, to_claim, to_message
from rolltape.schema.codec import Record
from rolltape.schema.errors import LogError, RecordTooLargeError

_NEAR: Final = 64 << 10


class Claims:
    """Makes messages of records.

    Args:
        blobs: where claimed payloads go; None where there is no lake.
        claim_bytes: payloads above it are claimed, where there is a lake.
        limit: largest message that the brokers take of a topic, in bytes with overhead.
        refresh: look at the topics again, after the brokers refused a record for its size.
    """

    def __init__(
        self,
        blobs: BlobStore | None,
        claim_bytes: int,
        *,
        limit: Callable[[str], int],
        refresh: Callable[[], None],
    ) -> None:
        self._blobs = blobs
        self._claim_bytes = claim_bytes
        self._topic_limit = limit
        self._refresh = refresh
        self._learnt: dict[str, int] = {}

    def limit(self, topic: str) -> int:
        """Largest message of a topic, in bytes with overhead."""
        return min(self._topic_limit(topic), self._learnt.get(topic, MAX_MESSAGE_BYTES))

    def is_claim(self, record: Record, pairs: Headers) -> bool:
        """Whether the payload is to lie beside the lake: beyond what is configured, or what the topic takes."""
        if record.num_bytes > self._claim_bytes and self._blobs is not None:
            return True
        limit = self.limit(record.topic)
        near = record.num_bytes + sum(len(value) for _, value in pairs) > limit - _NEAR
        return near and record_bytes(*to_message(record, pairs)) > limit

    def message(self, record: Record, pairs: Headers) -> Outgoing:
        """The message of a record with headers ``pairs``: with its payload, or with a claim check.

        Raises:
            RecordTooLargeError: too large, and no lake; or the headers alone are.
            StoreError: the payload could not be kept.
        """
        if not self.is_claim(record, pairs):
            return to_message(record, pairs)
        limit = self.limit(record.topic)
        if self._blobs is None:
            raise too_large(record, limit)
        claim = to_claim(record, pairs, *self._blobs.put(record.value))
        if record_bytes(*claim) > limit:
            raise RecordTooLargeError(
                f"expected headers of a record to fit the {limit} bytes that topic {record.topic} takes, got "
                f"{record_bytes(*claim)}; raise the topic's max.message.bytes"
            )
        return claim

    def explained(self, error: Exception, topic: str, num_bytes: int) -> Exception:
        """What a record of ``num_bytes`` failed of; where it was too large, the limit is lower than we thought.

        With a lake the same record is claimed at the next try, and the error is one that passes.
        """
        if not isinstance(error, RecordTooLargeError):
            return error
        with contextlib.suppress(LogError):
            self._refresh()
        if num_bytes <= self.limit(topic):
            self._learnt[topic] = num_bytes // 2
        if self._blobs is None:
            return error
        return LogError(f"{error}; payloads above {self.limit(topic)} bytes lie beside the lake from now on")


def too_large(record: Record, limit: int) -> RecordTooLargeError:
    """The error of a record that its topic does not take, and that has no lake to lie beside."""
    return RecordTooLargeError(
        f"expected a record of at most {limit} bytes for topic {record.topic}, got a payload of {record.num_bytes}; "
        "open the log with a lake (kafka://…?lake=URL): payloads that are too large are kept beside it"
    )
