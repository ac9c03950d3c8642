"""The lake: creating, committing, fencing, reading with conditions."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import CommitterFencedError, LakeFormatError, LakeNotFoundError, StoreError
from rolltape.schema.render import arrow_schema, table_schema
from rolltape.store import Lake
from rolltape.store.evolution import missing_fields
from rolltape.store.snapshot import DataFile


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_create_opens_what_is_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LakeNotFoundError, match="no lake at"):
        Lake.open(tmp_path / "lake")
    first = Lake.create(tmp_path / "lake")
    assert Lake.create(tmp_path / "lake").snapshot().table_id == first.snapshot().table_id
    with pytest.raises(StoreError, match="found one"):
        Lake.create(tmp_path / "lake", exist_ok=False)
    assert first.snapshot().configuration["rolltape.format"] == "1.0"
    assert first.spool_path == tmp_path / "lake" / "spool"


def test_a_lake_is_made_by_one_version_and_a_table_of_others_is_left_alone(tmp_path: pathlib.Path) -> None:
    assert Lake.create(tmp_path / "lake").snapshot().version == 0
    first = tmp_path / "lake/events/_delta_log" / f"{0:020d}.json"
    theirs = first.read_text().replace(',"rolltape.format":"1.0"', "")
    first.write_text(theirs)
    for reach in (Lake.open, Lake.create):
        with pytest.raises(LakeFormatError, match=r"without the property rolltape\.format"):
            reach(tmp_path / "lake")
    assert first.read_text() == theirs


def test_newer_format_is_refused_by_name(lake: Lake, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "lake/events/_delta_log"
    text = (log / f"{0:020d}.json").read_text()
    (log / f"{0:020d}.json").write_text(text.replace('"rolltape.format":"1.0"', '"rolltape.format":"2.0"'))
    with pytest.raises(LakeFormatError, match=r"expected a lake of format 1\.x .* got 2\.0; install a newer Rolltape"):
        Lake.open(tmp_path / "lake")


def test_newer_delta_protocol_is_refused(lake: Lake, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "lake/events/_delta_log"
    (log / f"{1:020d}.json").write_text('{"protocol":{"minReaderVersion":3,"minWriterVersion":7}}\n')
    with pytest.raises(LakeFormatError, match="got 3/7"):
        Lake.open(tmp_path / "lake")


def test_append_commits_rows_and_transactions_together(lake: Lake, feed: Any) -> None:
    tables, transactions = feed.commit(num_rollouts=3)
    commit = lake.append(tables, transactions)
    assert commit.version == 1
    assert commit.num_bytes == sum(file.size_bytes for file in commit.files)
    assert lake.cursor() == Cursor.parse("rollout/0:2")
    other = Lake.open(lake.location)
    assert other.snapshot().transactions == transactions
    for kind, table in tables.items():
        assert other.read(kind).equals(table)
        (file,) = other.snapshot().files_of(kind)
        ids = sorted(table["trajectory_id"].to_pylist())
        assert (file.min_trajectory_id, file.max_trajectory_id) == (ids[0], ids[-1])
        assert (file.num_rows, file.partition, file.max_run_id) == (3, ("rollout", 0), "run")


def test_one_kind_per_file_with_only_its_columns(lake: Lake, feed: Any) -> None:
    tables, transactions = feed.commit()
    for file in lake.append(tables, transactions).files:
        names = pq.ParquetFile(lake.table.child(file.path).open_input()).schema_arrow.names
        assert set(names) <= set(arrow_schema(file.kind).names)
        assert "tenant" not in names


def test_commit_without_rows_moves_transactions(lake: Lake) -> None:
    commit = lake.append({}, {"lane/p/1/rollout/0": 7})
    assert commit.files == ()
    assert lake.snapshot().transactions["lane/p/1/rollout/0"] == 7


def test_repeated_or_lower_transaction_is_fenced(lake: Lake, feed: Any) -> None:
    tables, transactions = feed.commit()
    lake.append(tables, transactions)
    for version in (1, 0):
        with pytest.raises(CommitterFencedError, match="above 1"):
            lake.append(tables, {"lane/p/1/rollout/0": version})
    assert lake.read("reward_assigned").num_rows == 4


def test_expected_transaction_that_moved_is_fenced(lake: Lake, feed: Any) -> None:
    lake.append(*feed.commit())
    with pytest.raises(CommitterFencedError, match="at None, found 1"):
        lake.append({}, {"lane/q/1/rollout/0": 0}, expected={"log/rollout/0": None})


def test_second_handle_that_decided_on_old_marks_is_fenced_and_cleans_up(
    lake: Lake, feed: Any, tmp_path: pathlib.Path
) -> None:
    second = Lake.open(lake.location)
    tables, transactions = feed.commit()
    lake.append(tables, transactions)
    with pytest.raises(CommitterFencedError, match="another committer"):
        second.append(tables, transactions)
    assert second.read("reward_assigned").num_rows == 4
    assert len(list((tmp_path / "lake/events").glob("*.parquet"))) == 2


def test_handles_on_different_lanes_both_land(lake: Lake, feed: Any) -> None:
    second = Lake.open(lake.location)
    lake.append({}, {"lane/a/1/rollout/0": 0})
    second.append({}, {"lane/b/1/rollout/0": 0})
    lake.append({}, {"lane/a/1/rollout/0": 1})
    assert lake.snapshot().transactions == {"lane/a/1/rollout/0": 1, "lane/b/1/rollout/0": 0}


def test_commit_whose_answer_was_lost_counts_as_done(lake: Lake, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place_type = type(lake.location)
    write = place_type.write_if_absent

    def loses_the_answer(self: Any, *arguments: Any) -> bool:
        write(self, *arguments)
        return False

    monkeypatch.setattr(place_type, "write_if_absent", loses_the_answer)
    lake.append(*feed.commit())
    assert lake.snapshot().version == 1
    assert lake.read("reward_assigned").num_rows == 4


def test_unknown_kind_and_read_only_are_refused(lake: Lake) -> None:
    with pytest.raises(ValueError, match="event kinds"):
        lake.append({"no_such": pa.table({"kind": ["no_such"]})}, {})
    with pytest.raises(StoreError, match="read_only=True"):
        Lake.open(lake.location, read_only=True).append({}, {"a": 1})


@pytest.fixture
def filled(lake: Lake, feed: Any) -> Lake:
    for _ in range(5):
        lake.append(*feed.commit(num_rollouts=4))
    lake.append(*feed.commit(num_rollouts=4, run_id="other"))
    return lake


def test_as_of_and_min_offset_split_the_tape(filled: Lake) -> None:
    whole = filled.read("reward_assigned")
    for offset in range(13):
        cursor = Cursor.parse(f"rollout/0:{offset}")
        before = filled.read("reward_assigned", as_of=cursor)
        after = filled.read("reward_assigned", min_offset=offset)
        assert pa.concat_tables([before, after]).equals(whole)
        assert after.equals(filled.read("reward_assigned", min_offset=cursor))
        assert all(value < offset for value in before["log_offset"].to_pylist())


def test_trajectories_and_runs_are_selected(filled: Lake) -> None:
    whole = filled.read("action_sampled")
    ids = whole["trajectory_id"].to_pylist()
    picked = [ids[1], ids[2], ids[13], "none"]
    rows = filled.read("action_sampled", trajectory_ids=picked, columns=["token_ids"])
    assert rows.column_names == ["token_ids"]
    assert rows["token_ids"].to_pylist() == [whole["token_ids"][i].as_py() for i in (1, 2, 13)]
    assert filled.read("action_sampled", run_id="other")["trajectory_id"].to_pylist() == ids[20:]
    assert filled.read("action_sampled", trajectory_ids=[]).num_rows == 0
    assert filled.read("rollout_ended").schema.equals(arrow_schema("rollout_ended"))


def test_files_are_pruned_by_their_bounds(filled: Lake) -> None:
    snapshot = filled.snapshot()
    ids = filled.read("action_sampled")["trajectory_id"].to_pylist()
    assert len(snapshot.files_of("action_sampled")) == 6
    assert len(snapshot.files_of("action_sampled", trajectory_ids=[ids[0]])) == 1
    assert len(snapshot.files_of("action_sampled", run_id="other")) == 1
    assert len(snapshot.files_of("action_sampled", as_of=Cursor.parse("rollout/0:3"))) == 2
    assert len(snapshot.files_of("action_sampled", since=Cursor.parse("rollout/0:3"))) == 4


def test_file_of_unknown_bounds_is_never_pruned() -> None:
    file = DataFile(path="x", size_bytes=1, num_rows=1, kind="alarm_raised")
    cursor = Cursor.parse("control/0:5")
    assert file.may_precede(cursor)
    assert file.may_follow(cursor)
    assert file.may_hold_run("r")
    assert file.may_hold_trajectory(["t"])


def test_file_of_several_partitions_is_filtered_by_row(lake: Lake, tape: Any) -> None:
    tape.add("dead_letter", log_topic="rollout", log_offset=3, reason="unknown_kind")
    tape.add("dead_letter", log_topic="control", log_offset=9, reason="unknown_kind")
    tape.add("dead_letter", log_topic="control", log_offset=1, reason="unknown_kind")
    lake.append(tape.tables(), {"log/rollout/0": 3, "log/control/0": 9})
    (file,) = lake.snapshot().files
    assert file.partition is None
    rows = lake.read("dead_letter", as_of=Cursor.parse("rollout/0:4,control/0:2"))
    assert rows["log_offset"].to_pylist() == [3, 1]
    rows = lake.read("dead_letter", min_offset=Cursor.parse("rollout/0:4,control/0:2"))
    assert rows["log_offset"].to_pylist() == [9]


def test_snapshot_stays_as_it_was(filled: Lake, feed: Any) -> None:
    old = filled.snapshot()
    filled.append({}, {"lane/x/1/rollout/0": 1})
    assert filled.snapshot().version == old.version + 1
    assert "lane/x/1/rollout/0" not in old.transactions
    assert filled.read("reward_assigned", snapshot=old).num_rows == 24


def test_schema_of_an_older_minor_version_is_grown(lake: Lake, feed: Any, tmp_path: pathlib.Path) -> None:
    lake.append(*feed.commit())
    log = tmp_path / "lake/events/_delta_log"
    for version in (0, 1):
        path = log / f"{version:020d}.json"
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "metaData" in action:
                schema = json.loads(action["metaData"]["schemaString"])
                schema["fields"] = [f for f in schema["fields"] if f["name"] not in {"tenant", "alarm_raised"}]
                struct = next(f for f in schema["fields"] if f["name"] == "reward_assigned")
                struct["type"]["fields"] = struct["type"]["fields"][:-1]
                action["metaData"]["schemaString"] = json.dumps(schema)
        path.write_text("".join(json.dumps(action) + "\n" for action in actions))
    assert missing_fields(Lake.open(lake.location, read_only=True).snapshot().schema_json)
    grown = Lake.open(lake.location)
    assert missing_fields(grown.snapshot().schema_json) == []
    assert grown.read("reward_assigned").num_rows == 4


def test_type_that_changed_is_refused() -> None:
    with pytest.raises(LakeFormatError, match="column attempt of type integer, the lake has long"):
        missing_fields(json.dumps({"fields": [{"name": "attempt", "type": "long"}]}))


def test_every_column_of_the_table_is_in_the_delta_schema(lake: Lake) -> None:
    assert missing_fields(lake.snapshot().schema_json) == []
    names = [field["name"] for field in json.loads(lake.snapshot().schema_json)["fields"]]
    assert names == table_schema().names


def test_large_values_keep_their_bits(lake: Lake, tape: Any) -> None:
    odd = np.array([0x80000000, 0x7FC00001, 0xFF800000, 0x00000001], np.uint32).view(np.float32)
    tape.add(
        "action_sampled",
        trajectory_id="t",
        attempt=0,
        event_index=0,
        token_ids=[[1, 2, 3, 4]],
        rollout_log_probs=pa.array([odd], pa.list_(pa.field("element", pa.float32()))),
    )
    lake.append(tape.tables(), {"log/rollout/0": 0})
    values = lake.read("action_sampled")["rollout_log_probs"].chunk(0).values.to_numpy()
    assert values.view(np.uint32).tolist() == odd.view(np.uint32).tolist()
