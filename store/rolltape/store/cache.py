"""Files of an object store that never change, kept on this machine's disk: read once over the network, then mapped.

Keyed by name and size, bounded in bytes, the least recently used leave first. Shared by all processes of a user;
never authoritative: whatever is missing is fetched again, and a disk without room keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Final, NamedTuple

import pyarrow as pa

from rolltape.schema.errors import ConfigError, LakeFormatError
from rolltape.store.beside import beside

FOLDER_VARIABLE: Final = "ROLLTAPE_CACHE"
BYTES_VARIABLE: Final = "ROLLTAPE_CACHE_BYTES"
DEFAULT_BYTES: Final = 8 << 30

# A process looks at the whole folder again once it added this share of the bound; several may so exceed it by a little.
_LOOK_SHARE: Final = 32
_KEEP_SHARE: Final = 0.9
# What a process that died left half written.
_STALE_S: Final = 3600.0

_LOG: Final = logging.getLogger(__name__)


class FileCache:
    """A folder of files by name and size, at most ``max_bytes`` of them (0: nothing is kept)."""

    def __init__(self, folder: pathlib.Path, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise ConfigError(f"{BYTES_VARIABLE}: expected 0 or more, got {max_bytes}")
        self.folder = folder
        self.max_bytes = max_bytes
        self._added = max_bytes
        self._lock = threading.Lock()
        self._fetching: dict[pathlib.Path, tuple[threading.Lock, int]] = {}
        self._writing: dict[pathlib.Path, tuple[pa.Buffer, Future[None]]] = {}

    def read(self, url: str, size_bytes: int, fetch: Callable[[], pa.Buffer]) -> tuple[pa.Buffer, bool]:
        """The bytes at ``url``, mapped from the disk, or fetched now and kept; and whether they are mapped.

        A mapping stays good when the file has left the cache meanwhile.

        Raises:
            LakeFormatError: what came has another size.
        """
        path = self._path(url, size_bytes)
        with self._only_one(path):
            kept = self._map_kept(path, size_bytes)
            if kept is not None:
                return kept, True
            writing = self._writing.get(path)
            if writing is not None:
                return writing[0], False
            data = fetch()
            if data.size != size_bytes:
                raise LakeFormatError(f"expected {size_bytes} bytes at {url}, got {data.size}; it was written over")
            if self.holds_such(size_bytes):
                future = beside(self._keep, path, data)
                self._writing[path] = data, future
                future.add_done_callback(lambda _: self._writing.pop(path, None))
            return data, False

    @contextlib.contextmanager
    def _only_one(self, path: pathlib.Path) -> Iterator[None]:
        """Let one thread at a time look for a file: the next finds what the first one fetched."""
        with self._lock:
            lock, waiting = self._fetching.get(path, (threading.Lock(), 0))
            self._fetching[path] = lock, waiting + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._fetching.pop(path)
                if waiting > 1:
                    self._fetching[path] = lock, waiting - 1

    def holds_such(self, size_bytes: int) -> bool:
        """Whether files of this size are kept: none that would drive out most others."""
        return size_bytes * 4 <= self.max_bytes

    def __contains__(self, named: tuple[str, int]) -> bool:
        return self._path(*named).exists()

    def settle(self) -> None:
        """Wait until what was fetched is on the disk."""
        for _, future in list(self._writing.values()):
            future.result()

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept now."""
        return sum(kept.size_bytes for kept in self._kept())

    def _path(self, url: str, size_bytes: int) -> pathlib.Path:
        return self.folder / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}-{size_bytes}"

    def _map_kept(self, path: pathlib.Path, size_bytes: int) -> pa.Buffer | None:
        try:
            if path.stat().st_size != size_bytes:
                return None
            with pa.memory_map(str(path), "r") as file:
                data = file.read_buffer()
            os.utime(path)
        except OSError:
            return None
        return data

    def _keep(self, path: pathlib.Path, data: pa.Buffer) -> None:
        """Write a file that appears as a whole: synced first, so that a power cut leaves all of it or nothing."""
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(memoryview(data))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            _LOG.warning("cache %s keeps nothing now (%s): files are read over the network", self.folder, error)
            with contextlib.suppress(OSError):
                temporary.unlink()
        self._make_room(data.size)

    def _make_room(self, added: int) -> None:
        with self._lock:
            self._added += added
            if self._added * _LOOK_SHARE < self.max_bytes:
                return
            self._added = 0
        kept = sorted(self._kept(), key=lambda kept: kept.used_s)
        excess = sum(each.size_bytes for each in kept) - self.max_bytes
        if excess <= 0:
            return
        excess += int(self.max_bytes * (1 - _KEEP_SHARE))
        for each in kept:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                each.path.unlink()
            excess -= each.size_bytes

    def _kept(self) -> list[_Kept]:
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    if not entry.name.endswith(".tmp") or time.time() - status.st_mtime > _STALE_S:
                        found.append(_Kept(pathlib.Path(entry.path), status.st_size, status.st_mtime))
        return found


class _Kept(NamedTuple):
    path: pathlib.Path
    size_bytes: int
    used_s: float


def shared_cache() -> FileCache:
    """The cache of this user: ``ROLLTAPE_CACHE`` names its folder, ``ROLLTAPE_CACHE_BYTES`` its bound (8 GiB).

    Raises:
        ConfigError: the bound is no number.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get(FOLDER_VARIABLE) or f"{root}/rolltape"
    text = os.environ.get(BYTES_VARIABLE) or str(DEFAULT_BYTES)
    if not text.isdecimal():
        raise ConfigError(f"{BYTES_VARIABLE}: expected a number of bytes, got {text!r}")
    return _cache_at(pathlib.Path(folder).expanduser() / "files", int(text))


@cache
def _cache_at(folder: pathlib.Path, max_bytes: int) -> FileCache:
    return FileCache(folder, max_bytes)
