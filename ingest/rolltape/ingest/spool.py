"""The spool: a producer's records on this machine's disk until the log has them.

Appending is one system call; :meth:`SpoolWriter.sync` makes everything appended so far durable with one ``fdatasync``
for all threads that wait for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from rolltape.ingest.frames import encode_frame
from rolltape.ingest.lanes import checked_producer_id
from rolltape.ingest.locks import FileLock
from rolltape.ingest.spool_layout import (
    CLOSED,
    EPOCH,
    LOCK,
    epoch_name,
    epochs_of,
    make_folder,
    producers_folder,
    segment_name,
    segments_of,
    spool_error,
    start_writing,
    sync_folder,
)
from rolltape.ingest.spool_reader import end_of_frames
from rolltape.schema.codec import Record
from rolltape.schema.errors import ProducerFencedError

SEGMENT_BYTES: Final = 32 << 20
_WRITE_BYTES: Final = 4 << 20
"""So much is handed to the disk at once, before anybody waits for it: a full segment is sealed in a moment."""
_sync_data = getattr(os, "fdatasync", os.fsync)


class Appended(NamedTuple):
    """Where a frame lies in its epoch's spool, and its size."""

    segment: int
    offset: int
    num_bytes: int


def next_epoch(producer_folder: Path, minimum: int) -> int:
    """Raise the producer's counter durably to one more than it was, and at least to ``minimum``."""
    counter = producer_folder / EPOCH
    stored = int(counter.read_text()) if counter.exists() else 0
    epoch = max(minimum, max([stored, *epochs_of(producer_folder)]) + 1)
    temporary = counter.with_suffix(".new")
    with temporary.open("w") as file:
        file.write(str(epoch))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(counter)
    sync_folder(producer_folder)
    return epoch


def cut_torn_tails(producer_folder: Path) -> list[tuple[Path, int]]:
    """Cut what a killed writer left half written; needs the producer's lock. Returns (segment, bytes cut)."""
    cuts = []
    for epoch in epochs_of(producer_folder):
        folder = producer_folder / epoch_name(epoch)
        for number in segments_of(folder)[-1:]:
            path = folder / segment_name(number)
            size, end = path.stat().st_size, end_of_frames(path)
            if end < size:
                with path.open("r+b") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())
                cuts.append((path, size - end))
    return cuts


class SpoolWriter:
    """The only live writer of one producer's spool. Threads may share it.

    ``minimum_epoch`` keeps epochs rising where the spool was lost but the lake knows older ones.
    """

    def __init__(
        self, spool: Path, producer_id: str, *, minimum_epoch: int = 1, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Take the producer's lock, cut torn tails and start a new epoch.

        Raises:
            ProducerFencedError: another live writer holds the lock.
            StorageFullError: no room for the new epoch.
            ConfigError: the producer id cannot name a folder.
        """
        self.producer_id = checked_producer_id(producer_id)
        self._producer_folder = producers_folder(spool) / producer_id
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._fd: int | None = None
        try:
            make_folder(self._producer_folder)
            self._owner = self._take_ownership()
            self._begin(minimum_epoch)
        except OSError as error:
            raise spool_error(error, self._producer_folder) from error

    def _take_ownership(self) -> FileLock:
        owner = FileLock.acquire(self._producer_folder / LOCK, wait_s=0.25)
        if owner is None:
            raise ProducerFencedError(
                f"expected to be the only writer of producer {self.producer_id!r}, got a lock held by another live one "
                f"at {self._producer_folder}; end it, or give this one another producer id"
            )
        return owner

    def _begin(self, minimum_epoch: int) -> None:
        self.torn_tails = cut_torn_tails(self._producer_folder)
        self.epoch = next_epoch(self._producer_folder, minimum_epoch)
        self._folder = self._producer_folder / epoch_name(self.epoch)
        make_folder(self._folder)
        self._appended_bytes = 0
        self._synced_bytes = 0
        self._segment = -1
        self._open_segment()

    def _open_segment(self) -> None:
        path = self._folder / segment_name(self._segment + 1)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sync_folder(self._folder)
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._path, self._length, self._started = fd, path, 0, 0
        self._segment += 1

    @property
    def folder(self) -> Path:
        """Folder of this epoch."""
        return self._folder

    @property
    def producer_folder(self) -> Path:
        """Folder of the producer, with all its epochs."""
        return self._producer_folder

    def append(self, record: Record) -> int:
        """Append one frame and return its size. Not durable before :meth:`sync`.

        Raises:
            StorageFullError: no room; nothing of the frame stays.
        """
        return self.append_at(record, record.headers.to_pairs()).num_bytes

    def append_at(self, record: Record, pairs: list[tuple[str, bytes]]) -> Appended:
        """As :meth:`append`, with the record's headers as pairs; tells where the frame lies.

        Raises:
            StorageFullError: no room; nothing of the frame stays.
        """
        buffers = encode_frame(record, pairs)
        size = sum(len(buffer) for buffer in buffers)
        with self._lock:
            fd = self._open_fd()
            try:
                if self._length and self._length + size > self._segment_bytes:
                    _sync_data(fd)
                    self._open_segment()
                    fd = self._open_fd()
                self._write(fd, buffers, size)
            except OSError as error:
                os.ftruncate(self._open_fd(), self._length)
                raise spool_error(error, self._path) from error
            appended = Appended(self._segment, self._length, size)
            self._length += size
            self._appended_bytes += size
            if self._length - self._started >= _WRITE_BYTES:
                start_writing(fd, self._started, self._length - self._started)
                self._started = self._length
        return appended

    def _write(self, fd: int, buffers: list[memoryview | bytes], size: int) -> None:
        written = os.writev(fd, buffers)
        if written < size:
            rest = memoryview(b"".join(buffers))[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ProducerFencedError(
                f"expected an open spool of producer {self.producer_id!r}, got a closed one; open it again"
            )
        return self._fd

    def sync(self) -> None:
        """Make everything appended so far durable; one ``fdatasync`` serves all threads that wait.

        Raises:
            StorageFullError: the file system found no room for what it had taken.
        """
        wanted = self._appended_bytes
        with self._sync_lock:
            if self._synced_bytes >= wanted:
                return
            with self._lock:
                # A duplicate stays valid when another thread seals the segment meanwhile; sealing syncs on its own.
                fd, reached = os.dup(self._open_fd()), self._appended_bytes
            try:
                _sync_data(fd)
            except OSError as error:
                raise spool_error(error, self._path) from error
            finally:
                os.close(fd)
            self._synced_bytes = reached

    def close(self, on_sealed: Callable[[], None] | None = None) -> None:
        """Make everything durable, seal the epoch and give the producer id back. Idempotent.

        ``on_sealed`` is called in between, while nobody else can start this producer.
        """
        if self._fd is None:
            return
        self.sync()
        with self._lock:
            os.close(self._fd)
            self._fd = None
        os.close(os.open(self._folder / CLOSED, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        try:
            if on_sealed is not None:
                on_sealed()
        finally:
            self._owner.release()
