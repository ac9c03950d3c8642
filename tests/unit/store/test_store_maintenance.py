"""Maintenance: rows never change, races lose and double nothing, a vacuum takes only what no commit can name."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltape.schema.errors import CommitterFencedError, ConfigError, StoreError
from rolltape.store import Lake, merging, parquet
from rolltape.store import lake as lake_module
from rolltape.store.maintenance import Policy, checkpoint, clean_logs, compact, maintain, vacuum
from rolltape.store.merging import in_log_order
from rolltape.store.recent import RecentTables

KINDS = ("action_sampled", "reward_assigned")


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def filled(lake: Lake, feed: Any) -> Lake:
    for _ in range(6):
        lake.append(*feed.commit(num_rollouts=3))
    return lake


def contents(lake: Lake) -> dict[str, pa.Table]:
    return {kind: lake.read(kind).combine_chunks() for kind in KINDS}


def test_compaction_keeps_rows_order_and_marks(filled: Lake) -> None:
    before, marks = contents(filled), dict(filled.snapshot().transactions)
    done = compact(filled)
    assert (len(done.removed), len(done.added)) == (12, 2)
    assert contents(filled) == before
    assert filled.snapshot().transactions == {**marks, "maintenance": 1}
    assert contents(Lake.open(filled.location)) == before
    assert done.version is not None
    log = filled.log.read_bytes(done.version)
    assert log is not None
    actions = [json.loads(line) for line in log.splitlines()]
    assert {a[kind]["dataChange"] for a in actions for kind in ("add", "remove") if kind in a} == {False}
    assert compact(filled).version is None


def test_compaction_takes_recent_rows_from_memory(filled: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(filled)
    kept = {file.path for file in filled.snapshot().files}
    assert all(path in filled.recent for path in kept)
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "open_file", lambda place: pytest.fail(f"{place} was read"))
        compact(filled)
    assert not any(path in filled.recent for path in kept)
    assert contents(Lake.open(filled.location)) == before


def test_recent_tables_are_bounded() -> None:
    recent = RecentTables(max_bytes=3_000)
    table = pa.table({"kind": ["reward_assigned"], "run_id": ["r" * 1_000]})
    for number in range(5):
        recent.put(f"file-{number}", table)
    assert [f"file-{number}" in recent for number in range(5)] == [False, False, False, True, True]
    assert recent.take("file-0", "reward_assigned") is None
    kept = recent.take("file-4", "reward_assigned")
    assert kept is not None
    assert kept["run_id"].to_pylist() == ["r" * 1_000]
    assert "file-4" not in recent


def test_compacted_row_groups_are_bounded(lake: Lake, feed: Any) -> None:
    for _ in range(3):
        lake.append(*feed.commit(num_rollouts=200, num_tokens=3))
    compact(lake)
    (file,) = lake.snapshot().files_of("action_sampled")
    footer = pq.ParquetFile(lake.table.child(file.path).open_input()).metadata
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [256, 256, 88]
    one = lake.read("action_sampled")["trajectory_id"][10].as_py()
    with parquet.open_file(lake.table.child(file.path)) as opened:
        assert parquet.groups_with_ids(opened, [one]) == [0]
        assert parquet.groups_with_offsets(opened, 0, 1) == [0]
    assert lake.read("action_sampled", trajectory_ids=[one]).num_rows == 1


def test_double_compaction_is_refused_and_doubles_nothing(filled: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(filled)
    second = Lake.open(filled.location)
    merge = merging.merge_files

    def while_another_compacts(lake: Lake, run: Any) -> Any:
        if lake is second:
            compact(filled)
        return merge(lake, run)

    monkeypatch.setattr(merging, "merge_files", while_another_compacts)
    with pytest.raises(CommitterFencedError, match="another maintenance"):
        compact(second)
    assert contents(second) == before
    assert len(second.snapshot().files) == 2


def test_append_during_a_compaction_survives(filled: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Lake.open(filled.location)
    merge = merging.merge_files
    pending = [feed.commit()]

    def while_another_appends(lake: Lake, run: Any) -> Any:
        while pending:
            other.append(*pending.pop())
        return merge(lake, run)

    monkeypatch.setattr(merging, "merge_files", while_another_appends)
    compact(filled)
    assert filled.read("reward_assigned").num_rows == 6 * 3 + 4
    assert filled.cursor() == other.cursor()


def test_file_of_a_newer_version_is_left_alone(filled: Lake, tmp_path: pathlib.Path) -> None:
    (file, *_) = filled.snapshot().files_of("reward_assigned")
    path = tmp_path / "lake/events" / file.path
    table = pq.read_table(path)
    struct = table["reward_assigned"].combine_chunks()
    fields = [*struct.type.fields, pa.field("of_tomorrow", pa.int32())]
    newer = pa.StructArray.from_arrays([*struct.flatten(), pa.array([7] * len(struct), pa.int32())], fields=fields)
    path.unlink()
    pq.write_table(table.set_column(table.column_names.index("reward_assigned"), "reward_assigned", newer), path)
    fresh = Lake.open(filled.location)
    parquet.forget_footers()
    assert {f.kind for f in compact(fresh).removed} == {"action_sampled"}
    assert fresh.read("reward_assigned").num_rows == 18


def test_rows_are_put_in_log_order() -> None:
    columns = {"log_topic": ["b", "a", "a"], "log_partition": [0, 0, 0], "log_offset": [1, 9, 2], "x": [1, 2, 3]}
    table = pa.table(columns)
    assert in_log_order(table)["x"].to_pylist() == [3, 2, 1]


def test_checkpoint_and_cleaned_logs_reopen_the_same(filled: Lake, feed: Any, tmp_path: pathlib.Path) -> None:
    before, snapshot = contents(filled), filled.snapshot()
    assert checkpoint(filled) == snapshot.version
    assert clean_logs(filled, safe_age_s=0) == snapshot.version
    again = Lake.open(filled.location)
    assert contents(again) == before
    assert again.snapshot().transactions == snapshot.transactions
    assert sorted(again.snapshot().files, key=repr) == sorted(snapshot.files, key=repr)
    assert again.snapshot().table_id == snapshot.table_id
    (tmp_path / "lake/events/_delta_log/_last_checkpoint").unlink()
    assert Lake.open(filled.location).snapshot().version == snapshot.version
    filled.append(*feed.commit())
    assert Lake.open(filled.location).read("reward_assigned").num_rows == 22


def test_checkpoints_forget_replaced_files_once_nobody_may_read_them(
    lake: Lake, tmp_path: pathlib.Path, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "delta.deletedFileRetentionDuration"
    assert lake.snapshot().configuration[name] == "interval 1 hour"
    configuration = vars(lake_module)["_CONFIGURATION"]
    monkeypatch.setattr(lake_module, "_CONFIGURATION", {**configuration, name: "interval 0 seconds"})
    found = []
    for made in (lake, Lake.create(tmp_path / "forgets")):
        for _ in range(6):
            made.append(*feed.commit(num_rollouts=3))
        compact(made)
        path = f"_delta_log/{checkpoint(made):020d}.checkpoint.parquet"
        with made.table.child(path).open_input() as file:
            removed = pq.read_table(file, columns=["remove"])["remove"]
        found.append(len(removed) - removed.null_count)
    assert found == [12, 0]


def test_clean_logs_without_a_checkpoint_deletes_nothing(filled: Lake) -> None:
    assert clean_logs(filled, safe_age_s=0) == 0


def test_policy_compacts_and_checkpoints_in_time(lake: Lake, feed: Any) -> None:
    policy = Policy(
        min_files=4,
        checkpoint_interval=6,
        keep_versions=1,
        log_age_s=0,
        commits_between=2,
        vacuum_interval=12,
        vacuum_age_s=-1,
    )
    assert maintain(lake, 1, policy) is None
    checkpoints, num_vacuumed = [], 0
    for _ in range(20):
        lake.append(*feed.commit(num_rollouts=2))
        done = maintain(lake, 2, policy)
        assert done is not None
        checkpoints.append(done.checkpoint_version)
        num_vacuumed += done.num_data_files_deleted
    assert len(lake.snapshot().files) < 20
    assert num_vacuumed > 10
    assert sum(version is not None for version in checkpoints) >= 3
    assert len(lake.log.folder.list()) < 14
    assert lake.read("reward_assigned").num_rows == 40
    assert lake.read("reward_assigned")["log_offset"].to_pylist() == sorted(2 * (i // 2) + 1 for i in range(40))


def test_vacuum_takes_replaced_files_and_orphans_only(filled: Lake, tmp_path: pathlib.Path) -> None:
    before = contents(filled)
    old = filled.snapshot()
    compact(filled)
    (tmp_path / "lake/events" / "action_sampled-orphan.parquet").write_bytes(b"half a file")
    (tmp_path / "lake/events" / "notes.txt").write_text("not ours")
    assert vacuum(filled) == ()
    assert len(vacuum(filled, safe_age_s=-1, dry_run=True)) == 13
    assert len(vacuum(filled, safe_age_s=0)) == 13
    assert contents(filled) == before
    assert (tmp_path / "lake/events" / "notes.txt").exists()
    assert contents(Lake.open(filled.location)) == before
    with pytest.raises(StoreError, match="vacuumed"):
        filled.read("action_sampled", snapshot=old)


def test_vacuum_between_a_file_and_its_commit_names_no_missing_file(
    filled: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D20: the committer that finds the vacuum's fence before its own version writes its files again."""
    vacuumed: list[str] = []
    other = Lake.open(filled.location)
    write = Lake.write_files

    def then_vacuum(lake: Lake, tables: Any) -> Any:
        files = write(lake, tables)
        if not vacuumed:
            for new in files:
                path = lake.table.child(new.file.path).local_path()
                os.utime(path, (1, 1))
            vacuumed.extend(vacuum(other, safe_age_s=0))
        return files

    monkeypatch.setattr(Lake, "write_files", then_vacuum)
    commit = filled.append(*feed.commit())
    assert len(vacuumed) == 2
    assert not {file.path for file in commit.files} & set(vacuumed)
    for file in Lake.open(filled.location).snapshot().files:
        assert filled.table.child(file.path).exists(), file.path
    assert filled.read("reward_assigned").num_rows == 22


def test_read_only_lake_refuses_maintenance(filled: Lake) -> None:
    lake = Lake.open(filled.location, read_only=True)
    acts: list[Callable[[Lake], object]] = [compact, checkpoint, vacuum]
    for act in acts:
        with pytest.raises(StoreError, match="read_only=True"):
            act(lake)


@pytest.mark.parametrize("name", ["a space", "ha#sh", "qu?est", "l\u00e4ke", "plus+", "100%"])
def test_a_lake_of_any_name_is_maintained(tmp_path: pathlib.Path, feed: Any, name: str) -> None:
    lake = Lake.create(tmp_path / name)
    lake.append(*feed.commit())
    assert checkpoint(lake) == lake.snapshot().version


@pytest.mark.parametrize("name", ["per%20cent", "back\\slash"])
def test_a_name_that_delta_readers_take_for_another_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ConfigError, match="write the name as it is"):
        Lake.create(tmp_path / name)
    assert not (tmp_path / name).exists()
