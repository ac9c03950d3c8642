"""How far the brokers have an epoch's spool, kept beside it: after a kill less is sent again.

Only a hint. What it says is true when it is written, because it is written after the acknowledgement; a lost or broken
one costs repeats, which lanes recognise. So it is neither synced nor renamed into place.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Final

from rolltape.ingest.spool_layout import CONFIRMED
from rolltape.ingest.spool_reader import START, Place

_CONTENT: Final = struct.Struct("<qQ")
_CHECKED: Final = struct.Struct("<qQI")


def read_progress(epoch_folder: Path) -> Place:
    """Up to where the brokers are known to have it; the start where nothing is known."""
    try:
        segment, offset, crc = _CHECKED.unpack((epoch_folder / CONFIRMED).read_bytes())
    except (FileNotFoundError, struct.error):
        return START
    return Place(segment, offset) if zlib.crc32(_CONTENT.pack(segment, offset)) == crc else START


def write_progress(epoch_folder: Path, place: Place) -> None:
    """Note that the brokers have everything before ``place``. A disk that refuses costs repeats only."""
    content = _CONTENT.pack(place.segment, place.offset)
    try:
        fd = os.open(epoch_folder / CONFIRMED, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, content + struct.pack("<I", zlib.crc32(content)), 0)
        finally:
            os.close(fd)
    except OSError:
        return
