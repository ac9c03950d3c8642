"""Where spooled frames lie on this machine's disk.

::

    <spool>/COMMITTER.lock                      held by the lake's one committer on this machine
    <spool>/losses/*.json                       losses that an operator accepts, for the committer to record
    <spool>/producers/<producer>/LOCK           held by the one live writer of the producer id
    <spool>/producers/<producer>/EPOCH          fsynced counter, raised at each start
    <spool>/producers/<producer>/<epoch>/       one folder of each start
        000000.frames, 000001.frames, …         segments; all but the last are sealed
        CLOSED                                  the writer ended in order: the last one is sealed too
        CONFIRMED                               up to where brokers have it; a hint, so that less is sent again
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path
from typing import Final

from rolltape.schema.errors import StorageFullError, StoreError

COMMITTER_LOCK: Final = "COMMITTER.lock"
LOCK: Final = "LOCK"
EPOCH: Final = "EPOCH"
CLOSED: Final = "CLOSED"
CONFIRMED: Final = "CONFIRMED"
SEGMENT_SUFFIX: Final = ".frames"

_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE of Linux
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_COARSEST_CLOCK_NS: Final = 2_000_000_000
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
LOSSES: Final = "losses"


def producers_folder(spool: Path) -> Path:
    """The folder with one folder of each producer."""
    return spool / "producers"


def epoch_name(epoch: int) -> str:
    """Name of the folder of one start."""
    return f"{epoch:010d}"


def segment_name(number: int) -> str:
    """Name of a segment."""
    return f"{number:06d}{SEGMENT_SUFFIX}"


def epochs_of(producer_folder: Path) -> list[int]:
    """Epochs that have a folder, oldest first."""
    try:
        return sorted(int(entry.name) for entry in os.scandir(producer_folder) if entry.name.isdecimal())
    except FileNotFoundError:
        return []


def segments_of(epoch_folder: Path) -> list[int]:
    """Numbers of the segments of one epoch, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(epoch_folder) if entry.name.endswith(SEGMENT_SUFFIX)]
    except FileNotFoundError:
        return []
    return sorted(int(name.removesuffix(SEGMENT_SUFFIX)) for name in names)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_writing(fd: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin with bytes that were appended, without waiting: who syncs them later waits for less.

    Nothing is promised of them before that, and what fails is told there. Where the system cannot, nothing happens.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, num_bytes, _START_WRITING)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [folder, *folder.parents]
    for path in reversed([path for path in missing if not path.exists()]):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


class WatchedFolder:
    """Tells whether names may have come or gone in a folder, for the price of one ``stat``."""

    def __init__(self, path: Path) -> None:
        """Nothing was looked at yet."""
        self.path = path
        self._seen_ns = -1

    def changed(self) -> bool:
        """Whether the folder has to be listed (again)."""
        try:
            modified_ns = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return True
        # Clocks of file systems are coarse: a change just after a listing may not move the time.
        settled = time.time_ns() - modified_ns > _COARSEST_CLOCK_NS
        unchanged = settled and modified_ns == self._seen_ns
        self._seen_ns = modified_ns if settled else -1
        return not unchanged


def spool_error(error: OSError, path: Path) -> Exception:
    """The error that a failed operation on the spool is to be raised as."""
    if error.errno in _FULL:
        return StorageFullError(
            f"expected room for a frame in {path}, got {error.strerror}: the record was not taken and may be sent "
            "again; free space on this disk"
        )
    if error.errno in _READ_ONLY:
        return StoreError(
            f"expected a writable spool at {path}, got {error.strerror}: is the lake read-only? Give this user the "
            "right to write, or open a lake elsewhere"
        )
    return error
