"""Claim checks: payloads that are too large for the log lie beside the lake, named by their digest (design §6).

::

    <lake>/blobs/sha256/<2 hexadecimal digits>/<64 hexadecimal digits>

A blob is written once, durably, before the record that names it is sent; writing it again changes nothing. Where it
lies is derived from the lake and the digest, never from what a record says.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, Final

import pyarrow as pa

from rolltape.schema.errors import DigestMismatchError
from rolltape.store.location import Location

BLOBS: Final = "blobs"
REFRESH_S: Final = 24 * 3600.0
"""A blob older than this is written again when it is claimed again: retention deletes by age."""


class BlobStore:
    """The blobs of one lake. Processes and threads may share it."""

    def __init__(self, lake: Location) -> None:
        """Blobs beside the lake at ``lake``; nothing is touched yet."""
        self.root = lake.child(BLOBS, "sha256")

    def place(self, sha256: str) -> Location:
        """Where the blob of a digest lies."""
        return self.root.child(sha256[:2], sha256)

    def put(self, data: Any) -> tuple[str, int]:
        """Keep ``data`` (anything with the buffer protocol) durably; returns its digest and length.

        Raises:
            StorageFullError: no room; nothing is kept.
            StoreError: the place refuses, or does not answer.
        """
        view = memoryview(data).cast("B")
        sha256 = hashlib.sha256(view).hexdigest()
        place = self.place(sha256)
        if not self._is_fresh(place, len(view)):
            place.write_bytes(view)
        return sha256, len(view)

    def _is_fresh(self, place: Location, num_bytes: int) -> bool:
        found = [info for info in place.parent().list() if info.path == place.name]
        return bool(found) and found[0].size_bytes == num_bytes and time.time() - found[0].modified_s < REFRESH_S

    def get(self, sha256: str, num_bytes: int) -> pa.Buffer:
        """The payload that a record claims, once its digest was checked.

        Raises:
            FileNotFoundError: there is none: retention took it, or the log was opened with another lake.
            DigestMismatchError: it is not the one that was claimed.
            StoreError: the place refuses, or does not answer.
        """
        place = self.place(sha256)
        try:
            data = place.read_bytes()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"expected a claimed payload of {num_bytes} bytes at {place}, got no file: was it deleted, or is the "
                "log opened with another lake than its producers'?"
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if len(data) != num_bytes or found != sha256:
            raise DigestMismatchError(
                f"expected a claimed payload of {num_bytes} bytes with SHA-256 {sha256} at {place}, got {len(data)} "
                f"bytes with {found}"
            )
        return pa.py_buffer(data)
