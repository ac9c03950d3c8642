"""How a record of ours lies in the log: key, value and headers of a message, and what a message means to us.

A payload that lies beside the lake (a claim check) is named by its digest and length; where it lies is derived from the
lake, never from the message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from rolltape.ingest.kafka.client import Headers as Pairs
from rolltape.ingest.kafka.client import Message
from rolltape.schema.codec import Headers, Record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import CodecError, ConfigError, DigestMismatchError
from rolltape.schema.kinds import TOPICS
from rolltape.schema.reasons import BLOB_MISMATCH, BLOB_MISSING, FOREIGN_MESSAGE, TRUNCATED_PAYLOAD

BLOB_DIGEST: Final = "rt-blob-sha256"
BLOB_BYTES: Final = "rt-blob-bytes"
DAMAGED: Final = "rt-damaged"
"""Header of a record that was damaged on its producer's disk: its bytes are not what was recorded."""


class Blobs(Protocol):
    """Where claimed payloads are fetched from (see :class:`rolltape.ingest.kafka.blobs.BlobStore`)."""

    def get(self, sha256: str, num_bytes: int) -> pa.Buffer:
        """The payload; FileNotFoundError where there is none, DigestMismatchError where it is another."""
        ...


class Outgoing(NamedTuple):
    """A message as it is handed to the brokers."""

    key: bytes
    value: memoryview | bytes
    headers: Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A message that has no readable headers of ours: nothing of it can be accounted for but its place."""

    partition: Partition
    offset: int
    reason: str
    detail: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """A record whose payload is lost, another one or damaged: its headers still account for it.

    ``record`` has the damaged bytes as its value, or none.
    """

    record: Record
    offset: int
    reason: str
    detail: str


def to_message(record: Record, pairs: Pairs | None = None) -> Outgoing:
    """The message of a record that carries its own payload; ``pairs`` are its headers where the caller has them."""
    value = record.value if isinstance(record.value, bytes) else memoryview(record.value).cast("B")
    return Outgoing(record.key.encode(), value, record.headers.to_pairs() if pairs is None else pairs)


def to_claim(record: Record, pairs: Pairs, sha256: str, num_bytes: int) -> Outgoing:
    """The message of a record with headers ``pairs`` whose payload lies beside the lake under ``sha256``."""
    claim = [(BLOB_DIGEST, sha256.encode()), (BLOB_BYTES, b"%d" % num_bytes)]
    return Outgoing(record.key.encode(), b"", [*pairs, *claim])


def claim_of(headers: Pairs) -> tuple[str, int] | None:
    """Digest and length of the payload that the headers claim; None where the message carries it.

    Raises:
        CodecError: headers of a claim that cannot be read.
    """
    found = dict(headers)
    if BLOB_DIGEST not in found:
        return None
    try:
        sha256, num_bytes = found[BLOB_DIGEST].decode("ascii"), int(found[BLOB_BYTES])
    except (KeyError, ValueError, AttributeError) as error:
        raise CodecError(
            f"expected headers {BLOB_DIGEST} and {BLOB_BYTES} of a claim check, got {found.get(BLOB_DIGEST)!r} and "
            f"{found.get(BLOB_BYTES)!r}"
        ) from error
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef") or num_bytes < 0:
        raise CodecError(f"expected a SHA-256 in hexadecimal digits and a length, got {sha256!r} and {num_bytes}")
    return sha256, num_bytes


def from_message(message: Message, blobs: Blobs | None) -> Record | Foreign | Unresolved:
    """What a message means, with its claimed payload fetched.

    Raises:
        ConfigError: a claim check, and no lake to fetch its payload from.
        StoreError, OSError: the store did not answer; the message is as good as before.
    """
    try:
        record, claim = _read(message)
    except CodecError as error:
        return Foreign(
            partition=message.partition,
            offset=message.offset,
            reason=FOREIGN_MESSAGE,
            detail=str(error),
            payload=b"" if message.value is None else bytes(message.value),
        )
    if DAMAGED in dict(message.headers):
        detail = "damaged on its producer's disk: the checksum of its spooled frame did not hold"
        return Unresolved(record=record, offset=message.offset, reason=TRUNCATED_PAYLOAD, detail=detail)
    return record if claim is None else _resolved(record, message.offset, claim, blobs)


def headers_of(message: Message) -> Headers | None:
    """Headers of a record of ours, whatever its payload is; None for any other message."""
    try:
        return _read(message)[0].headers
    except CodecError:
        return None


def _read(message: Message) -> tuple[Record, tuple[str, int] | None]:
    """The record that a message carries or claims, and the claim."""
    return _record(message, _headers(message)), claim_of(message.headers)


def _headers(message: Message) -> Headers:
    """Headers that a dead letter can carry too: what cannot be written down would stop every sink, again and again."""
    headers = Headers.from_pairs(_pairs(message))
    try:
        "".join((headers.producer_id, *(found.trajectory_id for found in headers.event_ranges))).encode()
    except UnicodeEncodeError as error:
        raise CodecError(f"expected record headers in UTF-8, got {error}") from None
    small = (headers.producer_epoch, *(number for found in headers.event_ranges for number in found[1:]))
    large = (headers.num_rows, headers.first_lane_seq, headers.last_lane_seq)
    if min(*small, *large) < 0 or max(small) >= 1 << 31 or max(large) >= 1 << 63:
        raise CodecError(
            "expected numbers of 0 to 2^31 - 1 as epoch, attempts and event indexes, and to 2^63 - 1 as rows and lane "
            f"range, got {min(*small, *large)} to {max(*small, *large)}"
        )
    return headers


def _pairs(message: Message) -> Any:
    return [(name, value) for name, value in message.headers if value is not None]


def _record(message: Message, headers: Headers) -> Record:
    topic, partition = message.partition
    if topic not in TOPICS:
        raise CodecError(f"expected a topic of {', '.join(TOPICS)}, got {topic!r}")
    try:
        key = (message.key or b"").decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"expected a key in UTF-8, got {message.key!r}") from error
    value = b"" if message.value is None else message.value
    return Record(topic=topic, partition=partition, key=key, headers=headers, value=pa.py_buffer(value))


def _resolved(record: Record, offset: int, claim: tuple[str, int], blobs: Blobs | None) -> Record | Unresolved:
    sha256, num_bytes = claim
    if blobs is None:
        raise ConfigError(
            f"expected a lake to fetch the payload {sha256} ({num_bytes} bytes) of {record.topic}/{record.partition} "
            f"offset {offset} from, got none; open the log with kafka://…?lake=URL"
        )
    try:
        return replace(record, value=blobs.get(sha256, num_bytes))
    except FileNotFoundError as error:
        return Unresolved(record=record, offset=offset, reason=BLOB_MISSING, detail=str(error))
    except DigestMismatchError as error:
        return Unresolved(record=record, offset=offset, reason=BLOB_MISMATCH, detail=str(error))
