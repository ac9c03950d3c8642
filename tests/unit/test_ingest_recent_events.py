"""Which events an archive that starts knows: the newest ones, of few files, whoever committed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest import recent_events
from rolltape.ingest.lake_target import LakeTarget
from rolltape.ingest.recent_events import MAX_FILES, recent_event_ids
from rolltape.store.lake import Lake
from rolltape.store.maintenance import compact

KIND = "reward_assigned"


@pytest.fixture
def lake(tmp_path: Path, feed: Any) -> Lake:
    """Six commits of four rollouts each."""
    lake = Lake.create(tmp_path / "lake")
    for _ in range(6):
        lake.append(*feed.commit())
    return lake


def ids_of(lake: Lake, kind: str = KIND) -> list[str]:
    """All of them, in the order of the log."""
    table = lake.read(kind).sort_by("log_offset")
    found: list[str] = table["event_id"].to_pylist()
    return found


def test_the_files_at_the_end_of_the_log_are_read(lake: Lake) -> None:
    found = recent_event_ids(lake, lake.snapshot(), 8, [KIND])
    assert found.keys() == {KIND}
    assert set(found[KIND]) == set(ids_of(lake)[-8:])


def test_all_kinds_share_the_room(lake: Lake) -> None:
    found = recent_event_ids(lake, lake.snapshot(), 16)
    assert {kind: set(ids) for kind, ids in found.items()} == {
        kind: set(ids_of(lake, kind)[-8:]) for kind in ("action_sampled", KIND)
    }


def test_no_more_files_are_read_than_a_start_may_take(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_FILES < 100
    monkeypatch.setattr(recent_events, "MAX_FILES", 3)
    found = recent_event_ids(lake, lake.snapshot(), 1_000, [KIND])
    assert set(found[KIND]) == set(ids_of(lake)[-12:])


def test_of_a_large_file_so_many_rows_are_taken_as_there_is_room_for(lake: Lake) -> None:
    compact(lake)
    found = recent_event_ids(lake, lake.snapshot(), 8, [KIND])
    assert len(found[KIND]) == 8
    assert set(found[KIND]) <= set(ids_of(lake))


def test_an_empty_lake_has_none_and_a_version_is_looked_at_once(tmp_path: Path, feed: Any) -> None:
    lake = Lake.create(tmp_path / "lake")
    target = LakeTarget(lake)
    assert target.recent_event_ids(8, None) == {}
    lake.append(*feed.commit())
    assert set(target.recent_event_ids(8, [KIND])[KIND]) == set(ids_of(lake))
    assert target.recent_event_ids(8, [KIND]) == {}
