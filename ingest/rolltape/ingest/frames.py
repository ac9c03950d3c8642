"""Frames: how one record lies in a spool file.

A frame is a head of 24 bytes, the record's headers and its value, each padded to 8 bytes::

    magic "RTF1" | header bytes u32 | value bytes u64 | header crc32 u32 | value crc32 u32

The header checksum covers the head too, so a frame whose value is damaged is still accounted for by its headers.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple, cast

import pyarrow as pa

from rolltape.schema.codec import Headers, Record
from rolltape.schema.errors import CodecError
from rolltape.schema.kinds import Topic

_HEAD: Final = struct.Struct("<4sIQII")
_CHECKED_HEAD: Final = struct.Struct("<4sIQI")
_PLACE: Final = struct.Struct("<HHIH")
_PAIR: Final = struct.Struct("<HI")
MAGIC: Final = b"RTF1"

HEAD_BYTES: Final = _HEAD.size


class FrameHead(NamedTuple):
    """The fixed part of a frame."""

    header_bytes: int
    value_bytes: int
    header_crc: int
    value_crc: int

    @property
    def value_start(self) -> int:
        """Offset of the value in the frame."""
        return HEAD_BYTES + self.header_bytes

    @property
    def frame_bytes(self) -> int:
        """Size of the whole frame with its padding."""
        return self.value_start + _padded(self.value_bytes)


class DecodedFrame(NamedTuple):
    """A record as read back; ``intact`` is False when the value's CRC-32 is not ``checksum`` any more."""

    record: Record
    checksum: int
    intact: bool


def _padded(size: int) -> int:
    return (size + 7) & ~7


def _pack_headers(record: Record, pairs: list[tuple[str, bytes]]) -> bytes:
    topic, key = record.topic.encode(), record.key.encode()
    parts = [_PLACE.pack(len(topic), record.partition, len(key), len(pairs)), topic, key]
    for name, value in pairs:
        encoded = name.encode()
        parts += (_PAIR.pack(len(encoded), len(value)), encoded, value)
    packed = b"".join(parts)
    return packed.ljust(_padded(len(packed)), b"\0")


def encode_frame(record: Record, pairs: list[tuple[str, bytes]] | None = None) -> list[memoryview | bytes]:
    """The frame of a record as buffers to write one after the other; the value is not copied.

    ``pairs`` are the record's headers (:meth:`~rolltape.schema.codec.Headers.to_pairs`), where the caller has them.
    """
    value = memoryview(record.value).cast("B")
    header = _pack_headers(record, record.headers.to_pairs() if pairs is None else pairs)
    value_crc = zlib.crc32(value)
    checked = _CHECKED_HEAD.pack(MAGIC, len(header), len(value), value_crc)
    head = _HEAD.pack(MAGIC, len(header), len(value), zlib.crc32(header, zlib.crc32(checked)), value_crc)
    padding = b"\0" * (_padded(len(value)) - len(value))
    return [head + header, value, padding] if padding else [head + header, value]


def parse_head(data: memoryview | bytes) -> FrameHead:
    """Read the fixed part.

    Raises:
        CodecError: these bytes do not start a frame.
    """
    magic, header_bytes, value_bytes, header_crc, value_crc = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CodecError(f"expected a frame that starts with {MAGIC!r}, got {bytes(magic)!r}")
    return FrameHead(header_bytes, value_bytes, header_crc, value_crc)


def _unpack_headers(header: memoryview) -> tuple[str, int, str, list[tuple[str, bytes]]]:
    topic_bytes, partition, key_bytes, num_pairs = _PLACE.unpack_from(header)
    position = _PLACE.size
    topic = str(header[position : position + topic_bytes], "utf-8")
    position += topic_bytes
    key = str(header[position : position + key_bytes], "utf-8")
    position += key_bytes
    pairs = []
    for _ in range(num_pairs):
        name_bytes, value_bytes = _PAIR.unpack_from(header, position)
        position += _PAIR.size
        name = str(header[position : position + name_bytes], "utf-8")
        position += name_bytes
        pairs.append((name, bytes(header[position : position + value_bytes])))
        position += value_bytes
    return topic, partition, key, pairs


def decode_frame(head: FrameHead, data: pa.Buffer, start: int) -> DecodedFrame:
    """The record of the frame that starts at ``start`` of ``data`` and lies in it wholly; the value is not copied.

    Raises:
        CodecError: the headers' checksum does not hold, or they are no headers of ours.
    """
    view = memoryview(data)[start : start + head.frame_bytes]
    header = view[HEAD_BYTES : head.value_start]
    checked = _CHECKED_HEAD.pack(MAGIC, head.header_bytes, head.value_bytes, head.value_crc)
    if zlib.crc32(header, zlib.crc32(checked)) != head.header_crc:
        raise CodecError(f"expected headers with checksum {head.header_crc:#010x}, got others: the frame is damaged")
    topic, partition, key, pairs = _unpack_headers(header)
    value = data.slice(start + head.value_start, head.value_bytes)
    record = Record(
        topic=cast("Topic", topic), partition=partition, key=key, headers=Headers.from_pairs(pairs), value=value
    )
    return DecodedFrame(record, head.value_crc, zlib.crc32(memoryview(value)) == head.value_crc)
