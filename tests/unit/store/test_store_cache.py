"""The cache of files that never change: fetched once, bounded, never wrong, and no trouble where the disk is full."""

from __future__ import annotations

import os
import pathlib
import resource
import threading
import time

import pyarrow as pa
import pytest

from rolltape.schema.errors import ConfigError, LakeFormatError
from rolltape.store.cache import FileCache, shared_cache


class Store:
    """Files by URL, which counts how often each is fetched."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []

    def read(self, cache: FileCache, url: str) -> tuple[bytes, bool]:
        data, is_mapped = cache.read(url, len(self.files[url]), lambda: self._fetch(url))
        return data.to_pybytes(), is_mapped

    def _fetch(self, url: str) -> pa.Buffer:
        self.fetched.append(url)
        return pa.py_buffer(self.files[url])


def test_a_file_is_fetched_once_and_then_mapped_by_every_process(tmp_path: pathlib.Path) -> None:
    store, cache = Store({"s3://b/x": b"x" * 1_000}), FileCache(tmp_path / "files", 10_000)
    assert store.read(cache, "s3://b/x") == (b"x" * 1_000, False)
    cache.settle()
    assert store.read(cache, "s3://b/x") == (b"x" * 1_000, True)
    assert store.read(FileCache(tmp_path / "files", 10_000), "s3://b/x") == (b"x" * 1_000, True)
    assert store.fetched == ["s3://b/x"]
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0


def test_name_and_size_are_the_key(tmp_path: pathlib.Path) -> None:
    store, cache = Store({"s3://b/x": b"1234"}), FileCache(tmp_path, 10_000)
    store.read(cache, "s3://b/x")
    cache.settle()
    store.files = {"s3://b/x": b"12345", "s3://other/x": b"abcd"}
    assert store.read(cache, "s3://b/x")[0] == b"12345"
    assert store.read(cache, "s3://other/x")[0] == b"abcd"
    with pytest.raises(LakeFormatError, match="expected 7 bytes at s3://b/y, got 4"):
        cache.read("s3://b/y", 7, lambda: pa.py_buffer(b"1234"))


def test_bytes_are_bounded_and_the_least_recently_used_leave(tmp_path: pathlib.Path) -> None:
    store = Store({f"s3://b/{number}": bytes([number]) * 1_000 for number in range(20)})
    cache = FileCache(tmp_path, 10_000)
    for number in range(20):
        store.read(cache, f"s3://b/{number}")
        cache.settle()
        store.read(cache, "s3://b/0")
        time.sleep(0.002)  # times of use must differ
    assert cache.size_bytes <= 10_000
    assert ("s3://b/0", 1_000) in cache
    assert ("s3://b/19", 1_000) in cache
    assert ("s3://b/1", 1_000) not in cache
    assert store.fetched.count("s3://b/0") == 1


def test_a_mapped_file_stays_readable_when_it_has_left(tmp_path: pathlib.Path) -> None:
    store, cache = Store({"s3://b/x": b"x" * 1_000}), FileCache(tmp_path, 10_000)
    store.read(cache, "s3://b/x")
    cache.settle()
    data, is_mapped = cache.read("s3://b/x", 1_000, lambda: pa.py_buffer(b""))
    for path in tmp_path.iterdir():
        path.unlink()
    assert is_mapped
    assert data.to_pybytes() == b"x" * 1_000


def test_what_is_too_large_or_not_wanted_is_not_kept(tmp_path: pathlib.Path) -> None:
    store = Store({"s3://b/large": b"x" * 3_000, "s3://b/small": b"x"})
    for cache in (FileCache(tmp_path, 10_000), FileCache(tmp_path, 0)):
        store.read(cache, "s3://b/large")
    store.read(FileCache(tmp_path, 0), "s3://b/small")
    assert list(tmp_path.iterdir()) == []


def test_threads_that_want_one_file_fetch_it_once(tmp_path: pathlib.Path) -> None:
    store, cache = Store({"s3://b/x": b"x" * 1_000}), FileCache(tmp_path, 10_000)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(store.read(cache, "s3://b/x")[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"x" * 1_000] * 8
    assert len(store.fetched) == 1


def test_a_disk_without_room_keeps_nothing_and_hinders_nobody(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, cache = Store({"s3://b/x": b"x" * 5_000}), FileCache(tmp_path, 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        for _ in range(2):
            assert store.read(cache, "s3://b/x") == (b"x" * 5_000, False)
            cache.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert "keeps nothing now" in caplog.text


def test_what_a_dead_process_left_goes_with_the_rest(tmp_path: pathlib.Path) -> None:
    left = tmp_path / ".dead.tmp"
    left.write_bytes(b"x" * 9_000)
    os.utime(left, (1, 1))
    store, cache = Store({"s3://b/x": b"x" * 2_000}), FileCache(tmp_path, 10_000)
    store.read(cache, "s3://b/x")
    cache.settle()
    assert not left.exists()


def test_the_environment_says_where_and_how_much(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAPE_CACHE", str(tmp_path / "there"))
    monkeypatch.setenv("ROLLTAPE_CACHE_BYTES", "123")
    assert shared_cache().folder == tmp_path / "there" / "files"
    assert shared_cache().max_bytes == 123
    monkeypatch.setenv("ROLLTAPE_CACHE_BYTES", "2 GB")
    with pytest.raises(ConfigError, match="ROLLTAPE_CACHE_BYTES: expected a number of bytes, got '2 GB'"):
        shared_cache()
