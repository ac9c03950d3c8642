"""Reading a producer's spool while it is written: what the committer archives from.

A reader keeps two positions in each epoch: how far it read, and how far the log confirmed. After a failed commit it
goes back to the second; sealed segments before it are deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from rolltape.ingest.frames import HEAD_BYTES, MAGIC, DecodedFrame, decode_frame, parse_head
from rolltape.ingest.spool_layout import CLOSED, WatchedFolder, epoch_name, epochs_of, segment_name, segments_of
from rolltape.schema.codec import Record
from rolltape.schema.errors import CodecError

_CHUNK_BYTES: Final = 1 << 20


class Place(NamedTuple):
    """A position in the spool of one epoch; places of one epoch are ordered."""

    segment: int
    offset: int


START: Final = Place(-1, 0)


class SpooledRecord(NamedTuple):
    """A record read from the spool; ``intact`` is False when its value's checksum does not hold."""

    record: Record
    place: Place
    num_bytes: int
    checksum: int
    intact: bool


class FoundFrame(NamedTuple):
    """A whole frame with sound headers, and where it lies in the data that was scanned."""

    start: int
    end: int
    frame: DecodedFrame


def _frame_at(data: pa.Buffer, start: int) -> FoundFrame | None:
    view = memoryview(data)
    if start + HEAD_BYTES > len(view):
        return None
    try:
        head = parse_head(view[start : start + HEAD_BYTES])
        end = start + head.frame_bytes
        return FoundFrame(start, end, decode_frame(head, data, start)) if end <= len(view) else None
    except CodecError:
        return None


def _is_cut(data: pa.Buffer, start: int) -> bool:
    """Whether a frame starts here that ends behind the data."""
    view = memoryview(data)
    try:
        head = parse_head(view[start : start + HEAD_BYTES])
    except CodecError:
        return False
    return start + head.frame_bytes > len(view)


def _frame_after(data: pa.Buffer, start: int) -> FoundFrame | None:
    """The next sound frame behind damaged bytes. What the damage took shows up as a gap of its lane."""
    content = data.to_pybytes() if data.size else b""
    while (start := content.find(MAGIC, start + 1)) >= 0:
        frame = _frame_at(data, start)
        if frame is not None:
            return frame
    return None


def scan_frames(data: pa.Buffer, start: int = 0, *, is_whole: bool = True) -> Iterator[FoundFrame]:
    """Every whole frame with sound headers, over damaged bytes where sound frames follow.

    Where the data is only a part of what is there (not ``is_whole``), a frame that is cut at its end is left for the
    next look, and not searched for others.
    """
    while start + HEAD_BYTES <= data.size:
        found = _frame_at(data, start)
        if found is None and (is_whole or not _is_cut(data, start)):
            found = _frame_after(data, start)
        if found is None:
            return
        yield found
        start = found.end


def end_of_frames(path: Path) -> int:
    """Offset after the last sound frame of a file that nobody writes."""
    end = 0
    for found in scan_frames(pa.py_buffer(path.read_bytes())):
        end = found.end
    return end


