"""A lake in an object store does what one on a disk does: commits, fencing, maintenance, tail, window, readers."""

from __future__ import annotations

import multiprocessing
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from tests.lake_readers import READERS, assert_agree
from tests.servers.s3_server import Bucket

from rolltape.schema.errors import CommitterFencedError, ConfigError, StoreError
from rolltape.store import Lake, Tail, Window
from rolltape.store.location import Location
from rolltape.store.maintenance import checkpoint, clean_logs, compact, vacuum


def test_commits_fences_maintains_and_tails(s3_lake: Lake, feed: Any) -> None:
    tail = Tail(s3_lake)
    for _ in range(3):
        tables, transactions = feed.commit()
        s3_lake.append(tables, transactions)
        deliveries = tail.poll(timeout_s=20)
        assert {d.kind: d.table for d in deliveries} == tables
    second = Lake.open(s3_lake.location)
    late, marks = feed.commit()
    s3_lake.append(late, marks)
    with pytest.raises(CommitterFencedError):
        second.append(late, marks)
    second.append({}, {"lane/b/1/rollout/0": 0})
    compact(s3_lake)
    checkpoint(s3_lake)
    assert clean_logs(s3_lake, safe_age_s=0) > 4
    assert len(vacuum(s3_lake, safe_age_s=-100)) == 8
    s3_lake.append(*feed.commit())
    again = Lake.open(s3_lake.location)
    assert again.read("reward_assigned").num_rows == 20
    assert again.snapshot().transactions["lane/b/1/rollout/0"] == 0
    tail.poll(timeout_s=20)
    assert tail.cursor == s3_lake.cursor()


@pytest.mark.parametrize("name", ["a space", "ha#sh", "qu?est", "l\u00e4ke", "plus+", "100%"])
def test_a_lake_of_any_name_is_maintained(s3_bucket: Bucket, feed: Any, name: str) -> None:
    lake = Lake.create(f"{s3_bucket.url}/{name}", options=s3_bucket.options)
    lake.append(*feed.commit())
    assert checkpoint(lake) == lake.snapshot().version
    with pytest.raises(ConfigError, match="write the name as it is"):
        Lake.create(f"{s3_bucket.url}/per%20cent", options=s3_bucket.options)


def test_a_handle_left_behind_by_a_cleaned_log_commits_after_the_newest_version(s3_lake: Lake, feed: Any) -> None:
    idle = Lake.open(s3_lake.location)
    for _ in range(4):
        s3_lake.append(*feed.commit())
    checkpoint(s3_lake)
    clean_logs(s3_lake, safe_age_s=0)
    # As if it had slept for longer than a version is sure to stay.
    idle.log._known_s = float("-inf")
    idle.append({}, {"lane/late/1/rollout/0": 0})
    newest = Lake.open(s3_lake.location).snapshot()
    assert newest.version == 5
    assert newest.transactions["lane/late/1/rollout/0"] == 0
    assert newest.cursor == s3_lake.cursor()


