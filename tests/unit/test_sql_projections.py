"""Projections over hand-made tapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import SqlError
from rolltape.schema.kinds import KINDS
from rolltape.store.projections import VIEW_NAMES
from rolltape.store.results import QueryResult
from rolltape.store.sources import TableSource
from rolltape.store.sql import query_source
from rolltape.store.statement import read_statement
from rolltape.store.workspace import view_columns


def sql(tape: Any, query: str, as_of: Cursor | None = None) -> QueryResult:
    return query_source(TableSource(tape.tables()), read_statement(query, VIEW_NAMES), as_of=as_of)


def rows(tape: Any, query: str, as_of: Cursor | None = None) -> list[dict[str, Any]]:
    return sql(tape, query, as_of).rows()


def bits(column: pa.ChunkedArray) -> list[int | None]:
    values = column.to_numpy().astype(np.float32, copy=False).view(np.uint32)
    return [None if absent else int(value) for value, absent in zip(values, column.is_null().to_pylist(), strict=True)]


@pytest.mark.parametrize("view", sorted(VIEW_NAMES))
def test_every_view_is_readable_on_an_empty_tape(tape: Any, view: str) -> None:
    found = sql(tape, f"SELECT * FROM {view}").arrow()
    assert found.num_rows == 0 or view == "view_columns"
    documented = view_columns().filter(pa.compute.equal(view_columns()["view"], view))["column"].to_pylist()
    assert sorted(found.column_names) == sorted(documented) or view == "view_columns"


def test_every_column_has_a_meaning() -> None:
    columns = view_columns()
    assert columns.filter(pa.compute.equal(columns["doc"], "")).select(["view", "column"]).to_pylist() == []
    assert set(columns["view"].to_pylist()) == VIEW_NAMES - {"view_columns"}


def test_kinds_are_flat(tape: Any) -> None:
    tape.rollout("t", tokens=(5, 6))
    (row,) = rows(tape, "SELECT trajectory_id, token_ids, action_kind, engine.id AS engine FROM action_sampled")
    assert row == {"trajectory_id": "t", "token_ids": [5, 6], "action_kind": "execution", "engine": "e0"}


def test_events_hold_all_kinds(tape: Any) -> None:
    tape.rollout("t")
    tape.add("run_started", purpose="train")
    counts = {row["kind"]: row["n"] for row in rows(tape, "SELECT kind, count(*) AS n FROM events GROUP BY kind")}
    assert counts == dict.fromkeys(
        ("rollout_dispatched", "rollout_started", "action_sampled", "rollout_ended", "reward_assigned", "run_started"),
        1,
    )
    assert counts.keys() <= KINDS.keys()


def test_tokens(tape: Any) -> None:
    values = (-0.5, 0.0, None, math.nan, -math.inf, -9999.0, 0.5, -100.0)
    tape.rollout("t", tokens=tuple(range(8)), log_probs=values, version=3)
    found = sql(tape, "SELECT * FROM tokens ORDER BY position").arrow()
    assert found["token_id"].to_pylist() == list(range(8))
    assert found["position"].to_pylist() == list(range(8))
    assert found["policy_version"].to_pylist() == [3] * 8
    assert found["is_action"].to_pylist() == [True] * 8
    assert found["trusted"].to_pylist() == [True, True, False, False, False, False, False, True]
    expected = [None if value is None else int(np.float32(value).view(np.uint32)) for value in values]
    assert bits(found["log_prob"]) == expected


def test_tokens_that_are_no_action_are_neither_trusted_nor_untrusted(tape: Any) -> None:
    tape.rollout("t", tokens=(5, 6), ended=False)
    tape.add(
        "observation_received",
        trajectory_id="t",
        attempt=0,
        group_id="g0",
        problem_id="problem-g0",
        event_index=2,
        source="tool",
        token_ids=[[7, 8]],
    )
    found = rows(tape, "SELECT position, token_id, is_observation, trusted, policy_version FROM tokens ORDER BY 1")
    assert [row["is_observation"] for row in found] == [False, False, True, True]
    assert [row["trusted"] for row in found] == [True, True, None, None]
    assert [row["policy_version"] for row in found] == [0, 0, None, None]


def test_groups(tape: Any) -> None:
    for member, reward in enumerate((1.0, 0.0, 0.0, 1.0)):
        tape.rollout(f"m{member}", group_id="mixed", reward=reward, member=member, group_size=4)
    for member, reward in enumerate((0.1 + 0.2, 0.3, 0.3)):
        tape.rollout(f"n{member}", group_id="noise", reward=reward, member=member, group_size=4)
    tape.rollout("u", group_id="unjudged", reward=None)
    found = {row["group_id"]: row for row in rows(tape, "SELECT * FROM groups")}
    assert found["mixed"]["reward_mean"] == 0.5
    assert found["mixed"]["reward_std"] == pytest.approx(0.5773502691896257)
    assert (found["mixed"]["zero_variance"], found["noise"]["zero_variance"]) == (False, True)
    assert (found["mixed"]["is_complete"], found["noise"]["is_complete"]) == (True, False)
    assert (found["unjudged"]["num_rewarded"], found["unjudged"]["zero_variance"]) == (0, None)


def test_rewards_superseded_and_in_conflict(tape: Any) -> None:
    (first,) = tape.rollout("t", reward=0.0)
    middle = Cursor.parse("rollout/0:5")
    tape.add("reward_assigned", trajectory_id="t", attempt=0, state="earned", scalar=1.0, supersedes=[[first]])
    (clash,) = tape.rollout("u", reward=0.0)
    tape.add("reward_assigned", trajectory_id="u", attempt=0, state="earned", scalar=1.0)
    query = "SELECT trajectory_id, scalar, is_superseded, is_conflict FROM rewards ORDER BY ALL"
    found = [tuple(row.values()) for row in rows(tape, query)]
    assert found == [
        ("t", 0.0, True, False),
        ("t", 1.0, False, False),
        ("u", 0.0, False, True),
        ("u", 1.0, False, True),
    ]
    assert [tuple(row.values()) for row in rows(tape, query, middle)] == [("t", 0.0, False, False)]
    state = {row["trajectory_id"]: row["reward_state"] for row in rows(tape, "SELECT * FROM trajectories")}
    assert (state["t"], state["u"], clash) == ("earned", "conflict", clash)


def test_as_of_shows_what_was_known_then(tape: Any) -> None:
    tape.rollout("t", reward=None)
    before = Cursor.parse("rollout/0:4")
    tape.add("reward_assigned", trajectory_id="t", attempt=0, state="earned", scalar=1.0)
    query = "SELECT state, reward FROM trajectories"
    assert rows(tape, query, before) == [{"state": "ended", "reward": None}]
    assert rows(tape, query) == [{"state": "ended", "reward": 1.0}]
    assert rows(tape, query, Cursor.parse("rollout/0:3"))[0]["state"] == "open"


def test_policy_versions_list_their_acknowledgements(tape: Any) -> None:
    version: dict[str, Any] = {"policy_id": "actor", "policy_run_epoch": 1, "weights_digest": "d"}
    for number in (1, 2, 3):
        tape.add("weights_published", version=number, step=number, payload="full", **version)
    for engine in ("a", "b"):
        tape.add("weights_staged", version=1, engine_id=engine, **version)
    tape.add("weights_committed", version=1, required_engines=[["a", "b"]], **version)
    tape.add("weights_activated", version=1, engine_id="b", **version)
    tape.add("weights_staged", version=2, engine_id="a", **version)
    tape.add("weights_aborted", version=2, reason="digest_mismatch", **version)
    query = "SELECT version, state, staged_engines, activated_engines, missing_engines FROM policy_versions ORDER BY 1"
    assert rows(tape, query) == [
        {
            "version": 1,
            "state": "activated",
            "staged_engines": ["a", "b"],
            "activated_engines": ["b"],
            "missing_engines": ["a"],
        },
        {"version": 2, "state": "aborted", "staged_engines": ["a"], "activated_engines": [], "missing_engines": None},
        {"version": 3, "state": "published", "staged_engines": [], "activated_engines": [], "missing_engines": None},
    ]


def test_engines(tape: Any) -> None:
    tape.add("engine_joined", engine_id="a", incarnation="1", name="scripted")
    tape.add("engine_joined", engine_id="b", incarnation="1")
    tape.add("engine_left", engine_id="a", reason="silent")
    tape.add("engine_joined", engine_id="a", incarnation="2")
    tape.add("engine_left", engine_id="b", reason="left")
    tape.add("weights_activated", engine_id="a", policy_id="p", policy_run_epoch=1, version=4)
    found = rows(tape, "SELECT engine_id, incarnation, state, left_reason, active_version FROM engines ORDER BY 1")
    assert [tuple(row.values()) for row in found] == [("a", "2", "joined", None, 4), ("b", "1", "left", "left", None)]


def test_steps_follow_the_live_line_and_find_their_checkpoint(tape: Any) -> None:
    tape.add("run_started", purpose="train")
    for step in (1, 2):
        tape.add(
            "train_step_completed",
            trainer_id="t",
            step=step,
            batch_id=f"b{step}",
            skipped=False,
            checkpoint_digest="c1" if step == 1 else None,
            metrics=[[{"name": "reward", "value": 0.5}]],
        )
    tape.add("checkpoint_saved", trainer_id="t", step=1, path="checkpoints/1", digest="c1")
    tape.add("run_resumed", run_epoch=2, purpose="train", continues_from_step=1)
    found = rows(tape, "SELECT step, is_live, checkpoint_path FROM steps ORDER BY step")
    assert [tuple(row.values()) for row in found] == [(1, True, "checkpoints/1"), (2, False, None)]
    assert rows(tape, "SELECT name, value FROM step_metrics WHERE is_live") == [{"name": "reward", "value": 0.5}]


def test_dead_letters_and_their_redrive(tape: Any) -> None:
    ids = tape.add("dead_letter", num_rows=2, reason="length_mismatch", payload=[[b"abc", b""]][0])
    tape.add("dead_letter_redriven", dead_letter_event_id=ids[0], replacement_event_ids=[["x"]], repair="by hand")
    found = rows(tape, "SELECT payload_bytes, is_redriven, replacement_event_ids FROM dead_letters ORDER BY 1")
    assert [tuple(row.values()) for row in found] == [(0, False, None), (3, True, ["x"])]


def test_integer_sums_stay_integers(tape: Any) -> None:
    tape.rollout("t", tokens=(5, 6, 7))
    found = sql(tape, "SELECT sum(token_id) AS s, sum(token_id::HUGEINT) * 10::HUGEINT ** 20 AS large FROM tokens")
    assert found.arrow().schema.field("s").type == pa.int64()
    assert found.rows()[0]["s"] == 18
    wide = sql(tape, "SELECT sum(9223372036854775807) AS s FROM range(3)").arrow()
    assert wide["s"].to_pylist() == [3 * (2**63 - 1)]
    assert not pa.types.is_floating(wide.schema.field("s").type)


def test_a_result_of_many_batches_is_whole(tape: Any) -> None:
    found = sql(tape, "SELECT range AS n, [range] AS list FROM range(20_000)").arrow()
    assert found["n"].to_pylist() == list(range(20_000))
    assert found["list"].num_chunks > 1


def test_results_in_every_form(tape: Any) -> None:
    tape.rollout("t", tokens=(5, 6, 7))
    found = sql(tape, "SELECT position, token_id, log_prob, nullif(position, 1) AS holed FROM tokens ORDER BY position")
    assert found.columns == ["position", "token_id", "log_prob", "holed"]
    assert found.polars()["token_id"].to_list() == [5, 6, 7]
    assert found.pandas()["holed"].isna().tolist() == [False, True, False]
    assert str(found.pandas()["holed"].dtype) == "Int32"
    assert found.relation().filter("token_id > 5").fetchall() == [(1, 6, -0.5, None), (2, 7, -0.5, 2)]
    assert found.rows()[0] == {"position": 0, "token_id": 5, "log_prob": -0.5, "holed": 0}


def test_a_column_that_is_not_there_names_its_neighbours(tape: Any) -> None:
    with pytest.raises(SqlError, match="trajectory_id"):
        sql(tape, "SELECT trajectory_idd FROM trajectories")


def test_an_error_while_running(tape: Any) -> None:
    tape.rollout("t")
    with pytest.raises(SqlError, match="boom"):
        sql(tape, "SELECT error('boom' || trajectory_id) FROM events").arrow()
