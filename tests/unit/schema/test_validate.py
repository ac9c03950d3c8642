"""Validation: each rule with a row that breaks it, beside rows that go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.schema_events import action, action_batch, batch_of, stamps

from rolltape.schema.build import build_batch, with_columns
from rolltape.schema.errors import ValidationError
from rolltape.schema.kinds import KINDS
from rolltape.schema.validate import Limits, validate


def found(batch: pa.RecordBatch, limits: Limits | None = None, *, stamped: bool = True) -> list[tuple[int, str]]:
    return [(refusal.row, refusal.reason) for refusal in validate(batch, limits or Limits(), stamped=stamped)]


def event(kind: str, rows: int, **columns: Any) -> pa.RecordBatch:
    return batch_of(kind, {**stamps(rows), **columns})


ATTEMPT = {"trajectory_id": "t", "attempt": 0}


def test_a_valid_batch_has_no_refusal() -> None:
    batch = action_batch(
        3,
        action_kind="execution",
        version_runs=[[{"start": 0, "length": 2, "version": 1}, {"start": 2, "length": 1, "version": 2}], [], None],
        origin_runs=[[{"start": 0, "length": 3, "origin": "sampled"}], None, []],
        prefix_digest="sha256:" + "0" * 64,
        prefix_source="engine",
        sampling={"temperature": 0.0},
    )
    assert found(batch, Limits(vocab_size=8)) == []


def test_log_probs_may_be_anything_but_of_another_length() -> None:
    """Case D8: null and NaN are stored as such; whether they are trusted is another question."""
    values = [float("nan"), None, float("inf")]
    assert found(action_batch(1, rollout_log_probs=[values])) == []
    assert found(action_batch(1, rollout_log_probs=[[1.0, -9999.0, float("-inf")]])) == []


@pytest.mark.parametrize(("num_ids", "num_log_probs"), [(207, 208), (208, 207), (0, 1)])
def test_lengths_that_differ_are_named_with_both_counts(num_ids: int, num_log_probs: int) -> None:
    """Case D4."""
    columns = action(3)
    columns["token_ids"][1:2] = [[1] * num_ids]
    columns["rollout_log_probs"] = [[-1.0] * 3, [-1.0] * num_log_probs, [-1.0] * 3]
    (refusal,) = validate(batch_of("action_sampled", columns))
    assert (refusal.row, refusal.reason) == (1, "length_mismatch")
    assert f"{num_log_probs} and {num_ids}" in refusal.detail


def test_text_imports_need_no_ids_and_no_log_probs() -> None:
    assert found(action_batch(1, token_ids=[None], rollout_log_probs=[None])) == []
    assert found(action_batch(1, rollout_log_probs=[None])) == []
    assert found(action_batch(1, token_ids=[None])) == [(0, "length_mismatch")]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([1, -1, 2], "negative_id"), ([1, 100, 2], "out_of_vocabulary"), ([1, None, 2], "bad_value")],
)
def test_ids_outside_the_vocabulary(ids: list[int | None], reason: str) -> None:
    batch = action_batch(3, token_ids=[[1, 2, 3], ids, [99, 0, 1]])
    assert found(batch, Limits(vocab_size=100)) == [(1, reason)]


def test_ids_under_a_null_list_are_nothing() -> None:
    lists = pa.ListArray.from_arrays(
        pa.array([0, 3, 6], pa.int32()), pa.array([1, 2, 3, -1, -1, -1], pa.int32()), mask=pa.array([False, True])
    )
    assert found(action_batch(2, token_ids=lists, rollout_log_probs=[[-1.0] * 3, None])) == []


def test_ids_of_a_slice_are_its_own() -> None:
    """Case D23: the neighbours' ids are not looked at."""
    batch = action_batch(3, token_ids=[[-1, -1, -1], [1, 2, 3], [-1, -1, -1]])
    assert found(batch.slice(1, 1)) == []
    assert found(batch) == [(0, "negative_id"), (2, "negative_id")]


@pytest.mark.parametrize("name", ["prompt_token_ids"])
def test_every_list_of_ids_is_checked(name: str) -> None:
    columns = {**ATTEMPT, "event_index": [0], name: [[-5]]}
    assert found(event("rollout_started", 1, **columns)) == [(0, "negative_id")]


