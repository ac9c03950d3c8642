"""Locations: a place for bytes, given as a path or a URL, local or in an object store.

Everything that touches lake contents goes through a :class:`Location`, so that the same code runs on a laptop's disk
and on S3. Errors of the place are raised as errors of the store: no room left is
:class:`~rolltape.schema.errors.StorageFullError`, a place that may not be written is
:class:`~rolltape.schema.errors.StoreError`, and what an object store says is what :mod:`rolltape.store.objects` makes
of it. A name that is not there is always a ``FileNotFoundError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from rolltape.schema.errors import ConfigError, StorageFullError, StoreError

if TYPE_CHECKING:
    from rolltape.store.objects import Bucket

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP})

_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")


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
        path: the same place without its scheme, e.g. ``/data/lake`` or ``bucket/lake``.
        bucket: the bucket that holds it; None on this machine's disk.
    """

    url: str
    path: str
    bucket: Bucket | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(
        cls, url_or_path: str | os.PathLike[str] | Location, options: Mapping[str, str] | None = None
    ) -> Location:
        """Read a path or URL. What an object store needs is taken from ``options`` first, then from the environment.

        >>> Location.parse("/data/lake").child("events").url
        'file:///data/lake/events'

        Raises:
            ConfigError: a URL of no store that is known, or one with credentials in it.
            StoreAccessError: the AWS profile that the environment names is not there.
        """
        if isinstance(url_or_path, Location):
            return url_or_path
        text = os.fspath(url_or_path)
        scheme, separator, rest = text.partition("://")
        if not separator or scheme == "file":
            path = os.path.abspath(_path_of(rest) if separator else os.path.expanduser(text))
            return cls(pathlib.PurePath(path).as_uri(), path)
        return _remote(cls, scheme, rest, options)

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine's disk."""
        return self.bucket is None

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def key(self) -> str:
        """The place's name within its bucket, e.g. ``lake``."""
        return self.path.partition("/")[2]

    @property
    def storage_options(self) -> dict[str, str]:
        """Credentials and end points as of now, under the names that delta-rs uses. Never printed."""
        return {} if self.bucket is None else self.bucket.options()

    def __str__(self) -> str:
        return self.path if self.is_local else self.url

    def child(self, *parts: str) -> Location:
        """A place below this one."""
        tail = "/".join(part.strip("/") for part in parts)
        return Location(f"{self.url}/{tail}", f"{self.path}/{tail}", self.bucket)

    def parent(self) -> Location:
        """The place above this one; a bucket is its own."""
        if self.bucket is not None and not self.key:
            return self
        return Location(self.url.rsplit("/", 1)[0], self.path.rsplit("/", 1)[0] or "/", self.bucket)

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
        found = self.size_bytes() is not None
        return found or (self.bucket is not None and self.bucket.has_any(self.key))

    def size_bytes(self) -> int | None:
        """Size of the file here, None where there is none (a folder of a disk has some size as well)."""
        if self.bucket is not None:
            return self.bucket.size_bytes(self.key)
        try:
            return os.stat(self.path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_bytes(self) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
        """
        if self.bucket is not None:
            return bytes(self.bucket.get(self.key))
        with open(self.path, "rb", buffering=0) as file:
            return file.read()

    def open_input(self) -> pa.NativeFile:
        """A random-access file: memory-mapped where the place is local, else read whole into memory."""
        if self.bucket is not None:
            return pa.BufferReader(self.bucket.get(self.key))
        return pa.memory_map(self.path, "r")

    def open_unchanging(self, size_bytes: int | None = None) -> pa.NativeFile:
        """A random-access file that is never written over, mapped from the disk or from the local cache."""
        if self.bucket is not None:
            return pa.BufferReader(self.read_unchanging(size_bytes)[0])
        return pa.memory_map(self.path, "r")

    def read_unchanging(self, size_bytes: int | None = None) -> tuple[pa.Buffer, bool]:
        """All bytes of a file that is never written over, and whether they are mapped (else they lie in memory)."""
        if self.bucket is not None:
            return self.bucket.read_unchanging(self.key, size_bytes)
        with pa.memory_map(self.path, "r") as file:
            return file.read_buffer(), True

    def list(self, *, recursive: bool = False) -> list[FileInfo]:
        """Files below, by path; empty where there is nothing."""
        if self.bucket is not None:
            start = len(self.key) + 1 if self.key else 0
            infos = self.bucket.list(self.key, recursive=recursive)
            return [FileInfo(info.key[start:], info.size_bytes, info.modified_s) for info in infos]
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=recursive)
        start = len(self.path) + 1
        found = [
            FileInfo(info.path[start:], info.size or 0, info.mtime_ns / 1e9 if info.mtime_ns else 0.0)
            for info in pafs.LocalFileSystem().get_file_info(selector)
            if info.type == pafs.FileType.File
        ]
        return sorted(found, key=lambda info: info.path)

    # Writing

    def write_bytes(self, data: Any, durable: bool = True) -> None:
        """Replace the file as one act: a reader sees the old bytes or the new ones, never a part.

        ``data`` is anything with the buffer protocol. With ``durable`` the bytes and the name survive a power cut once
        this returns (object stores always promise that).
        """
        if self.bucket is not None:
            self.bucket.put(self.key, data)
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
        if self.bucket is not None:
            self.bucket.put(self.key, data)
            return
        with store_errors(self):
            _write(self.path, data, durable=False)

    @contextlib.contextmanager
    def writing_unique(self) -> Iterator[pa.NativeFile]:
        """As :meth:`write_unique`, piece by piece; nothing is left behind where the block raises.

        For an object store the bytes gather in memory and are sent at the end.
        """
        if self.bucket is not None:
            gathered = pa.BufferOutputStream()
            yield gathered
            self.bucket.put(self.key, gathered.getvalue())
            return
        try:
            with store_errors(self), pa.OSFile(self.path, "wb") as file:
                yield file
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            raise

    def write_if_absent(self, data: Any, before: Callable[[], object] | None = None) -> bool:
        """Create the file with all its bytes, durably, unless the name is taken; tells whether it did.

        In an object store it is a conditional put, and an answer that was lost may make it say no of its own bytes:
        whoever must know compares them.

        Args:
            data: anything with the buffer protocol.
            before: called once the bytes are on the disk and before the name appears; an error in it stops that.

        Raises:
            StoreUnreachableError: no answer in time: the file may be there, or come into being yet.
        """
        if self.bucket is not None:
            if before is not None:
                before()
            return self.bucket.put_if_absent(self.key, data)
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
        if self.bucket is not None:
            buffered = pa.BufferOutputStream()
            yield buffered
            self.bucket.put(self.key, buffered.getvalue())
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
        if self.bucket is not None:
            self.bucket.delete([self.key, *(info.key for info in self.bucket.list(self.key, recursive=True))])
            return
        with store_errors(self):
            fs = pafs.LocalFileSystem()
            kind = fs.get_file_info(self.path).type
            if kind == pafs.FileType.Directory:
                fs.delete_dir(self.path)
            elif kind == pafs.FileType.File:
                fs.delete_file(self.path)

    def delete_files(self, names: Sequence[str]) -> None:
        """Delete files of this folder in the order given, as few requests as the store allows; absent ones are none."""
        if self.bucket is not None:
            start = f"{self.key}/" if self.key else ""
            self.bucket.delete([f"{start}{name}" for name in names])
            return
        with store_errors(self):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.path}/{name}")

    def copy_to(self, target: Location, *, without: Sequence[str] = ()) -> None:
        """Copy all files below to ``target``, save those in the folders named."""
        for info in self.list(recursive=True):
            if info.path.split("/", 1)[0] not in without:
                target.child(info.path).write_bytes(self.child(info.path).read_bytes())

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


def _path_of(rest: str) -> str:
    """The path that ``file://`` is followed by: its inverse is ``PurePath.as_uri``."""
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        raise ConfigError(
            f"expected file:///PATH, or a path alone, got file://{rest}: other machines' files are not ours"
        )
    return unquote(path)


def _remote(cls: type[Location], scheme: str, rest: str, options: Mapping[str, str] | None) -> Location:
    if scheme not in _SCHEMES:
        raise ConfigError(f"expected a path, or a URL of {', '.join(_SCHEMES)} or file, got {scheme}://…")
    name, _, key = rest.partition("/")
    if "@" in name and scheme in {"s3", "s3a"}:
        raise ConfigError(
            "expected a URL without credentials (this one is not shown): they come from AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or from AWS_PROFILE"
        )
    if not name:
        raise ConfigError(f"expected {scheme}://BUCKET/PATH, got {scheme}://{rest}")
    try:
        from rolltape.store.objects import open_bucket
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs the package obstore; pip install 'rolltape[s3]'") from error
    root = f"{'s3' if scheme == 's3a' else scheme}://{name}"
    below = "/".join(part for part in key.split("/") if part)
    path = f"/{below}" if below else ""
    return cls(root + path, name + path, open_bucket(root, options))
