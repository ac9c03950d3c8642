"""Identifiers: time-ordered random ones for what happens, derived ones for what is imported.

Ids name things; nothing is ever ordered by them. UUIDv7 is used because ids minted together share a prefix, so the
min/max statistics of a data file can rule it out in a look-up.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Final

_VARIANT: Final = {nibble: "89ab"[int(nibble, 16) & 3] for nibble in "0123456789abcdef"}
_BYTES_PER_ID: Final = 8
_NS_PER_MS: Final = 1_000_000


def uuid7() -> str:
    """One new UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, 12 bits of their fraction, 62 random bits."""
    return uuid7_many(1)[0]


def uuid7_many(n: int) -> list[str]:
    """``n`` new UUIDv7 of the same moment in ascending order, from one read of the system's random source.

    Ids minted together then lie together in a file, and rows sorted by id stay in the order in which they were minted.

    Raises:
        ValueError: ``n`` is negative.
    """
    if n < 0:
        raise ValueError(f"expected a count of 0 or more ids, got {n}")
    milliseconds, rest = divmod(time.time_ns(), _NS_PER_MS)
    stamp = f"{milliseconds:012x}"
    head = f"{stamp[:8]}-{stamp[8:]}-7{(rest << 12) // _NS_PER_MS:03x}-"
    digits = os.urandom(n * _BYTES_PER_ID).hex()
    tails = [digits[at : at + 2 * _BYTES_PER_ID] for at in range(0, len(digits), 2 * _BYTES_PER_ID)]
    return sorted([f"{head}{_VARIANT[tail[0]]}{tail[1:4]}-{tail[4:]}" for tail in tails])


def derived_id(*parts: str | int | bytes) -> str:
    """The UUIDv8 that SHA-256 makes of ``parts``: the same parts always give the same id.

    Each part is hashed with its type and length, so that ``("ab", "c")`` and ``("a", "bc")`` differ, as do ``1`` and
    ``"1"``. Importers derive event ids from the file's digest and the row: importing twice adds nothing.

    >>> derived_id("file", 3) == derived_id("file", 3)
    True
    """
    hasher = hashlib.sha256()
    for part in parts:
        tag, data = _tagged(part)
        hasher.update(f"{tag}{len(data)}:".encode())
        hasher.update(data)
    digits = hasher.hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-{_VARIANT[digits[16]]}{digits[17:20]}-{digits[20:32]}"


def _tagged(part: str | int | bytes) -> tuple[str, bytes]:
    match part:
        case str():
            return "s", part.encode()
        case bytes():
            return "b", part
        case bool():
            raise TypeError("expected str, int or bytes to derive an id from, got a bool")
        case int():
            return "i", str(part).encode()
        case _:
            raise TypeError(f"expected str, int or bytes to derive an id from, got {type(part).__name__}")
