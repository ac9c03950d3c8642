"""The plain case of the fold: one action an attempt, nothing lost, nothing rewritten."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.attempts import AttemptWriter, row, segments, shuffled, version_runs, whole
from tests.conftest import Tape

from rolltape.schema import fold as fold_module
from rolltape.schema.fold import SEGMENT_SCHEMA, TRAJECTORY_SCHEMA, fold
from rolltape.schema.reasons import UNTRAINABLE_REASONS


def test_no_events_make_empty_tables_of_the_right_schemas() -> None:
    folded = fold({})
    assert folded.trajectories.schema == TRAJECTORY_SCHEMA
    assert folded.segments.schema == SEGMENT_SCHEMA
    assert folded.trajectories.num_rows == folded.segments.num_rows == 0


def test_a_plain_rollout_is_one_trainable_segment(tape: Tape) -> None:
    tape.add("run_started", purpose="train", tokenizer=[{"name": "chars", "revision": "r7"}])
    tape.rollout("t", prompt=(1, 2), tokens=(5, 6, 7), version=3, reward=0.25, member=2, group_size=4)
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert found["state"] == "ended"
    assert found["status"] == "completed"
    assert found["untrainable_reasons"] == []
    assert (found["reward"], found["reward_state"]) == (0.25, "earned")
    assert (found["min_version"], found["max_version"], found["policy_id"]) == (3, 3, "actor")
    assert (found["logprobs_mode"], found["temperature"]) == ("processed_logprobs", 1.0)
    assert (found["tito_ok"], found["prefix_source"]) == (True, "engine")
    assert (found["num_prompt_tokens"], found["num_action_tokens"], found["num_observation_tokens"]) == (2, 3, 0)
    assert (found["training_step"], found["group_ordinal"], found["member"], found["group_size"]) == (1, 0, 2, 4)
    assert found["root_rollout_id"] == "t"
    [segment] = segments(folded, "t")
    assert segment["prompt_token_ids"] == [1, 2]
    assert segment["response_token_ids"] == [5, 6, 7]
    assert segment["rollout_log_probs"] == [-0.5, -0.5, -0.5]
    assert segment["response_mask"] == [True, True, True]
    assert segment["observation_mask"] == [False, False, False]
    assert segment["policy_versions"] == [3, 3, 3]
    assert segment["segment_kind"] == "execution"
    assert segment["is_accepted"] is None
    assert segment["tokenizer_revision"] == "r7"
    assert segment["sampling_config"]["temperature"] == 1.0


def test_rows_are_ordered_by_run_trajectory_attempt(tape: Tape) -> None:
    for name in ("b", "a", "c"):
        whole(tape, name)
    folded = fold(tape.tables())
    assert folded.trajectories["trajectory_id"].to_pylist() == ["a", "b", "c"]
    assert folded.segments["trajectory_id"].to_pylist() == ["a", "b", "c"]


def test_ordered_events_are_not_copied(tape: Tape) -> None:
    length = 40
    ids = ["a", "b"]
    tape.add("rollout_started", 2, trajectory_id=ids, attempt=0, event_index=0, prompt_token_ids=[[1], [2]])
    tape.add(
        "action_sampled",
        2,
        trajectory_id=ids,
        attempt=0,
        event_index=1,
        token_ids=[list(range(length)), list(range(length))],
        rollout_log_probs=[[-0.5] * length] * 2,
    )
    events = tape.tables()
    folded = fold(events)
    for column, source in (("response_token_ids", "token_ids"), ("rollout_log_probs", "rollout_log_probs")):
        there = folded.segments[column].chunk(0).values
        here = events["action_sampled"][source].chunk(0).values
        assert there.to_numpy().ctypes.data == here.to_numpy().ctypes.data, column


def test_empty_and_one_token_responses(tape: Tape) -> None:
    """Case D16: an empty response has a place and no trained token; a lone end token trains."""
    whole(tape, "empty", tokens=())
    whole(tape, "eos", tokens=(151643,))
    silent = AttemptWriter(tape, "silent")
    silent.start()
    silent.end()
    silent.reward(10.0)
    folded = fold(tape.tables())
    for name in ("empty", "silent"):
        assert row(folded, name)["untrainable_reasons"] == []
        assert row(folded, name)["num_segments"] == 1
        [segment] = segments(folded, name)
        assert segment["prompt_token_ids"] == [1, 2]
        assert segment["response_token_ids"] == segment["response_mask"] == []
    assert row(folded, "silent")["reward"] == 10.0
    assert row(folded, "silent")["min_version"] is None
    [segment] = segments(folded, "eos")
    assert segment["response_mask"] == [True]


def test_log_probs_are_kept_to_the_bit_and_the_bad_ones_counted(tape: Tape) -> None:
    payload = struct.unpack("<f", struct.pack("<I", 0x7FC12345))[0]
    values = [-0.0, 0.0, payload, -np.inf, np.inf, None, 5e-5, 2e-4, -9999.0, 1e-45]
    whole(tape, "t", tokens=range(len(values)), log_probs=values)
    folded = fold(tape.tables())
    assert row(folded, "t")["num_untrusted_tokens"] == 6
    assert row(folded, "t")["untrainable_reasons"] == []
    found = folded.segments["rollout_log_probs"].chunk(0).values
    bits = np.frombuffer(found.buffers()[1], np.uint32, len(values))
    expected = np.array([0.0 if v is None else v for v in values], np.float32).view(np.uint32)
    expected[2] = 0x7FC12345
    assert bits.tolist() == expected.tolist()
    assert found.is_null().to_pylist() == [v is None for v in values]


def test_the_buffer_under_a_null_log_prob_is_zero(tape: Tape) -> None:
    whole(tape, "t", tokens=(5, 6), log_probs=(-1.0, -2.0))
    events = tape.tables()
    table = events["action_sampled"]
    garbage = pa.array(np.array([7.5, -2.0], np.float32), mask=np.array([True, False]))
    raw = pa.Array.from_buffers(
        pa.float32(), 2, [garbage.buffers()[0], pa.py_buffer(np.array([7.5, -2.0], np.float32))]
    )
    column = table.schema.get_field_index("rollout_log_probs")
    lists = pa.ListArray.from_arrays([0, 2], raw, type=table.schema.field(column).type)
    events["action_sampled"] = table.set_column(column, table.schema.field(column), lists)
    values = fold(events).segments["rollout_log_probs"].chunk(0).values
    assert np.frombuffer(values.buffers()[1], np.float32, 2).tolist() == [0.0, -2.0]
    assert values.to_pylist() == [None, -2.0]


def test_versions_by_token_and_the_oldest_one(tape: Tape) -> None:
    """Case D11: weights switched in mid-generation."""
    whole(tape, "t", tokens=range(128), version_runs=[version_runs((0, 57, 7), (57, 71, 8))])
    folded = fold(tape.tables())
    assert (row(folded, "t")["min_version"], row(folded, "t")["max_version"]) == (7, 8)
    assert row(folded, "t")["untrainable_reasons"] == []
    [segment] = segments(folded, "t")
    assert segment["policy_versions"] == [7] * 57 + [8] * 71


@pytest.mark.parametrize(
    "runs",
    [
        None,
        [],
        version_runs((0, 2, 4)),
        version_runs((1, 2, 4)),
        version_runs((0, 2, 4), (1, 1, 5)),
        [{"start": 0, "length": 3, "version": None}],
    ],
    ids=["null", "empty", "short", "late", "overlapping", "null version"],
)
def test_a_token_of_unknown_version_is_named(tape: Tape, runs: list[dict[str, int]] | None) -> None:
    whole(tape, "t", version_runs=[runs])
    found = row(fold(tape.tables()), "t")
    assert found["untrainable_reasons"] == ["unknown_version"]


def test_two_policies_in_one_attempt_are_named(tape: Tape) -> None:
    whole(tape, "t", version_runs=[[*version_runs((0, 2, 4)), *version_runs((2, 1, 4), policy="opponent")]])
    found = row(fold(tape.tables()), "t")
    assert found["untrainable_reasons"] == ["mixed_policies"]
    assert found["policy_id"] is None


def test_tokens_of_an_aborted_version_are_named(tape: Tape) -> None:
    whole(tape, "aborted", version=4)
    whole(tape, "fine", version=3)
    other = AttemptWriter(tape, "same number", run_id="another run")
    other.start()
    other.act([5], version=4)
    other.end()
    other.reward()
    tape.add("weights_aborted", policy_id="actor", policy_run_epoch=1, version=4, reason="digest mismatch")
    folded = fold(tape.tables())
    assert row(folded, "aborted")["untrainable_reasons"] == ["aborted_version"]
    assert row(folded, "fine")["untrainable_reasons"] == []
    assert row(folded, "same number")["untrainable_reasons"] == []


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"logprobs_mode": None}, ["unknown_logprobs_mode"]),
        ({"temperature": None}, ["unknown_temperature"]),
        ({"temperature": None, "logprobs_mode": None}, ["unknown_logprobs_mode", "unknown_temperature"]),
        ({"top_p": 0.8}, ["unknown_support"]),
        ({"top_k": 20}, ["unknown_support"]),
        ({"min_p": 0.1}, ["unknown_support"]),
        ({"top_p": 0.8, "logprobs_mode": "raw_logprobs"}, []),
        ({"top_p": None, "top_k": None, "min_p": None}, []),
    ],
)
def test_undeclared_sampling_is_named(tape: Tape, change: dict[str, object], reasons: list[str]) -> None:
    """Cases D6 and D7."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}
    whole(tape, "t", sampling=[{**sampling, **change}])
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == reasons


