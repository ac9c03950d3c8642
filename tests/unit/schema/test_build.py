"""Building batches: what fits, what is set aside, and with which reason and bytes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.schema_events import action, action_batch

from rolltape.schema.build import build_batch, with_columns
from rolltape.schema.errors import UnknownKindError, ValidationError
from rolltape.schema.layout import column_of
from rolltape.schema.validate import validate


def refusals(columns: dict[str, Any], kind: str = "action_sampled") -> list[tuple[int, str]]:
    return [(row.row, row.reason) for row in build_batch(kind, columns).refused]


def test_a_plain_value_stands_for_every_row() -> None:
    batch = build_batch("action_sampled", {"trajectory_id": ["a", "b"], "attempt": 3, "sampling": {"seed": 7}}).batch
    assert column_of(batch, "attempt").to_pylist() == [3, 3]
    assert [sampling["seed"] for sampling in column_of(batch, "sampling").to_pylist()] == [7, 7]


def test_kind_and_version_are_filled_in() -> None:
    batch = build_batch("rollout_ended", {"status": "completed"}).batch
    assert column_of(batch, "kind").to_pylist() == ["rollout_ended"]
    assert column_of(batch, "schema_version").to_pylist() == ["1.1"]


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 2], [], None],
        [np.array([1, 2], np.int32), np.array([], np.int32), None],
        [np.array([1, 2], np.int64), np.array([], np.int64), None],
        pa.array([[1, 2], [], None], pa.large_list(pa.int64())),
        pa.chunked_array([pa.array([[1, 2]]), pa.array([[], None], pa.list_(pa.int64()))]),
    ],
)
def test_lists_come_in_any_form(tokens: Any) -> None:
    batch = build_batch("action_sampled", {"token_ids": tokens}).batch
    assert column_of(batch, "token_ids").to_pylist() == [[1, 2], [], None]


def test_a_matrix_is_one_list_a_row() -> None:
    batch = build_batch("action_sampled", {"token_ids": np.arange(6, dtype=np.int16).reshape(2, 3)}).batch
    assert column_of(batch, "token_ids").to_pylist() == [[0, 1, 2], [3, 4, 5]]


def test_a_zero_dimensional_or_deeper_array_is_refused_row_by_row() -> None:
    assert refusals({"token_ids": np.zeros((2, 1, 1), np.int32)}) == [(0, "bad_value"), (1, "bad_value")]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("token_ids", [1, 2**31], "id_overflow"),
        ("token_ids", np.array([1, 2**40]), "id_overflow"),
        ("token_ids", [1, 2**70], "id_overflow"),
        ("token_ids", [1, -(2**31) - 1], "id_overflow"),
        ("token_ids", [1.5], "bad_value"),
        ("token_ids", [True], "bad_value"),
        ("token_ids", "12", "bad_value"),
        ("rollout_log_probs", ["-0.5"], "bad_value"),
        ("attempt", 1.5, "bad_value"),
        ("attempt", 1.0, "bad_value"),
        ("attempt", True, "bad_value"),
        ("attempt", "1", "bad_value"),
        ("attempt", 2**31, "bad_value"),
        ("text", b"\xff\xfe", "broken_utf8"),
        ("text", "\ud800", "broken_utf8"),
        ("text", 5, "bad_value"),
        ("truncated", 1, "bad_value"),
        ("recorded_at", datetime.fromisoformat("2026-01-01"), "bad_value"),  # naive: whose clock?
        ("sampling", {"temprature": 1.0}, "bad_value"),
        ("sampling", {"temperature": "hot"}, "bad_value"),
        ("sampling", ("temperature", 1.0), "bad_value"),
        ("version_runs", [{"start": 0, "len": 1}], "bad_value"),
        ("version_runs", [{"start": 0, "length": 1.5}], "bad_value"),
    ],
)
def test_a_bad_value_costs_its_row_only(name: str, value: Any, reason: str) -> None:
    columns = action(3)
    good = columns[name][0] if isinstance(columns.get(name), list) else None
    columns[name] = [good, value, good]
    built = build_batch("action_sampled", columns)
    assert [(row.row, row.reason) for row in built.refused] == [(1, reason)]
    assert built.kept_rows.tolist() == [0, 2]
    assert column_of(built.batch, "trajectory_id").to_pylist() == ["t0", "t2"]
    assert name in built.refused[0].detail


def test_the_refused_row_is_kept_as_json() -> None:
    columns = action(2, token_ids=[[1], [1, 2**40]], rollout_log_probs=[[-1.0], [float("-inf"), None]])
    (refused,) = build_batch("action_sampled", columns).refused
    assert refused.payload_format == "json_line"
    row = json.loads(refused.payload)
    assert row["token_ids"] == [1, 2**40]
    assert row["rollout_log_probs"] == ["-Infinity", None]
    assert row["trajectory_id"] == "t1"


def test_a_bad_value_for_every_row_leaves_an_empty_batch() -> None:
    built = build_batch("action_sampled", action(2, attempt="x"))
    assert built.batch.num_rows == 0
    assert len(built.refused) == 2


def test_no_rows_are_no_error() -> None:
    columns = {name: [] if isinstance(value, (list, np.ndarray)) else value for name, value in action(1).items()}
    built = build_batch("action_sampled", columns)
    assert (built.batch.num_rows, built.refused) == (0, ())
    assert validate(built.batch) == []


def test_floats_and_times_are_widened_and_narrowed_without_a_guess() -> None:
    batch = build_batch(
        "action_sampled",
        {
            "rollout_log_probs": [np.array([0.1], np.float64)],
            "queue_s": [1],
            "recorded_at": [datetime(2026, 1, 1, tzinfo=UTC)],
        },
    ).batch
    assert column_of(batch, "rollout_log_probs").to_pylist() == [[float(np.float32(0.1))]]
    assert column_of(batch, "queue_s").to_pylist() == [1.0]
    assert column_of(batch, "recorded_at").to_pylist() == [datetime(2026, 1, 1, tzinfo=UTC)]


def test_integers_are_microseconds_of_a_time() -> None:
    batch = build_batch("action_sampled", {"recorded_at": np.array([1_000_000])}).batch
    assert column_of(batch, "recorded_at").to_pylist() == [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]


def test_one_cached_dict_is_not_another() -> None:
    """1, 1.0 and True are equal to Python, and so are 0.0 and -0.0."""
    values = [{"seed": 1}, {"temperature": 1.0}, {"temperature": 0.0}, {"temperature": -0.0}]
    batches = [build_batch("action_sampled", {"sampling": value}).batch for value in values]
    assert [column_of(batch, "sampling")[0].as_py()["seed"] for batch in batches] == [1, None, None, None]
    signs = [np.signbit(column_of(batch, "sampling")[0].as_py()["temperature"]) for batch in batches[2:]]
    assert signs == [False, True]
    assert refusals({"sampling": {"seed": True}}) == [(0, "bad_value")]
    assert refusals({"attempt": 1, "truncated": True}) == []
    assert refusals({"attempt": True}) == refusals({"truncated": 1}) == [(0, "bad_value")]


def test_a_wrong_call_is_an_error_and_no_dead_letter() -> None:
    with pytest.raises(UnknownKindError, match="did you mean action_sampled"):
        build_batch("action_sample", {})
    with pytest.raises(ValidationError, match="did you mean token_ids"):
        build_batch("action_sampled", {"token_idz": [[1]]})
    with pytest.raises(ValidationError, match="expected 2 values in every column"):
        build_batch("action_sampled", {"trajectory_id": ["a", "b"], "token_ids": [[1]]})


def test_stamping_replaces_columns_of_the_envelope_and_of_the_struct() -> None:
    batch = with_columns(action_batch(2), {"lane_seq": np.array([8, 9]), "finish_reason": "stop"})
    assert column_of(batch, "lane_seq").to_pylist() == [8, 9]
    assert column_of(batch, "finish_reason").to_pylist() == ["stop", "stop"]
    assert column_of(batch, "token_ids").to_pylist() == [[5, 6, 7]] * 2
    with pytest.raises(ValidationError, match="expected 2 values"):
        with_columns(batch, {"lane_seq": np.array([1])})