def test_a_version_that_filled_a_hole_of_a_cleaned_log_is_taken_back(
    s3_lake: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Lake.open(s3_lake.location)
    for _ in range(4):
        s3_lake.append(*feed.commit())
    checkpoint(s3_lake)
    clean_logs(s3_lake, safe_age_s=0)
    # As if it had been stopped between its look at the newest version and its own.
    stopped.log._known_s = float("-inf")
    monkeypatch.setattr(stopped.log, "refresh", lambda snapshot: snapshot)
    with pytest.raises(StoreError, match="take the newest snapshot"):
        stopped.append({}, {"lane/late/1/rollout/0": 0})
    monkeypatch.undo()
    stopped.append({}, {"lane/late/1/rollout/0": 0})
    assert Lake.open(s3_lake.location).snapshot().version == 5


def test_locations_behave_as_on_a_disk(s3_bucket: Bucket) -> None:
    root = Location.parse(f"{s3_bucket.url}/deep/root", s3_bucket.options)
    place = root.child("a", "file")
    assert not place.exists()
    with pytest.raises(FileNotFoundError):
        place.read_bytes()
    place.write_bytes(b"old")
    place.write_bytes(b"new")
    assert (place.read_bytes(), place.size_bytes()) == (b"new", 3)
    assert place.write_if_absent(b"third") is False
    assert root.child("a").exists()
    assert root.child("a", "fil").exists() is False
    assert root.child("b").write_if_absent(b"first") is True
    assert root.child("b").write_if_absent(b"second") is False
    with root.child("c").open_output() as stream:
        stream.write(b"whole")
    assert root.child("c").open_input().read() == b"whole"
    large = bytes(range(256)) * (80 << 10)
    root.child("large").write_bytes(large)
    assert root.child("large").read_bytes() == large
    assert [(info.path, info.size_bytes) for info in root.list()] == [("b", 5), ("c", 5), ("large", len(large))]
    assert [info.path for info in root.list(recursive=True)] == ["a/file", "b", "c", "large"]
    root.copy_to(root.parent().child("copy"), without=("a",))
    assert [info.path for info in root.parent().child("copy").list()] == ["b", "c", "large"]
    root.delete_files(["b", "c", "never"])
    root.child("a").delete()
    root.child("never").delete()
    assert [info.path for info in root.list(recursive=True)] == ["large"]
    assert root.child("missing").list() == []


def test_a_bucket_itself_can_be_a_lake(s3_bucket: Bucket, feed: Any) -> None:
    lake = Lake.create(s3_bucket.url + "/", options=s3_bucket.options)
    lake.append(*feed.commit())
    assert lake.location.url == s3_bucket.url
    assert Lake.open(s3_bucket.url, options=s3_bucket.options).read("reward_assigned").num_rows == 4
    assert {info.path.split("/")[0] for info in lake.location.list(recursive=True)} == {"events"}


def test_spool_and_window_lie_on_this_machine_by_the_lakes_identity(s3_bucket: Bucket, feed: Any) -> None:
    lake = Lake.create(f"{s3_bucket.url}/lake", options=s3_bucket.options)
    lake.append(*feed.commit())
    first = lake.spool_path
    assert first.is_absolute()
    assert "lake" not in first.parts
    window = Window(lake)
    window.refresh()
    assert window.read("action_sampled").equals(lake.read("action_sampled"))
    assert next(first.rglob("*.arrow"))
    lake.location.delete()
    made_anew = Lake.create(f"{s3_bucket.url}/lake", options=s3_bucket.options)
    assert made_anew.spool_path != first


def test_other_readers_see_the_same_rows(s3_lake: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        s3_lake.append(*feed.commit())
    compact(s3_lake)
    checkpoint(s3_lake)
    s3_lake.append(*feed.commit())
    # Delta Kernel has no S3 client here, and a Java start is paid for by the lakes on disk.
    monkeypatch.delitem(READERS, "delta-kernel", raising=False)
    assert assert_agree(s3_lake.location, ["log/rollout/0"]).counts == {"action_sampled": 24, "reward_assigned": 24}


def _open_and_count(url: str, options: Mapping[str, str], path: str) -> None:
    pathlib.Path(path).write_text(str(Lake.open(url, options=options).read("reward_assigned").num_rows))


def _use_after_fork(lake: Lake, path: str) -> None:
    """What a forked child hears of a lake that its parent opened."""
    said = []
    for act in (lake.snapshot, lambda: checkpoint(lake)):
        try:
            act()
        except StoreError as error:
            said.append(str(error))
    pathlib.Path(path).write_text("\n".join(said))


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_spawn_and_a_spawned_one_works(
    s3_lake: Lake, s3_bucket: Bucket, feed: Any, tmp_path: pathlib.Path
) -> None:
    s3_lake.append(*feed.commit())
    checkpoint(s3_lake)
    answer = tmp_path / "answer"
    forked = multiprocessing.get_context("fork").Process(target=_use_after_fork, args=(s3_lake, str(answer)))
    forked.start()
    forked.join(60)
    assert forked.exitcode == 0
    assert answer.read_text().count("'spawn'") == 2
    spawned = multiprocessing.get_context("spawn").Process(
        target=_open_and_count, args=(s3_lake.location.url, s3_bucket.options, str(answer))
    )
    spawned.start()
    spawned.join(60)
    assert spawned.exitcode == 0
    assert answer.read_text() == "4"