@pytest.mark.parametrize(
    "runs",
    [
        [{"start": -1, "length": 1}],
        [{"start": 0, "length": 4}],
        [{"start": 0, "length": 2}, {"start": 1, "length": 1}],
        [{"start": 2, "length": 1}, {"start": 0, "length": 1}],
        [{"start": 0}],
        [{"start": 0, "length": 3, "version": -1}],
    ],
)
def test_runs_lie_within_their_tokens_in_order(runs: list[dict[str, int]]) -> None:
    assert found(action_batch(2, version_runs=[runs, None])) == [(0, "bad_value")]


def test_runs_of_two_rows_do_not_overlap() -> None:
    runs = [[{"start": 2, "length": 1}], [{"start": 0, "length": 3}]]
    assert found(action_batch(2, version_runs=runs)) == []


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"action_kind": ["guess"]}, "bad_value"),
        ({"prefix_source": ["somewhere"]}, "bad_value"),
        ({"prefix_digest": ["abc"]}, "bad_value"),
        ({"origin_runs": [[{"start": 0, "length": 1, "origin": "copied"}]]}, "bad_value"),
        ({"sampling": [{"temperature": -0.5}]}, "bad_value"),
        ({"sampling": [{"temperature": float("nan")}]}, "bad_value"),
        ({"attempt": [-1]}, "bad_value"),
        ({"event_index": [-1]}, "bad_value"),
        ({"queue_s": [float("nan")]}, "bad_value"),
        ({"kind": ["rollout_ended"]}, "bad_value"),
        ({"schema_version": ["2.0"]}, "schema_version"),
        ({"schema_version": ["one"]}, "schema_version"),
        ({"schema_version": [None]}, "missing_field"),
        ({"trajectory_id": [None]}, "missing_field"),
        ({"event_index": [None]}, "missing_field"),
        ({"event_id": [None]}, "missing_field"),
        ({"lane_seq": [None]}, "missing_field"),
        ({"prefix_token_ids": [[1, 2]], "prefix_length": [3]}, "length_mismatch"),
        ({"support_token_ids": [[1, 2, 3]], "support_offsets": [[0, 1, 2]]}, "length_mismatch"),
        ({"support_token_ids": [[1, 2]], "support_offsets": [[0, 1, 2, 3]]}, "length_mismatch"),
        ({"support_token_ids": [[1, 2]], "support_offsets": [[0, 2, 1, 2]]}, "bad_value"),
        ({"support_token_ids": [[1, 2]]}, "length_mismatch"),
    ],
)
def test_one_rule_of_an_action(columns: dict[str, Any], reason: str) -> None:
    assert found(action_batch(1, **columns)) == [(0, reason)]


def test_a_sound_support_passes() -> None:
    batch = action_batch(2, support_token_ids=[[5, 6, 9], None], support_offsets=[[0, 1, 2, 3], None])
    assert found(batch) == []


def test_stamps_may_be_missing_before_stamping_but_not_the_rest() -> None:
    columns = {name: value for name, value in action(1).items() if name not in stamps(1)}
    batch = build_batch("action_sampled", {**columns, "event_index": [None]}).batch
    assert found(batch, stamped=False) == []
    assert found(batch) == [(0, "missing_field")]
    assert found(with_columns(batch, {"trajectory_id": None}), stamped=False) == [(0, "missing_field")]


def test_too_many_tokens_in_one_row() -> None:
    assert found(action_batch(2), Limits(max_tokens=2)) == [(0, "too_large"), (1, "too_large")]


def test_broken_text_costs_its_row_only() -> None:
    text = pa.array(["fine", b"\xff\xfe", "fine"], pa.binary()).cast(pa.string(), safe=False)
    batch = with_columns(action_batch(3, token_ids=[[1, 2, 3], [1, 2, 3], [-1, 2, 3]]), {"text": text})
    assert found(batch) == [(1, "broken_utf8"), (2, "negative_id")]


def test_only_the_rollout_plane_is_numbered() -> None:
    columns = {**ATTEMPT, "state": "missing", "event_index": [3, None]}
    assert found(event("reward_assigned", 2, **columns)) == [(0, "bad_value")]


@pytest.mark.parametrize(
    ("state", "scalar", "good"),
    [
        ("earned", 1.0, True),
        ("earned", None, False),
        ("earned", float("inf"), False),
        ("missing", None, True),
        ("missing", 0.0, False),
        ("invalid", None, True),
        ("invalid", 0.0, False),
        ("late", None, False),
    ],
)
def test_a_reward_has_a_scalar_if_and_only_if_it_is_earned(state: str, scalar: float | None, good: bool) -> None:
    batch = event("reward_assigned", 1, **ATTEMPT, state=[state], scalar=[scalar])
    assert found(batch) == ([] if good else [(0, "bad_value")])


def test_reward_components_name_a_known_source_and_status() -> None:
    def reward(**component: Any) -> pa.RecordBatch:
        return event("reward_assigned", 1, **ATTEMPT, state="missing", components=[[{"name": "a", **component}]])

    assert found(reward(source="rule", status="timeout", value=float("nan"))) == []
    assert found(reward(source="vibes")) == [(0, "bad_value")]
    assert found(reward(source="rule", status="maybe")) == [(0, "bad_value")]


def test_an_end_names_its_own_index() -> None:
    columns = {**ATTEMPT, "status": "completed", "event_index": [3, 4], "last_event_index": [3, 5]}
    assert found(event("rollout_ended", 2, **columns)) == [(1, "bad_value")]


def test_teacher_scores_are_as_long_as_their_ids() -> None:
    columns = {**ATTEMPT, "teacher_id": "m", "weights_digest": "d", "scored_token_ids": [[1, 2]] * 3}
    log_probs = [[-1.0, -2.0], [None, -1.0, -2.0], [-1.0, -2.0]]
    top = [[-1.0] * 4, [-1.0] * 4, [-1.0] * 3]
    batch = event("teacher_scored", 3, **columns, log_probs=log_probs, top_k=2, top_k_log_probs=top)
    assert found(batch) == [(1, "length_mismatch"), (2, "length_mismatch")]


def test_trained_tokens_add_up() -> None:
    columns = {"group_id": "g", "batch_id": "b", "step": 1, "num_tokens": [[2, 1], [1, 1]]}
    batch = event("tokens_trained", 2, **columns, advantages=[[0.5, 0.5, 1.0], [0.5, 0.5, 1.0]])
    assert found(batch) == [(1, "length_mismatch")]


def test_spans_of_a_rewrite_lie_in_the_new_context() -> None:
    columns = {**ATTEMPT, "event_index": [1, 2], "reason": "rewind", "context_token_ids": [[1, 2], [1, 2]]}
    spans = [[{"start": 0, "length": 2}], [{"start": 1, "length": 2}]]
    assert found(event("context_rewritten", 2, **columns, provenance=spans)) == [(1, "bad_value")]


def test_masked_ranges_are_not_negative() -> None:
    ranges = [[{"event_id": "e", "start": 5, "length": 2}], [{"event_id": "e", "start": -1, "length": 2}]]
    assert found(event("mask_assigned", 2, **ATTEMPT, ranges=ranges)) == [(1, "bad_value")]


def test_a_dead_letter_accounts_for_a_range() -> None:
    batch = event("dead_letter", 2, reason="conflict", first_lane_seq=[1, 3], last_lane_seq=[1, 2])
    assert found(batch) == [(1, "bad_value")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_it_requires(kind: str) -> None:
    """A row of nulls is refused for the first thing it lacks, whatever the kind."""
    assert found(build_batch(kind, {}, 1).batch) == [(0, "missing_field")]


def test_a_batch_of_another_schema_is_a_wrong_call() -> None:
    batch = action_batch(1)
    with pytest.raises(ValidationError, match="conform it first"):
        validate(batch.select(["kind", "action_sampled"]))


def test_large_batches_take_the_same_way() -> None:
    rows = 1000
    kinds = ["execution"] * rows
    kinds[700] = "x"
    batch = action_batch(rows, action_kind=kinds, token_ids=np.ones((rows, 3), np.int32))
    assert found(batch) == [(700, "bad_value")]
