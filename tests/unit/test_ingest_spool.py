"""Frames, spool files, and reading them while they are written."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rolltape.ingest.frames import HEAD_BYTES, decode_frame, encode_frame, parse_head
from rolltape.ingest.locks import FileLock, is_locked
from rolltape.ingest.spool import SpoolWriter
from rolltape.ingest.spool_layout import WatchedFolder, start_writing
from rolltape.ingest.spool_reader import Place, ProducerReader, end_of_frames
from rolltape.schema.codec import Headers, Record
from rolltape.schema.errors import CodecError, ConfigError, ProducerFencedError, StorageFullError
from rolltape.schema.records import EventRange

HEADERS = Headers(
    kind="action_sampled",
    schema_version="1.1",
    codec="arrow-ipc-stream+lz4",
    num_rows=1,
    producer_id="p",
    producer_epoch=1,
    first_lane_seq=0,
    last_lane_seq=0,
    event_ranges=(EventRange("trajectory", 0, 3, 3),),
)


def record(number: int, size: int = 100) -> Record:
    headers = replace(HEADERS, first_lane_seq=number, last_lane_seq=number)
    return Record(topic="rollout", partition=0, key="grüße", headers=headers, value=bytes([number % 256]) * size)


def frame_of(item: Record) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(item))


def seqs(reader: ProducerReader, max_bytes: int = 1 << 20) -> list[int]:
    return [spooled.record.headers.first_lane_seq for _, spooled in reader.read(max_bytes)]


# Frames.


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000])
def test_a_frame_comes_back_and_is_aligned(size: int) -> None:
    frame = frame_of(record(5, size))
    head = parse_head(frame)
    assert len(frame) == head.frame_bytes
    assert len(frame) % 8 == head.value_start % 8 == 0
    decoded = decode_frame(head, pa.py_buffer(frame), 0)
    assert decoded.intact
    assert decoded.record.headers == record(5, size).headers
    assert (decoded.record.topic, decoded.record.key) == ("rollout", "grüße")
    assert bytes(memoryview(decoded.record.value)) == record(5, size).value


def test_a_damaged_value_is_still_accounted_for() -> None:
    frame = bytearray(frame_of(record(5)))
    head = parse_head(bytes(frame))
    frame[head.value_start + 3] ^= 1
    decoded = decode_frame(head, pa.py_buffer(bytes(frame)), 0)
    assert not decoded.intact
    assert decoded.record.headers.first_lane_seq == 5


@pytest.mark.parametrize("position", [4, 8, 16, HEAD_BYTES + 2])
def test_damaged_headers_are_no_frame(position: int) -> None:
    frame = bytearray(frame_of(record(5)))
    frame[position] ^= 1
    data = bytes(frame) + bytes(1000)
    with pytest.raises(CodecError, match="checksum"):
        decode_frame(parse_head(data), pa.py_buffer(data), 0)


# Writer and reader.


def test_what_is_appended_is_read_in_order_while_it_grows(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "p")
    reader = ProducerReader(writer.producer_folder)
    assert seqs(reader) == []
    for number in range(3):
        writer.append(record(number))
    assert seqs(reader) == [0, 1, 2]
    assert seqs(reader) == []
    writer.append(record(3, 3 << 20))
    writer.append(record(4))
    assert seqs(reader, 8 << 20) == [3, 4]
    writer.close()


def test_the_disk_begins_before_anybody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr("rolltape.ingest.spool.start_writing", lambda fd, offset, size: begun.append((offset, size)))
    writer = SpoolWriter(tmp_path, "p", segment_bytes=8 << 20)
    for number in range(9):
        writer.append(record(number, 3 << 19))
    assert [size >= 4 << 20 for _, size in begun] == [True, True]
    assert [offset for offset, _ in begun] == [0, 0], "each segment from its beginning"
    start_writing(-1, 0, 1)
    writer.close()
    assert seqs(ProducerReader(writer.producer_folder), 64 << 20) == list(range(9))


def test_segments_are_sealed_read_on_and_deleted_once_confirmed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "p", segment_bytes=1000)
    for number in range(20):
        writer.append(record(number))
    names = sorted(path.name for path in writer.folder.iterdir())
    assert len(names) > 3
    reader = ProducerReader(writer.producer_folder)
    assert seqs(reader) == list(range(20))
    (epoch,) = reader.epochs()
    epoch.confirm(epoch.place)
    assert sorted(path.name for path in writer.folder.iterdir()) == names[-1:]
    writer.append(record(20))
    reader.rescan()
    assert seqs(reader) == [20]
    reader.forget_drained()
    assert writer.folder.exists()
    writer.close()
    epoch.confirm(epoch.place)
    reader.forget_drained()
    assert not writer.folder.exists()


def test_a_rewind_goes_back_to_what_was_confirmed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "p", segment_bytes=500)
    reader = ProducerReader(writer.producer_folder)
    for number in range(4):
        writer.append(record(number))
    reader.rescan()
    assert seqs(reader) == [0, 1, 2, 3]
    (epoch,) = reader.epochs()
    epoch.rewind()
    assert seqs(reader) == [0, 1, 2, 3]
    place = epoch.place
    writer.append(record(4))
    epoch.confirm(place)
    reader.rescan()
    assert seqs(reader) == [4]
    epoch.rewind()
    assert seqs(reader) == [4]
    writer.close()


def test_the_older_epoch_is_read_to_its_end_first(tmp_path: Path) -> None:
    for epoch in range(2):
        writer = SpoolWriter(tmp_path, "p")
        for number in range(3):
            writer.append(record(10 * epoch + number))
        writer.close()
    assert seqs(ProducerReader(tmp_path / "producers" / "p")) == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("kept", [1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 10, 250])
def test_a_torn_tail_is_waited_for_and_cut_by_the_next_writer(tmp_path: Path, kept: int) -> None:
    writer = SpoolWriter(tmp_path, "p")
    writer.append(record(0))
    path = writer.folder / "000000.frames"
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(frame_of(record(1))[:kept])
    reader = ProducerReader(writer.producer_folder)
    assert seqs(reader) == [0]
    writer._owner.release()  # the writer died
    following = SpoolWriter(tmp_path, "p")
    assert following.torn_tails == [(path, kept)]
    assert path.stat().st_size == whole
    assert following.epoch == 2
    following.append(record(0))
    reader.rescan()
    assert seqs(reader) == [0]
    following.close()


def test_frames_behind_damage_are_found(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "p")
    sizes = [writer.append(record(number)) for number in range(4)]
    path = writer.folder / "000000.frames"
    with path.open("r+b") as file:
        file.seek(sizes[0] + HEAD_BYTES + 1)
        file.write(b"\xff\xff")
    assert seqs(ProducerReader(writer.producer_folder)) == [0, 2, 3]
    assert end_of_frames(path) == sum(sizes)
    writer.close()


def test_epochs_rise_also_where_the_spool_was_lost(tmp_path: Path) -> None:
    first = SpoolWriter(tmp_path / "one", "p")
    first.close()
    assert SpoolWriter(tmp_path / "one", "p").epoch == first.epoch + 1
    assert SpoolWriter(tmp_path / "new disk", "p", minimum_epoch=8).epoch == 8


def test_one_live_writer(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "p")
    with pytest.raises(ProducerFencedError, match="another live one"):
        SpoolWriter(tmp_path, "p")
    writer.close()
    with pytest.raises(ProducerFencedError, match="open it again"):
        writer.append(record(0))
    SpoolWriter(tmp_path, "p").close()


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "x" * 201])
def test_a_producer_id_names_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="producer id"):
        SpoolWriter(tmp_path, name)


# Full disk.


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond ``num_bytes``: short writes and errors as a full disk gives them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_takes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "p")
    writer.append(record(0))
    size = (writer.folder / "000000.frames").stat().st_size
    with file_size_limit(size + 100):
        for _ in range(2):
            with pytest.raises(StorageFullError, match="may be sent again"):
                writer.append(record(1))
            assert (writer.folder / "000000.frames").stat().st_size == size
    writer.append(record(1))
    writer.sync()
    assert seqs(ProducerReader(writer.producer_folder)) == [0, 1]
    writer.close()


def test_a_full_disk_has_several_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SpoolWriter(tmp_path, "p")

    def refuse(fd: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", refuse)
    with pytest.raises(StorageFullError, match="No space left"):
        writer.append(record(0))
    monkeypatch.undo()
    writer.append(record(0))
    writer.close()


# Locks.


def test_a_lock_is_not_inherited_by_a_fork(tmp_path: Path) -> None:
    lock = FileLock.acquire(tmp_path / "lock")
    assert lock is not None
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read_end, 1)
        os._exit(0)
    assert is_locked(tmp_path / "lock")
    lock.release()
    assert not is_locked(tmp_path / "lock")
    os.write(write_end, b"x")
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)


def test_places_are_ordered() -> None:
    assert Place(0, 900) < Place(1, 0) < Place(1, 8)


def test_a_watched_folder_is_listed_again_only_after_a_change(tmp_path: Path) -> None:
    watched = WatchedFolder(tmp_path)
    os.utime(tmp_path, (1_000, 1_000))
    assert [watched.changed(), watched.changed()] == [True, False]
    (tmp_path / "new").touch()
    assert [watched.changed(), watched.changed()] == [True, True]  # too fresh to be sure that nothing else came
    os.utime(tmp_path, (2_000, 2_000))
    assert [watched.changed(), watched.changed()] == [True, False]
    assert WatchedFolder(tmp_path / "missing").changed()
