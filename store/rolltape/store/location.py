"""Locations: a place for bytes, given as a path or a URL, local or in an object store.

Everything that touches lake contents goes through a :class:`Location`, so that the same code runs on a laptop's disk
and on S3. Errors of the place are raised as errors of the store: no room left is
:class:`~rolltape.schema.errors.StorageFullError`, a place that may not be written is
:class:`~rolltape.schema.errors.StoreError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from rolltape.schema.errors import StorageFullError, StoreError

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP})

_S3_OPTIONS: Final = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_REGION": "region",
}


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file below a location: its path relative to that location, its size, and when it was last written."""

    path: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Location:
    """One place: a folder or a file.

    Attributes:
        url: canonical URL without a slash at its end, e.g. ``file:///data/lake`` or ``s3://bucket/lake``.
        path: the same place as ``fs`` names it, e.g. ``/data/lake`` or ``bucket/lake``.
        fs: the file system that holds it.
        storage_options: credentials and end points, under the names that delta-rs uses. Never printed.
    """

    url: str
    path: str
    fs: pafs.FileSystem = field(repr=False, compare=False)
    storage_options: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False, hash=False
    )

    @classmethod
    def parse(
        cls, url_or_path: str | os.PathLike[str] | Location, options: Mapping[str, str] | None = None
    ) -> Location:
        """Read a path or URL. S3 options are taken from ``options`` first, then from the AWS environment variables.

        >>> Location.parse("/data/lake").child("events").url
        'file:///data/lake/events'
        """
        if isinstance(url_or_path, Location):
            return url_or_path
        text = os.fspath(url_or_path)
        scheme, separator, rest = text.partition("://")
        if not separator or scheme == "file":
            path = os.path.abspath(os.path.expanduser(rest if separator else text))
            return cls(pathlib.PurePath(path).as_uri(), path, pafs.LocalFileSystem())
        url = text.rstrip("/")
        if scheme in {"s3", "s3a"}:
            given = _s3_options(options)
            return cls(url, rest.rstrip("/"), _s3_file_system(given), MappingProxyType(given))
        fs, path = pafs.FileSystem.from_uri(url)
        return cls(url, path, fs, MappingProxyType(dict(options or {})))

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine's disk."""
        return isinstance(self.fs, pafs.LocalFileSystem)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return self.path if self.is_local else self.url

    def child(self, *parts: str) -> Location:
        """A place below this one."""
        tail = "/".join(part.strip("/") for part in parts)
        return Location(f"{self.url}/{tail}", f"{self.path}/{tail}", self.fs, self.storage_options)

    def parent(self) -> Location:
        """The place above this one."""
        return Location(self.url.rsplit("/", 1)[0], self.path.rsplit("/", 1)[0] or "/", self.fs, self.storage_options)

    def local_path(self) -> pathlib.Path:
        """The path on this machine's disk.

        Raises:
            StoreError: the place is not local.
        """
        if not self.is_local:
            raise StoreError(f"expected a local path, got {self.url}; use open_input or read_bytes")
        return pathlib.Path(self.path)

    # Reading

    def exists(self) -> bool:
        """Whether there is a file or folder here."""
        return self.size_bytes() is not None

    def size_bytes(self) -> int | None:
        """Size of the file here; 0 for a folder, None where there is nothing."""
        if self.is_local:
            try:
                return os.stat(self.path).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None
        info = self.fs.get_file_info(self.path)
        return None if info.type == pafs.FileType.NotFound else info.size or 0

    def read_bytes(self) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
        """
        if self.is_local:
            with open(self.path, "rb", buffering=0) as file:
                return file.read()
        with self.fs.open_input_stream(self.path) as stream:
            data: bytes = stream.read()
            return data

    def open_input(self) -> pa.NativeFile:
        """A random-access file; memory-mapped where the place is local."""
        if self.is_local:
            return pa.memory_map(self.path, "r")
        return self.fs.open_input_file(self.path)

    def list(self, *, recursive: bool = False) -> list[FileInfo]:
        """Files below, by path; empty where there is nothing."""
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=recursive)
        start = len(self.path) + 1
        found = [
            FileInfo(info.path[start:], info.size or 0, info.mtime_ns / 1e9 if info.mtime_ns else 0.0)
            for info in self.fs.get_file_info(selector)
            if info.type == pafs.FileType.File
        ]
        return sorted(found, key=lambda info: info.path)

    # Writing

    def write_bytes(self, data: Any, durable: bool = True) -> None:
        """Replace the file as one act: a reader sees the old bytes or the new ones, never a part.

        ``data`` is anything with the buffer protocol. With ``durable`` the bytes and the name survive a power cut once
        this returns (object stores always promise that).
        """
        if not self.is_local:
            self._put(data)
            return
        with store_errors(self):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            temporary = self._write_temporary(data, durable)
            os.replace(temporary, self.path)
            if durable:
                _sync_folder(os.path.dirname(self.path))

    def write_unique(self, data: Any) -> None:
        """Write a file under a name that nobody else uses; :meth:`sync` it and its folder before anything rests on it.

        Cheaper than :meth:`write_bytes` by a rename and two syncs: for names with a fresh UUID in them.
        """
        if not self.is_local:
            self._put(data)
            return
        with store_errors(self):
            _write(self.path, data, durable=False)

    def write_if_absent(self, data: Any, before: Callable[[], object] | None = None) -> bool:
        """Create the file with all its bytes, durably, unless the name is taken; tells whether it did.

        Args:
            data: anything with the buffer protocol.
            before: called once the bytes are on the disk and before the name appears; an error in it stops that.

        Raises:
            StoreError: the place cannot promise it (object stores: commits go through delta-rs there).
        """
        if not self.is_local:
            raise StoreError(f"expected a local place for a put-if-absent, got {self.url}")
        with store_errors(self):
            temporary = self._write_temporary(data, durable=True)
            try:
                if before is not None:
                    before()
                os.link(temporary, self.path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise StoreError(
                        f"expected a file system with hard links at {self} ({error.strerror}): a commit is one; "
                        "keep the lake on a local disk, NFS, or in an object store"
                    ) from error
                raise
            finally:
                os.unlink(temporary)
            _sync_folder(os.path.dirname(self.path))
            return True

    @contextlib.contextmanager
    def open_output(self) -> Iterator[pa.NativeFile]:
        """A stream to a new file that appears, durable, when the block ends without an error."""
        if not self.is_local:
            with self.fs.open_output_stream(self.path) as stream:
                yield stream
            return
        with store_errors(self):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            temporary = self._temporary_path()
            try:
                with pa.OSFile(temporary, "wb") as stream:
                    yield stream
                _sync_file(temporary)
                os.replace(temporary, self.path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
            _sync_folder(os.path.dirname(self.path))

    def make_folder(self) -> None:
        """Make the folder, and those above it, durably; nothing to do in object stores."""
        if not self.is_local:
            return
        with store_errors(self):
            missing = [self.path]
            while not os.path.isdir(os.path.dirname(missing[-1])):
                missing.append(os.path.dirname(missing[-1]))
            os.makedirs(self.path, exist_ok=True)
            for path in reversed(missing):
                _sync_folder(os.path.dirname(path))

    def sync(self) -> None:
        """Make this file's bytes, or the names in this folder, durable; in object stores they are."""
        if self.is_local:
            with store_errors(self):
                _sync_folder(self.path)

    def delete(self) -> None:
        """Delete the file, or the folder and all below; nothing happens where there is nothing."""
        with store_errors(self):
            kind = self.fs.get_file_info(self.path).type
            if kind == pafs.FileType.Directory:
                self.fs.delete_dir(self.path)
            elif kind == pafs.FileType.File:
                self.fs.delete_file(self.path)

    def _put(self, data: Any) -> None:
        with store_errors(self), self.fs.open_output_stream(self.path) as stream:
            stream.write(data)

    def _temporary_path(self) -> str:
        return f"{os.path.dirname(self.path)}/.{self.name}.{uuid.uuid4().hex}.tmp"

    def _write_temporary(self, data: Any, durable: bool) -> str:
        temporary = self._temporary_path()
        _write(temporary, data, durable=durable)
        return temporary


@contextlib.contextmanager
def store_errors(location: Location) -> Iterator[None]:
    """Raise the operating system's complaints about ``location`` as errors of the store."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFullError(
                f"no room left at {location} ({error.strerror}); nothing acknowledged was lost: make room and try again"
            ) from error
        if error.errno in _READ_ONLY:
            raise StoreError(
                f"{location} is read-only here ({error.strerror}); open it with read_only=True or as another user"
            ) from error
        raise


def _write(path: str, data: Any, *, durable: bool) -> None:
    view = memoryview(data).cast("B")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync_file


def _s3_options(options: Mapping[str, str] | None) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found.update(options or {})
    return found


def _s3_file_system(options: Mapping[str, str]) -> pafs.FileSystem:
    arguments: dict[str, Any] = {_S3_OPTIONS[name]: value for name, value in options.items() if name in _S3_OPTIONS}
    endpoint = options.get("AWS_ENDPOINT_URL")
    if endpoint:
        scheme, _, host = endpoint.partition("://")
        arguments |= {"endpoint_override": host, "scheme": scheme}
    return pafs.S3FileSystem(**arguments)
