"""SQL and verification over a lake on disk: pruning, positions, damage, and what errors may show."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import SqlError, SqlRefusedError
from rolltape.store.lake import Lake
from rolltape.store.snapshot import DataFile
from rolltape.store.sources import LakeSource
from rolltape.store.verify import verify


def commit(lake: Lake, tape: Any, taken: dict[str, int]) -> None:
    """Append what the tape has beyond ``taken``, with the marks that a committer would write."""
    tables = {}
    for kind, batches in tape.batches.items():
        if len(batches) > taken.get(kind, 0):
            tables[kind] = pa.Table.from_batches(batches[taken.get(kind, 0) :])
            taken[kind] = len(batches)
    transactions: dict[str, int] = {}
    for table in tables.values():
        for row in table.select(["producer_id", "producer_epoch", "log_topic", "lane_seq", "log_offset"]).to_pylist():
            lane = f"lane/{row['producer_id']}/{row['producer_epoch']}/{row['log_topic']}/0"
            place = f"log/{row['log_topic']}/0"
            transactions[lane] = max(transactions.get(lane, -1), row["lane_seq"])
            transactions[place] = max(transactions.get(place, -1), row["log_offset"])
    lake.append(tables, transactions)


@pytest.fixture
def lake(tape: Any, tmp_path: pathlib.Path) -> Lake:
    """A lake of 6 commits with 4 rollouts each."""
    lake = Lake.create(tmp_path / "lake")
    taken: dict[str, int] = {}
    tape.add("run_started", purpose="train", vocab_size=100)
    for number in range(6):
        for member in range(4):
            tape.rollout(f"t{number}-{member}", group_id=f"g{number}", member=member, group_size=4, step=number + 1)
        commit(lake, tape, taken)
    return lake


def opened(lake: Lake, monkeypatch: pytest.MonkeyPatch, query: str) -> set[str]:
    """Kinds of the data files whose rows the query read, with how many files of each."""
    source = LakeSource(lake)
    asked: list[str] = []
    original = LakeSource.kind

    def spy(self: LakeSource, kind: str, as_of: Cursor | None) -> Any:
        asked.append(kind)
        return original(self, kind, as_of)

    monkeypatch.setattr(LakeSource, "kind", spy)
    lake.sql(query).arrow()
    assert source.snapshot.version == lake.snapshot().version
    return set(asked)


def test_counts(lake: Lake) -> None:
    found = lake.sql("SELECT kind, count(*) AS num FROM events GROUP BY kind").rows()
    assert {row["kind"]: row["num"] for row in found}["action_sampled"] == 24
    assert lake.sql("SELECT count(*) AS num FROM trajectories WHERE state = 'ended'").rows() == [{"num": 24}]
    assert lake.sql("SELECT sum(num_members)::INT AS num FROM groups").rows() == [{"num": 24}]
    assert lake.sql("SELECT in_flight, balance FROM conservation").rows() == [{"in_flight": 24, "balance": 0}]


def test_only_the_kinds_that_a_statement_names_are_looked_at(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(lake, monkeypatch, "SELECT count(*) FROM rollout_ended") == {"rollout_ended"}
    assert opened(lake, monkeypatch, "SELECT * FROM rewards") == {"reward_assigned"}
    assert opened(lake, monkeypatch, "SELECT 1") == set()


@pytest.mark.parametrize(
    ("condition", "num_files"),
    [
        (ds.field("trajectory_id") == "t3-1", 1),
        (ds.field("trajectory_id").isin(["t3-1", "t5-0"]), 2),
        (ds.field("trajectory_id") > "t4", 2),
        (ds.field("log_offset") < 3, 1),
        (ds.field("run_id") == "other", 0),
        (ds.field("kind") == "other", 0),
        (ds.field("attempt") == 5, 6),
    ],
)
def test_bounds_skip_files(lake: Lake, condition: ds.Expression, num_files: int) -> None:
    rows = LakeSource(lake).kind("action_sampled", None)
    assert isinstance(rows, ds.Dataset)
    assert len(list(rows.get_fragments(condition))) == num_files


def test_a_file_that_is_gone_is_missed_only_by_who_needs_it(lake: Lake, tmp_path: pathlib.Path) -> None:
    (gone,) = lake.snapshot().files_of("action_sampled", trajectory_ids=["t3-1"])
    lake.table.child(gone.path).delete()
    assert lake.sql("SELECT token_ids FROM action_sampled WHERE trajectory_id = 't2-1'").arrow().num_rows == 1
    assert lake.sql("SELECT token_id FROM tokens WHERE trajectory_id = 't2-1'").arrow().num_rows == 3
    assert lake.sql("SELECT count(*) AS n FROM rollout_ended").rows() == [{"n": 24}]
    with pytest.raises(SqlError) as caught:
        lake.sql("SELECT token_ids FROM action_sampled").arrow()
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(SqlError) as folded:
        lake.sql("SELECT * FROM trajectories").arrow()
    assert str(tmp_path) not in str(folded.value)


def test_null_ids_are_found_in_files_with_bounds(lake: Lake, tape: Any) -> None:
    columns = {"trajectory_id": ["a", None, "z"], "reason": "x"}
    table = pa.Table.from_batches([_dead_letters(tape, columns)])
    lake.append({"dead_letter": table}, {"log/control/0": 1})
    assert lake.sql("SELECT count(*) AS n FROM dead_letter WHERE trajectory_id IS NULL").rows() == [{"n": 1}]
    assert lake.sql("SELECT count(*) AS n FROM events WHERE trajectory_id IS NULL").rows() == [{"n": 2}]


def _dead_letters(tape: Any, columns: dict[str, Any]) -> pa.RecordBatch:
    tape.add("dead_letter", 3, **columns)
    batch: pa.RecordBatch = tape.batches["dead_letter"][-1]
    return batch


def test_as_of_a_cursor(lake: Lake) -> None:
    cursor = Cursor.parse("rollout/0:40,control/0:1")
    assert lake.sql("SELECT count(*) AS n FROM events", as_of=cursor).rows() == [{"n": 41}]
    assert lake.sql("SELECT count(*) AS n FROM trajectories", as_of=cursor).rows() == [{"n": 8}]
    assert lake.sql("SELECT count(*) AS n FROM events", as_of=Cursor()).rows() == [{"n": 0}]
    partly = lake.sql("SELECT trajectory_id, state FROM trajectories", as_of=Cursor.parse("rollout/0:7")).rows()
    assert partly == [{"trajectory_id": "t0-0", "state": "ended"}, {"trajectory_id": "t0-1", "state": "open"}]


def test_new_commits_are_seen_and_folds_are_shared(lake: Lake, tape: Any) -> None:
    import rolltape.store.workspace as workspace

    taken = {kind: len(batches) for kind, batches in tape.batches.items()}
    count = "SELECT count(*) AS n FROM trajectories"
    assert lake.sql(count).rows() == [{"n": 24}]
    kept = len(workspace._FOLDS._kept)
    assert lake.sql("SELECT count(*) AS n FROM segments").rows() == [{"n": 24}]
    assert len(workspace._FOLDS._kept) == kept
    tape.rollout("late")
    commit(lake, tape, taken)
    assert lake.sql(count).rows() == [{"n": 25}]


def test_a_read_only_handle_answers(lake: Lake) -> None:
    assert Lake.open(lake.location, read_only=True).sql("SELECT count(*) AS n FROM rewards").rows() == [{"n": 24}]


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{place}/out.csv'",
        "SELECT * FROM read_parquet('{place}/lake/events/*.parquet')",
        "SELECT * FROM '{place}/lake/events/x.parquet'",
        "ATTACH '{place}/x.db'",
    ],
)
def test_nothing_reaches_the_disk(lake: Lake, tmp_path: pathlib.Path, query: str) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SqlRefusedError):
        lake.sql(query.format(place=tmp_path))
    assert sorted(tmp_path.iterdir()) == before


def test_the_session_itself_is_locked(lake: Lake, tmp_path: pathlib.Path) -> None:
    """What the statement check would let through by mistake still finds every door shut."""
    relation = lake.sql("SELECT * FROM events").relation()
    with pytest.raises(Exception, match=r"disabled by configuration|locked|not exist"):
        relation.write_csv(str(tmp_path / "out.csv"))
    assert not (tmp_path / "out.csv").exists()


def test_files_of_other_minor_versions_and_spellings(lake: Lake, tape: Any) -> None:
    """A struct with a field less or more, list children called item, large lists: all read as one kind."""
    tape.rollout("other", tokens=(7, 8))
    table = pa.Table.from_batches(tape.batches["action_sampled"][-1:])
    struct = table["action_sampled"].combine_chunks()
    kept = [field for field in struct.type.fields if field.name != "text"]
    fewer = pa.StructArray.from_arrays([struct.field(field.name) for field in kept], fields=kept)
    more = pa.StructArray.from_arrays(
        [*struct.flatten(), pa.array(["new"])], fields=[*struct.type.fields, pa.field("of_tomorrow", pa.string())]
    )
    ids = pa.array([[7, 8]], pa.large_list(pa.field("item", pa.int32())))
    names = table.column_names
    files = []
    for number, changed in enumerate((fewer, more)):
        columns = {**dict(zip(names, table.columns, strict=True)), "token_ids": ids, "action_sampled": changed}
        place = lake.table.child(f"other{number}.parquet")
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink)
        place.write_bytes(sink.getvalue())
        files.append(DataFile(path=place.name, size_bytes=1, num_rows=1, kind="action_sampled"))
    snapshot = lake.snapshot()
    mixed = {**snapshot.by_kind, "action_sampled": (*snapshot.by_kind["action_sampled"], *files)}
    lake.snapshot = lambda: dataclasses.replace(snapshot, by_kind=mixed)  # type: ignore[method-assign]
    found = lake.sql(
        "SELECT token_ids, text, action_kind, engine.id AS engine FROM action_sampled WHERE trajectory_id = 'other'"
    )
    assert found.rows() == [{"token_ids": [7, 8], "text": None, "action_kind": "execution", "engine": "e0"}] * 2
    assert lake.sql("SELECT count(*) AS n FROM action_sampled").rows() == [{"n": 26}]


def test_verify_a_lake_in_order(lake: Lake) -> None:
    report = verify(lake)
    assert [finding.message for finding in report.findings] == []
    assert report.cursor == lake.cursor()
    assert report.lake_version == lake.snapshot().version
    assert report.check("prefix_proof").num_checked == 24
    assert report.check("offsets").num_checked == 121
    rows = report.to_rows()
    assert {row["check"] for row in rows} == {check.check for check in report.checks}


def test_verify_only_what_is_new(lake: Lake, tape: Any) -> None:
    taken = {kind: len(batches) for kind, batches in tape.batches.items()}
    since = verify(lake).cursor
    assert verify(lake, since).check("prefix_proof").num_checked == 0
    tape.rollout("late", tokens=(200,))
    commit(lake, tape, taken)
    report = verify(lake, since)
    assert report.check("prefix_proof").num_checked == 1
    assert [finding.trajectory_id for finding in report.findings] == ["late"]
    assert report.check("event_ids").num_checked == 126


def test_verify_a_lake_that_lost_a_file(lake: Lake) -> None:
    """The file of one kind is taken out of the table: records are missing, and attempts are incomplete."""
    snapshot = lake.snapshot()
    kept = {kind: files[1:] if kind == "action_sampled" else files for kind, files in snapshot.by_kind.items()}
    # A version of its own, for the caches.
    lost = dataclasses.replace(snapshot, version=snapshot.version + 1000, by_kind=kept)
    lake.snapshot = lambda: lost  # type: ignore[method-assign]
    report = verify(lake)
    assert report.check("offsets").num_broken == 4
    assert {f.trajectory_id for f in report.check("completeness").findings} == {f"t0-{n}" for n in range(4)}


def test_verify_hashes_shards(lake: Lake, tape: Any) -> None:
    import hashlib

    taken = {kind: len(batches) for kind, batches in tape.batches.items()}
    good, bad = b"good bytes", b"other bytes"
    for version, content in ((1, good), (2, bad), (3, b"short"), (4, None)):
        if content is not None:
            lake.location.child("weights", f"v{version}", "a.safetensors").write_bytes(content)
        shard = {
            "file": "a.safetensors",
            "num_bytes": len(bad if version == 2 else good),
            "sha256": hashlib.sha256(good).hexdigest(),
        }
        columns = {"policy_id": "actor", "policy_run_epoch": 1, "version": version, "path": f"weights/v{version}"}
        tape.add("weights_published", payload="full", shards=[[shard]], **columns)
    tape.add("checkpoint_saved", trainer_id="t", step=1, path="checkpoints/1", digest="d")
    tape.add("checkpoint_saved", trainer_id="t", step=2, path="checkpoints/2", digest="d")
    tape.add("artifacts_released", paths=[["checkpoints/2"]])
    commit(lake, tape, taken)
    result = verify(lake).check("artifacts")
    messages = [finding.message for finding in result.findings]
    assert ["SHA-256 differs" in messages[0], "got 5" in messages[1], "nothing" in messages[2]] == [True] * 3
    assert "checkpoint of step 1" in messages[3]
    assert result.num_broken == 4
