"""A record as a message, and what a message means; claim checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.schema_events import action, batch_of

from rolltape.ingest.kafka.blobs import REFRESH_S, BlobStore
from rolltape.ingest.kafka.client import Message
from rolltape.ingest.kafka.wire import (
    BLOB_BYTES,
    BLOB_DIGEST,
    DAMAGED,
    Foreign,
    Unresolved,
    from_message,
    to_claim,
    to_message,
)
from rolltape.schema.codec import Headers, Record, make_record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import ConfigError, DigestMismatchError
from rolltape.store.location import Location

PLACE = Partition("rollout", 0)


@pytest.fixture
def record() -> Record:
    """Three actions."""
    return make_record(batch_of("action_sampled", action(3)))


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """Blobs beside a lake."""
    return BlobStore(Location.parse(tmp_path / "lake"))


def message(key: bytes | None, value: Any, headers: Any) -> Message:
    """A message as a consumer returns it."""
    return Message(PLACE, 7, key, None if value is None else bytes(value), headers, 0)


def test_a_record_comes_back_as_it_was(record: Record, blobs: BlobStore) -> None:
    back = from_message(message(*to_message(record)), blobs)
    assert isinstance(back, Record)
    assert back.headers == record.headers
    assert (back.key, back.topic, back.partition) == (record.key, "rollout", 0)
    assert bytes(back.value) == bytes(record.value)


def test_a_message_has_bytes_of_one_byte_each(record: Record) -> None:
    # A buffer of wider items makes a record that no consumer can read past.
    value = memoryview(to_message(record).value)
    assert (value.itemsize, value.nbytes) == (1, record.num_bytes)


def test_a_claimed_payload_is_fetched(record: Record, blobs: BlobStore) -> None:
    claim = to_claim(record, record.headers.to_pairs(), *blobs.put(record.value))
    assert claim.value == b""
    back = from_message(message(*claim), blobs)
    assert isinstance(back, Record)
    assert bytes(back.value) == bytes(record.value)
    assert back.headers == record.headers


def test_the_place_of_a_blob_follows_from_lake_and_digest(blobs: BlobStore, tmp_path: Path) -> None:
    sha256, num_bytes = blobs.put(b"abc")
    assert num_bytes == 3
    assert (tmp_path / "lake" / "blobs" / "sha256" / sha256[:2] / sha256).read_bytes() == b"abc"


def test_a_blob_is_written_once_and_refreshed_when_it_is_old(blobs: BlobStore) -> None:
    sha256, _ = blobs.put(b"abc")
    path = blobs.place(sha256).local_path()
    first = path.stat().st_ino
    blobs.put(pa.py_buffer(b"abc"))
    assert path.stat().st_ino == first
    old = path.stat().st_mtime - REFRESH_S - 60
    os.utime(path, (old, old))
    blobs.put(b"abc")
    assert path.stat().st_mtime > old + REFRESH_S


def test_a_blob_that_was_cut_is_written_again(blobs: BlobStore) -> None:
    sha256, _ = blobs.put(b"abc")
    blobs.place(sha256).local_path().write_bytes(b"ab")
    blobs.put(b"abc")
    assert bytes(blobs.get(sha256, 3)) == b"abc"


def test_a_lost_blob_is_accounted_for_by_the_headers(record: Record, blobs: BlobStore) -> None:
    claim = to_claim(record, record.headers.to_pairs(), "0" * 64, 12)
    back = from_message(message(*claim), blobs)
    assert isinstance(back, Unresolved)
    assert (back.reason, back.offset, back.record.headers) == ("blob_missing", 7, record.headers)
    assert "0" * 64 in back.detail


def test_another_blob_is_not_taken_for_the_claimed_one(record: Record, blobs: BlobStore) -> None:
    sha256, num_bytes = blobs.put(b"abc")
    blobs.place(sha256).local_path().write_bytes(b"abd")
    back = from_message(message(*to_claim(record, record.headers.to_pairs(), sha256, num_bytes)), blobs)
    assert isinstance(back, Unresolved)
    assert back.reason == "blob_mismatch"
    with pytest.raises(DigestMismatchError, match=sha256):
        blobs.get(sha256, num_bytes)


def test_a_claim_without_a_lake_says_what_to_do(record: Record) -> None:
    claim = to_claim(record, record.headers.to_pairs(), "0" * 64, 12)
    with pytest.raises(ConfigError, match="lake=URL"):
        from_message(message(*claim), None)


def test_a_damaged_record_says_so(record: Record, blobs: BlobStore) -> None:
    key, value, headers = to_message(record)
    back = from_message(message(key, value, [*headers, (DAMAGED, b"1")]), blobs)
    assert isinstance(back, Unresolved)
    assert back.reason == "truncated_payload"
    assert bytes(back.record.value) == bytes(value)


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (b"k", b"v", []),
        (None, b"v", [("a", b"b")]),
        (b"k", None, [("rt-kind", b"action_sampled")]),
        (b"k", b"v", [("rt-kind", None)]),
    ],
)
def test_a_message_of_somebody_else_is_foreign(key: Any, value: Any, headers: Any) -> None:
    back = from_message(message(key, value, headers), None)
    assert isinstance(back, Foreign)
    assert (back.partition, back.offset, back.reason) == (PLACE, 7, "foreign_message")
    assert back.payload == (value or b"")


@pytest.mark.parametrize(
    "broken",
    [
        [("rt-rows", b"many")],
        [("rt-events", b"{")],
        [("rt-producer", b"\xff")],
        # What no dead letter could carry.
        [("rt-epoch", b"2147483648")],
        [("rt-epoch", b"-1")],
        [("rt-first-seq", b"9223372036854775808")],
        [("rt-last-seq", b"18446744073709551616")],
        [("rt-rows", b"-1")],
        [("rt-events", b'[["t", 0, 0, 2147483648]]')],
        [("rt-events", b'[["t", Infinity, 0, 0]]')],
        [("rt-events", b'[["t", 0, -1, 0]]')],
        [("rt-events", b'[["\\ud800", 0, 0, 0]]')],
        [("rt-events", b"[" * 100_000)],
        [(BLOB_DIGEST, b"../../etc/passwd"), (BLOB_BYTES, b"3")],
        [(BLOB_DIGEST, b"0" * 64)],
        [(BLOB_DIGEST, b"0" * 64), (BLOB_BYTES, b"-1")],
    ],
)
def test_broken_headers_make_a_message_foreign(record: Record, blobs: BlobStore, broken: Any) -> None:
    pairs = dict(record.headers.to_pairs()) | dict(broken)
    back = from_message(message(b"k", record.value, list(pairs.items())), blobs)
    assert isinstance(back, Foreign)


def test_a_key_that_is_no_text_makes_a_message_foreign(record: Record) -> None:
    _, value, headers = to_message(record)
    assert isinstance(from_message(message(b"\xff", value, headers), None), Foreign)


def test_headers_of_others_are_ignored(record: Record) -> None:
    key, value, headers = to_message(record)
    back = from_message(message(key, value, [("traceparent", b"00-1"), *headers, ("x", None)]), None)
    assert isinstance(back, Record)
    assert back.headers == Headers.from_pairs(headers)
