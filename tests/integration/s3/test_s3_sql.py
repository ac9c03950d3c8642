"""SQL over a lake in an object store: only the files that a statement needs are fetched, each once, within a bound."""

from __future__ import annotations

from typing import Any

import pytest

from rolltape.schema.cursor import Cursor, Partition
from rolltape.store import Lake
from rolltape.store import remote_dataset as remote
from rolltape.store.cache import shared_cache
from rolltape.store.maintenance import compact
from rolltape.store.objects import Bucket as StoreBucket
from rolltape.store.parquet import forget_footers


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    """Names of the data files that were fetched, in a process that knows none of them yet."""
    names: list[str] = []
    get = StoreBucket.get

    def noting(self: StoreBucket, key: str) -> Any:
        if key.endswith(".parquet") and "_delta_log" not in key:
            names.append(key.rpartition("/")[2])
        return get(self, key)

    monkeypatch.setattr(StoreBucket, "get", noting)
    monkeypatch.setenv("ROLLTAPE_CACHE", str(tmp_path / "cache"))
    forget()
    return names


def forget() -> None:
    """Be a new process: no fragment and no footer is known."""
    remote.forget_fragments()
    forget_footers()


@pytest.fixture
def filled(s3_lake: Lake, feed: Any) -> Lake:
    """Twelve commits: an action file and a reward file each."""
    for number in range(12):
        s3_lake.append(*feed.commit(run_id=f"run-{number // 4}"))
    return s3_lake


def path_of(lake: Lake, kind: str, number: int) -> str:
    return lake.snapshot().files_of(kind)[number].path


@pytest.mark.parametrize(
    ("query", "kinds", "numbers"),
    [
        ("SELECT count(*) AS n FROM reward_assigned", ["reward_assigned"], range(12)),
        ("SELECT count(*) AS n FROM reward_assigned WHERE log_offset = 7", ["reward_assigned"], [3]),
        ("SELECT count(*) AS n FROM action_sampled WHERE run_id = 'run-1'", ["action_sampled"], range(4, 8)),
        (
            "SELECT count(*) AS n FROM events WHERE kind = 'action_sampled' AND log_offset < 3",
            ["action_sampled"],
            [0, 1],
        ),
        ("SELECT count(*) AS n FROM reward_assigned WHERE run_id = 'none'", ["reward_assigned"], []),
    ],
)
def test_a_statement_fetches_the_files_that_its_conditions_leave_over(
    filled: Lake, fetched: list[str], query: str, kinds: list[str], numbers: Any
) -> None:
    (row,) = filled.sql(query).rows()
    assert row["n"] == 4 * len(numbers)
    assert sorted(fetched) == sorted(path_of(filled, kind, number) for kind in kinds for number in numbers)


def test_a_trajectory_is_found_in_the_file_that_may_hold_it(filled: Lake, fetched: list[str]) -> None:
    wanted = filled.read("reward_assigned")["trajectory_id"][21].as_py()
    fetched.clear()
    shared_cache().settle()
    for path in shared_cache().folder.iterdir():
        path.unlink()
    query = f"SELECT count(*) AS n FROM reward_assigned WHERE trajectory_id = '{wanted}'"
    assert filled.sql(query).rows() == [{"n": 1}]
    assert fetched == [path_of(filled, "reward_assigned", 5)]


def test_as_of_a_cursor_later_files_are_not_fetched(filled: Lake, fetched: list[str]) -> None:
    as_of = Cursor({Partition("rollout", 0): 4})
    assert filled.sql("SELECT count(*) AS n FROM reward_assigned", as_of=as_of).rows() == [{"n": 8}]
    assert sorted(fetched) == sorted(path_of(filled, "reward_assigned", number) for number in (0, 1))


def test_files_are_fetched_once_by_all_handles_and_processes(
    filled: Lake, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    query = "SELECT kind, count(*) AS n FROM events GROUP BY kind ORDER BY kind"
    first = filled.sql(query).rows()
    assert len(fetched) == 24
    shared_cache().settle()
    for lake in (filled, Lake.open(filled.location, read_only=True)):
        assert lake.sql(query).rows() == first
        forget()
    assert filled.read("action_sampled").num_rows == 48
    assert len(fetched) == 24
    assert first == [{"kind": "action_sampled", "n": 48}, {"kind": "reward_assigned", "n": 48}]


def test_answers_are_those_of_a_disk_and_stay_so_after_compaction(
    filled: Lake, fetched: list[str], tmp_path: Any
) -> None:
    from rolltape.store.location import Location

    filled.location.copy_to(Location.parse(tmp_path / "lake"))
    on_disk = Lake.open(tmp_path / "lake")
    queries = (
        "SELECT * FROM events ORDER BY event_id, kind",
        "SELECT trajectory_id, scalar FROM action_sampled JOIN reward_assigned USING (trajectory_id) ORDER BY 1",
        "SELECT * FROM trajectories ORDER BY trajectory_id",
        "SELECT event_id FROM action_sampled ORDER BY log_offset DESC, event_id LIMIT 3",
    )
    expected = [on_disk.sql(query).arrow() for query in queries]
    assert [filled.sql(query).arrow() for query in queries] == expected
    compact(filled)
    assert [filled.sql(query).arrow() for query in queries] == expected
    assert len(filled.snapshot().files) == 2
    assert fetched


def test_a_scan_larger_than_a_part_is_taken_in_parts(
    filled: Lake, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 1)
    assert filled.sql("SELECT count(*) AS n FROM events").rows() == [{"n": 96}]
    assert len(fetched) == 24
    assert filled.sql("SELECT event_id FROM events LIMIT 1").arrow().num_rows == 1


def test_without_a_cache_the_answers_are_the_same(
    filled: Lake, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLTAPE_CACHE_BYTES", "0")
    for _ in range(2):
        assert filled.sql("SELECT count(*) AS n FROM reward_assigned").rows() == [{"n": 48}]
    assert len(fetched) == 24
    assert not shared_cache().folder.exists()


def test_the_cache_stays_within_its_bound(filled: Lake, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(file.size_bytes for file in filled.snapshot().files)
    monkeypatch.setenv("ROLLTAPE_CACHE_BYTES", str(6 * largest))
    for _ in range(2):
        forget()
        assert filled.sql("SELECT count(*) AS n FROM events").rows() == [{"n": 96}]
        shared_cache().settle()
        assert 0 < shared_cache().size_bytes <= 6 * largest
    assert len(fetched) > 24


def test_sql_errors_show_neither_bucket_nor_key(filled: Lake) -> None:
    from rolltape.schema.errors import SqlError

    with pytest.raises(SqlError) as raised:
        filled.sql("SELECT no_such_column FROM events").rows()
    assert filled.location.path not in str(raised.value)