def test_a_stored_support_makes_truncated_sampling_known(tape: Tape) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.8, "logprobs_mode": "processed_logprobs"}
    support: dict[str, Any] = {"support_token_ids": [[5, 9, 6, 7]], "support_offsets": [[0, 2, 3, 4]]}
    whole(tape, "t", sampling=[sampling], **support)
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == []


def test_modes_and_temperatures_that_differ_between_actions_are_named(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5], sampling=[{"temperature": 0.6, "logprobs_mode": "raw_logprobs"}])
    writer.act([6], sampling=[{"temperature": 1.0, "logprobs_mode": "processed_logprobs"}])
    writer.act([7], sampling=[{"temperature": 1.0, "logprobs_mode": None}])
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert found["untrainable_reasons"] == ["mixed_logprobs_mode", "mixed_temperature", "unknown_logprobs_mode"]
    assert found["logprobs_mode"] is None
    assert found["temperature"] is None


def test_a_text_import_is_queryable_and_refused_by_name(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start(None, prompt_text="What is 2 + 3?")
    text: dict[str, Any] = {
        "token_ids": None,
        "rollout_log_probs": None,
        "prefix_source": "unknown",
        "version_runs": None,
    }
    writer.act((), **text, prefix_digest=None, prefix_length=None, sampling=None, text="5")
    writer.end(num_action_tokens=None, num_observation_tokens=None)
    writer.reward()
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert found["untrainable_reasons"] == ["no_token_ids", "prefix_unknown"]
    assert found["reward"] == 1.0
    [segment] = segments(folded, "t")
    assert segment["prompt_token_ids"] is None
    assert segment["response_token_ids"] == []


def test_ids_without_log_probs_are_named(tape: Tape) -> None:
    whole(tape, "absent", rollout_log_probs=None)
    whole(tape, "short", log_probs=[-0.5, -0.5])
    folded = fold(tape.tables())
    for name in ("absent", "short"):
        assert row(folded, name)["untrainable_reasons"] == ["no_log_probs"]
        assert row(folded, name)["num_untrusted_tokens"] == 3
        [segment] = segments(folded, name)
        assert segment["rollout_log_probs"] == [None, None, None]
        assert segment["response_mask"] == [True, True, True]


@pytest.mark.parametrize(
    ("status", "reasons"),
    [
        ("completed", []),
        ("truncated", []),
        ("model_failed", []),
        ("env_failed", ["env_failed"]),
        ("aborted", ["aborted"]),
    ],
)
def test_only_failures_that_are_not_the_policys_forbid_training(tape: Tape, status: str, reasons: list[str]) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.end(status, cause="sandbox timeout")
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert (found["untrainable_reasons"], found["status"], found["cause"]) == (reasons, status, "sandbox timeout")


@pytest.mark.parametrize(
    "sums",
    [{"num_action_tokens": 4}, {"num_observation_tokens": 1}, {"last_event_index": 1}],
    ids=lambda s: next(iter(s)),
)
def test_check_sums_that_differ_are_named(tape: Tape, sums: dict[str, Any]) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5, 6, 7])
    writer.end(**sums)
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["checksum_mismatch"]


def test_an_event_after_the_end_is_a_check_sum_that_differs(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.end()
    writer.observe([9])
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["checksum_mismatch"]


def test_an_end_that_is_not_the_last_event_although_it_says_so(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.end(last_event_index=2)
    writer.observe([])
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["checksum_mismatch"]


def test_lists_too_long_for_one_array_are_folded_in_parts(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D22: whole trajectories in parts, the same rows."""
    for name in ("a", "b", "c", "d"):
        whole(tape, name, tokens=range(10))
    letter = AttemptWriter(tape, "c")
    letter.dead_letter(9)
    expected = fold(tape.tables())
    monkeypatch.setattr(fold_module, "_MAX_VALUES", 15)
    parts = fold(shuffled(tape.tables(), seed=3))
    assert parts.segments["response_token_ids"].num_chunks > 1
    assert parts.trajectories.equals(expected.trajectories)
    assert parts.segments.equals(expected.segments)


def test_every_reason_has_a_meaning(tape: Tape) -> None:
    whole(tape, "t", prefix_source="unknown", version_runs=None, sampling=None)
    assert set(row(fold(tape.tables()), "t")["untrainable_reasons"]) <= set(UNTRAINABLE_REASONS)


def test_columns_that_a_reader_left_out_read_as_null(tape: Tape) -> None:
    whole(tape, "t")
    events = tape.tables()
    events["action_sampled"] = events["action_sampled"].drop_columns(["rollout_log_probs", "group_id"])
    found = row(fold(events), "t")
    assert found["untrainable_reasons"] == ["no_log_probs"]
    assert found["group_id"] == "g"


def resent(tape: Tape, **changes: Any) -> None:
    """A second copy of the action of ``whole``, later in the log."""
    first = tape.tables()["action_sampled"].to_pylist()[0]
    fields = {name: [value] for name, value in first["action_sampled"].items()}
    names = ("event_id", "trajectory_id", "attempt", "group_id", "event_index", "token_ids", "rollout_log_probs")
    tape.add("action_sampled", **{**fields, **{name: [first[name]] for name in names}, **changes})


def test_a_resent_event_counts_once(tape: Tape) -> None:
    """Case D17: also where an importer stamped it again under another epoch."""
    whole(tape, "t")
    resent(tape, producer_epoch=2)
    for seed in range(4):
        folded = fold(shuffled(tape.tables(), seed))
        assert row(folded, "t")["untrainable_reasons"] == []
        assert row(folded, "t")["num_action_tokens"] == 3


@pytest.mark.parametrize("stamped", [True, False])
def test_an_id_with_other_bytes_is_a_conflict_and_the_first_copy_counts(tape: Tape, stamped: bool) -> None:
    whole(tape, "t")
    whole(tape, "neighbour")
    resent(tape, rollout_log_probs=[[-0.5, -0.5, -0.25]])
    events = tape.tables()
    if not stamped:
        for name, values in (("log_offset", pa.nulls(3, pa.int64())), ("lane_seq", pa.array([1, 2, 1]))):
            column = events["action_sampled"].schema.get_field_index(name)
            events["action_sampled"] = events["action_sampled"].set_column(column, name, values)
    found = [fold(shuffled(events, seed)) for seed in range(6)]
    assert row(found[0], "t")["untrainable_reasons"] == ["event_conflict"]
    assert row(found[0], "neighbour")["untrainable_reasons"] == []
    if stamped:
        assert segments(found[0], "t")[0]["rollout_log_probs"] == [-0.5, -0.5, -0.5]
    for other in found[1:]:
        assert other.trajectories.equals(found[0].trajectories)
        assert other.segments.equals(found[0].segments)


def test_a_disputed_reward_is_a_conflict_too(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.end()
    writer.reward(1.0, event_id="reward")
    writer.reward(0.5, event_id="reward")
    found = row(fold(tape.tables()), "t")
    assert (found["reward"], found["untrainable_reasons"]) == (1.0, ["event_conflict"])
