"""Where spooled frames lie on this machine's disk.

::

    <spool>/COMMITTER.lock                      held by the lake's one committer on this machine
    <spool>/losses/*.json                       losses that an operator accepts, for the committer to record
    <spool>/producers/<producer>/LOCK           held by the one live writer of the producer id
    <spool>/producers/<producer>/EPOCH          fsynced counter, raised at each start
    <spool>/producers/<producer>/<epoch>/       one folder of each start
        000000.frames, 000001.frames, …         segments; all but the last are sealed
        CLOSED                                  the writer ended in order: the last one is sealed too
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from rolltape.schema.errors import StorageFullError, StoreError

COMMITTER_LOCK: Final = "COMMITTER.lock"
LOCK: Final = "LOCK"
EPOCH: Final = "EPOCH"
CLOSED: Final = "CLOSED"
SEGMENT_SUFFIX: Final = ".frames"

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


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [folder, *folder.parents]
    for path in reversed([path for path in missing if not path.exists()]):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


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
