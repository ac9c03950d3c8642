"""Locations: paths and URLs, atomic and durable writes, errors of the place as errors of the store."""

from __future__ import annotations

import pathlib
import resource

import pytest

from rolltape.schema.errors import ConfigError, StorageFullError, StoreError
from rolltape.store.location import Location


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_path_and_file_url_are_the_same_place(tmp_path: pathlib.Path) -> None:
    by_path, by_url = Location.parse(tmp_path / "lake"), Location.parse((tmp_path / "lake").as_uri())
    assert by_path == by_url
    assert by_path.url == (tmp_path / "lake").as_uri()
    assert by_path.is_local
    assert by_path.local_path() == tmp_path / "lake"


@pytest.mark.parametrize("name", ["a space", "per%20cent", "ha#sh", "qu?est", "l\u00e4ke", "plus+"])
def test_the_url_of_a_path_is_read_back_as_that_path(tmp_path: pathlib.Path, name: str) -> None:
    place = Location.parse(tmp_path / name)
    assert Location.parse(place.url) == place
    assert Location.parse(place.url.replace("file:///", "file://localhost/")) == place


def test_a_file_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected file:///PATH, or a path alone, got file://lakes/main"):
        Location.parse("file://lakes/main")


def test_s3_url_names_bucket_and_hides_credentials() -> None:
    options = {
        "AWS_REGION": "r",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "planted",
        "AWS_ENDPOINT_URL": "http://h:1",
    }
    place = Location.parse("s3://bucket/lake/", options)
    assert (place.url, place.path, place.is_local) == ("s3://bucket/lake", "bucket/lake", False)
    assert place.child("events", "a").url == "s3://bucket/lake/events/a"
    assert "planted" not in repr(place) + str(place)
    with pytest.raises(StoreError, match="expected a local path"):
        place.local_path()


def test_write_replaces_as_a_whole_and_leaves_no_temporary(tmp_path: pathlib.Path) -> None:
    place = Location.parse(tmp_path).child("deep", "file")
    assert not place.exists()
    place.write_bytes(b"old")
    place.write_bytes(b"new")
    assert place.read_bytes() == b"new"
    assert [info.path for info in Location.parse(tmp_path).list(recursive=True)] == ["deep/file"]


def test_write_if_absent_takes_a_name_once(tmp_path: pathlib.Path) -> None:
    place = Location.parse(tmp_path / "version")
    assert place.write_if_absent(b"first")
    assert not place.write_if_absent(b"second")
    assert place.read_bytes() == b"first"
    assert names(tmp_path) == ["version"]


def test_open_output_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    place = Location.parse(tmp_path / "blob")

    def write_half() -> None:
        with place.open_output() as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert names(tmp_path) == []
    with place.open_output() as stream:
        stream.write(b"whole")
    assert place.open_input().read() == b"whole"


def test_list_and_delete(tmp_path: pathlib.Path) -> None:
    root = Location.parse(tmp_path)
    root.child("a", "x").write_bytes(b"1")
    root.child("y").write_bytes(b"22")
    assert [(info.path, info.size_bytes) for info in root.list(recursive=True)] == [("a/x", 1), ("y", 2)]
    root.child("a").delete()
    root.child("y").delete()
    root.child("never").delete()
    assert root.list(recursive=True) == []
    assert root.child("missing").list() == []


def test_no_room_is_storage_full_and_the_part_is_gone(tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    place = Location.parse(tmp_path / "big")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        for write in (place.write_bytes, place.write_unique, place.write_if_absent):
            with pytest.raises(StorageFullError, match="no room left"):
                write(b"x" * 5_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []
