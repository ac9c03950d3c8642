"""Data files of an object store as a ``pyarrow`` file system, for datasets: opened through the local cache."""

from __future__ import annotations

from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs


class Opener(Protocol):
    """What opens objects that never change by their key."""

    url: str

    def open_unchanging(self, key: str, size_bytes: int | None = None) -> pa.NativeFile:
        """The object, random access."""
        ...


class RemoteFiles(pafs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """Read-only view of one bucket. Paths are ``bucket/key``; sizes that are known save a request."""

    def __init__(self, bucket: Opener) -> None:
        self._bucket = bucket
        self._name = bucket.url.split("://", 1)[1]
        self._sizes: dict[str, int] = {}

    def note_size(self, path: str, size_bytes: int) -> None:
        """Tell the size of a file that will be opened."""
        self._sizes[path] = size_bytes

    def get_type_name(self) -> str:
        """Name of the kind of file system."""
        return "rolltape"

    def normalize_path(self, path: str) -> str:
        """Paths are used as they are."""
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open for random access."""
        return self._bucket.open_unchanging(path.removeprefix(f"{self._name}/"), self._sizes.get(path))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open for reading in order."""
        return self.open_input_file(path)

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Files as the caller knows them."""
        return [pafs.FileInfo(path, pafs.FileType.File, size=self._sizes.get(path, -1)) for path in paths]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._bucket.url} is read-only here")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFiles) and other._bucket is self._bucket

    def __hash__(self) -> int:
        return hash(id(self._bucket))
