"""The recent window: the same rows as the lake, mapped, bounded, and rebuilt when it is damaged."""

from __future__ import annotations

import pathlib
from typing import Any

import pyarrow as pa
import pytest

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import ConfigError
from rolltape.store import Lake, Location, Window
from rolltape.store import window as window_module
from rolltape.store.maintenance import compact, vacuum

KINDS = ("action_sampled", "reward_assigned")


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def segments(lake: Lake) -> list[pathlib.Path]:
    return sorted((lake.spool_path / "window").rglob("*.arrow"))


def assert_same(window: Window, lake: Lake) -> None:
    for kind in KINDS:
        since = window.start(kind)
        assert window.read(kind).combine_chunks() == lake.read(kind, min_offset=since).combine_chunks()


def test_holds_what_the_lake_holds(lake: Lake, feed: Any) -> None:
    window = Window(lake)
    assert window.refresh() == Cursor()
    assert window.read("reward_assigned").num_rows == 0
    for number in range(4):
        lake.append(*feed.commit())
        assert window.refresh() == lake.cursor() == Cursor.parse(f"rollout/0:{2 * number + 2}")
        assert_same(window, lake)
    assert window.start("action_sampled") == Cursor.parse("rollout/0:0")
    assert window.read("action_sampled").num_rows == 16


def test_selects_trajectories_offsets_and_columns(lake: Lake, feed: Any) -> None:
    window = Window(lake)
    for _ in range(4):
        lake.append(*feed.commit())
        window.refresh()
    ids = lake.read("action_sampled")["trajectory_id"].to_pylist()
    picked = [ids[2], ids[9]]
    assert window.read("action_sampled", trajectory_ids=picked)["trajectory_id"].to_pylist() == picked
    for offset in range(9):
        expected = lake.read("reward_assigned", min_offset=offset)["log_offset"].to_pylist()
        assert window.read("reward_assigned", min_offset=offset)["log_offset"].to_pylist() == expected
    assert window.read("action_sampled", columns=["token_ids", "run_id"]).column_names == ["token_ids", "run_id"]


def test_reads_are_slices_of_mapped_memory(lake: Lake, feed: Any) -> None:
    lake.append(*feed.commit(num_rollouts=64, num_tokens=2_000))
    window = Window(lake)
    window.refresh()
    before = pa.total_allocated_bytes()
    table = window.read("action_sampled", columns=["token_ids", "rollout_log_probs"])
    assert table.nbytes > 1_000_000
    assert pa.total_allocated_bytes() - before < 100_000


def test_next_process_maps_what_is_there(lake: Lake, feed: Any) -> None:
    first = Window(lake)
    for _ in range(3):
        lake.append(*feed.commit())
        first.refresh()
    compact(lake)
    vacuum(lake, safe_age_s=0)
    names = segments(lake)
    lake.append(*feed.commit())
    second = Window(Lake.open(lake.location))
    second.refresh()
    assert_same(second, lake)
    assert len(segments(lake)) == len(names) + 2
    assert set(names) <= set(segments(lake))


@pytest.mark.parametrize("damage", ["gone", "truncated", "flipped"])
def test_damaged_segment_is_rebuilt_from_the_lake(lake: Lake, feed: Any, damage: str) -> None:
    first = Window(lake)
    for _ in range(3):
        lake.append(*feed.commit())
        first.refresh()
    victim = next(path for path in segments(lake) if "--2-3--" in path.name or "--1-3--" in path.name)
    data = bytearray(victim.read_bytes())
    if damage == "gone":
        victim.unlink()
    elif damage == "truncated":
        victim.write_bytes(data[:-20])
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    second = Window(Lake.open(lake.location))
    second.refresh()
    for kind in KINDS:
        assert second.read_through(kind).combine_chunks() == lake.read(kind).combine_chunks()


def test_window_without_its_folder_is_built_anew(lake: Lake, feed: Any) -> None:
    for _ in range(3):
        lake.append(*feed.commit())
    compact(lake)
    window = Window(lake)
    window.refresh()
    assert_same(window, lake)
    assert window.read("reward_assigned").num_rows == 12


def test_bytes_are_bounded_and_the_oldest_goes_first(lake: Lake, feed: Any) -> None:
    window = Window(lake, max_bytes=200_000)
    for _ in range(12):
        lake.append(*feed.commit(num_rollouts=8, num_tokens=500))
        window.refresh()
        assert window.size_bytes <= 200_000
        assert_same(window, lake)
    assert 0 < window.start("action_sampled")[next(iter(window.cursor))] < 24
    assert sum(path.stat().st_size for path in segments(lake)) == window.size_bytes
    whole = lake.read("action_sampled").combine_chunks()
    assert window.read_through("action_sampled").combine_chunks() == whole


def test_new_window_on_a_long_tape_takes_the_newest_part(lake: Lake, feed: Any) -> None:
    for _ in range(10):
        lake.append(*feed.commit(num_rollouts=8, num_tokens=500))
    window = Window(lake, max_bytes=150_000)
    window.refresh()
    start = window.start("action_sampled")
    assert 0 < start[next(iter(start))] < 20
    assert_same(window, lake)


def test_many_small_segments_are_merged(lake: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_MAX_SMALL", 3)
    window = Window(lake)
    for _ in range(10):
        lake.append(*feed.commit())
        window.refresh()
        assert_same(window, lake)
    assert len(segments(lake)) <= 8
    second = Window(Lake.open(lake.location))
    second.refresh()
    assert_same(second, lake)


def test_segments_of_another_lake_are_not_taken(tmp_path: pathlib.Path, feed: Any) -> None:
    folder = Location.parse(tmp_path / "window")
    one, two = Lake.create(tmp_path / "one"), Lake.create(tmp_path / "two")
    one.append(*feed.commit())
    feed.next_offset = 0
    two.append(*feed.commit())
    first, second = Window(one, folder=folder), Window(two, folder=folder)
    first.refresh()
    second.refresh()
    assert_same(first, one)
    assert_same(second, two)


def test_rows_of_several_partitions_have_chains_of_their_own(lake: Lake, tape: Any) -> None:
    tape.add("dead_letter", log_topic="rollout", log_offset=3, reason="unknown_kind")
    tape.add("dead_letter", log_topic="control", log_offset=0, reason="unknown_kind")
    lake.append(tape.tables(), {"log/rollout/0": 3, "log/control/0": 0})
    window = Window(lake)
    window.refresh()
    assert sorted(window.read("dead_letter")["log_topic"].to_pylist()) == ["control", "rollout"]
    assert window.read("dead_letter", min_offset=1)["log_topic"].to_pylist() == ["rollout"]


def test_bound_must_be_positive(lake: Lake) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        Window(lake, max_bytes=0)