class EpochReader:
    """Reads the frames of one start of a producer, in order."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """Start at the oldest segment that is there."""
        self.epoch = epoch
        self._folder = folder
        self._watched = WatchedFolder(folder)
        self._read = START
        self._confirmed = START
        self._segments: list[int] = []
        self.rescan()
        self._fd: int | None = None
        self._fd_segment = -1

    @property
    def place(self) -> Place:
        """Where the next read goes on."""
        return self._read

    def rescan(self) -> None:
        """Look for new segments."""
        if self._watched.changed():
            self._segments = segments_of(self._folder)

    def read(self, max_bytes: int) -> list[SpooledRecord]:
        """Frames that are there, up to about ``max_bytes`` (at least one)."""
        records: list[SpooledRecord] = []
        while max_bytes > 0:
            frames = self._next_frames()
            if not frames:
                break
            records += self._taken(frames)
            max_bytes -= frames[-1].end
        return records

    def _next_frames(self) -> list[FoundFrame]:
        """Unread frames of the current segment, going on to the next segment at its end; none when there are none."""
        while True:
            fd = self._current_fd()
            if fd is None:
                return []
            # Whether a later segment exists is asked before the size: where one does, the size is final.
            sealed = self._read.segment != self._segments[-1]
            available = os.fstat(fd).st_size - self._read.offset
            # A frame larger than a chunk is found once everything is looked at.
            for size in dict.fromkeys((min(available, _CHUNK_BYTES), available)):
                if size < HEAD_BYTES:
                    break
                data = pa.py_buffer(os.pread(fd, size, self._read.offset))
                frames = list(scan_frames(data, is_whole=size == available))
                if frames:
                    return frames
            if not sealed:
                return []
            following = next(number for number in self._segments if number > self._read.segment)
            self._read = Place(following, 0)

    def _taken(self, frames: list[FoundFrame]) -> Iterator[SpooledRecord]:
        segment, base = self._read
        for found in frames:
            decoded = found.frame
            place, size = Place(segment, base + found.start), found.end - found.start
            yield SpooledRecord(decoded.record, place, size, decoded.checksum, decoded.intact)
        self._read = Place(segment, base + frames[-1].end)

    def _current_fd(self) -> int | None:
        if self._read.segment < 0:
            if not self._segments:
                return None
            self._read = Place(self._segments[0], 0)
        if self._fd_segment != self._read.segment:
            self._close_fd()
            self._fd = os.open(self._folder / segment_name(self._read.segment), os.O_RDONLY | os.O_CLOEXEC)
            self._fd_segment = self._read.segment
        return self._fd

    def _close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self._fd_segment = None, -1

    def confirm(self, place: Place) -> None:
        """Everything before ``place`` is logged: a rewind does not go behind it, and sealed segments before it go."""
        self._confirmed = place
        for number in [number for number in self._segments if number < place.segment]:
            (self._folder / segment_name(number)).unlink(missing_ok=True)
            self._segments.remove(number)

    def skip(self, start: Place, end: Place) -> bool:
        """Go on behind a frame that the caller has in memory, if it is the next one; tells whether it was."""
        segment, offset = self._read
        follows = start == self._read or (start == Place(segment + 1, 0) and self._is_at_end(segment, offset))
        if follows:
            self._read = end
            if end.segment not in self._segments[-1:]:
                self._segments.append(end.segment)
        return follows

    def _is_at_end(self, segment: int, offset: int) -> bool:
        """Whether the reader is behind the last frame of a sealed segment (or before the first of all)."""
        if segment < 0:
            return True
        try:
            return (self._folder / segment_name(segment)).stat().st_size == offset
        except FileNotFoundError:
            return True

    def resume_at(self, place: Place) -> None:
        """Start behind what was confirmed before.

        Where that segment is gone, more was confirmed than ``place`` tells: start at the oldest one that is there.
        """
        self._read = self._confirmed = place if place.segment in self._segments else START

    def rewind(self) -> None:
        """Read again from the last confirmed place."""
        self._read = self._confirmed

    def rewind_to(self, place: Place) -> None:
        """Read again from ``place``, which was read before."""
        self._read = min(self._read, place)

    def is_sealed(self) -> bool:
        """Whether its writer ended in order."""
        return (self._folder / CLOSED).exists()

    def is_drained(self) -> bool:
        """Whether everything that is there now was read and confirmed."""
        self._segments = segments_of(self._folder)
        if not self._segments:
            return True
        size = (self._folder / segment_name(self._segments[-1])).stat().st_size
        return self._confirmed == self._read >= Place(self._segments[-1], size)

    def delete(self) -> None:
        """Remove the folder of a drained epoch that nobody writes any more."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Close the open segment. Idempotent."""
        self._close_fd()


class ProducerReader:
    """Reads all epochs of one producer: an older one is read to its end before the next is touched."""

    def __init__(self, folder: Path) -> None:
        """Find the epochs that are there."""
        self.producer_id = folder.name
        self._folder = folder
        self._watched = WatchedFolder(folder)
        self._epochs: dict[int, EpochReader] = {}
        self.rescan()

    def rescan(self) -> None:
        """Look for new epochs and segments."""
        if self._watched.changed():
            for epoch in epochs_of(self._folder):
                if epoch not in self._epochs:
                    self._epochs[epoch] = EpochReader(self._folder / epoch_name(epoch), epoch)
        for reader in self._epochs.values():
            reader.rescan()

    def epochs(self) -> list[EpochReader]:
        """Readers of the epochs, oldest first."""
        return [self._epochs[epoch] for epoch in sorted(self._epochs)]

    def read(self, max_bytes: int) -> list[tuple[EpochReader, SpooledRecord]]:
        """Frames of the oldest epochs first, up to about ``max_bytes``."""
        found: list[tuple[EpochReader, SpooledRecord]] = []
        for reader in self.epochs():
            records = reader.read(max_bytes)
            found += [(reader, record) for record in records]
            max_bytes -= sum(record.num_bytes for record in records)
            if max_bytes <= 0:
                break
        return found

    @property
    def is_idle(self) -> bool:
        """Whether there is no epoch to read."""
        return not self._epochs

    def forget_drained(self) -> None:
        """Delete epochs that are over (closed in order, or a newer one exists) and drained."""
        newest = max(self._epochs, default=0)
        for epoch, reader in list(self._epochs.items()):
            if (epoch < newest or reader.is_sealed()) and reader.is_drained():
                reader.delete()
                del self._epochs[epoch]

    def close(self) -> None:
        """Close all open segments."""
        for reader in self._epochs.values():
            reader.close()
