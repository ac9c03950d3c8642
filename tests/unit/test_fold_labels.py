"""Rewards that nothing supersedes, masks, and the digests of what is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.attempts import AttemptWriter, row, segments, whole
from tests.conftest import Tape

from rolltape.schema.fold import content_digests_of, fold, segment_digests
from rolltape.schema.fold_schema import TRAJECTORY_SCHEMA


def unrewarded(tape: Tape, name: str = "t", attempt: int = 0) -> tuple[AttemptWriter, str]:
    """An ended attempt [20, 21] 30 [22]; returns its writer and the id of its first action."""
    writer = AttemptWriter(tape, name, attempt)
    writer.start([1])
    first = writer.act([20, 21])
    writer.observe([30])
    writer.act([22])
    writer.end()
    return writer, first


def verdict(tape: Tape, name: str = "t") -> tuple[Any, Any, list[str]]:
    found = row(fold(tape.tables()), name)
    return found["reward"], found["reward_state"], found["untrainable_reasons"]


def test_nobody_judged_missing_and_invalid_are_three_things(tape: Tape) -> None:
    """Cases D14 and D15: none of them is 0."""
    writer, _ = unrewarded(tape)
    assert verdict(tape) == (None, None, ["reward_missing"])
    writer.reward(None, state="missing")
    assert verdict(tape) == (None, "missing", ["reward_missing"])
    writer, _ = unrewarded(tape, "invalid")
    writer.reward(None, state="invalid")
    assert verdict(tape, "invalid") == (None, "invalid", ["reward_invalid"])


@pytest.mark.parametrize("scalar", [None, float("nan"), float("inf")])
def test_earned_without_a_finite_scalar_is_invalid(tape: Tape, scalar: float | None) -> None:
    writer, _ = unrewarded(tape)
    writer.reward(scalar)
    assert verdict(tape) == (None, "invalid", ["reward_invalid"])


def test_an_unknown_state_is_invalid(tape: Tape) -> None:
    writer, _ = unrewarded(tape)
    writer.reward(1.0, state="guessed")
    assert verdict(tape) == (None, "invalid", ["reward_invalid"])


def test_two_rewards_for_one_target_are_a_conflict_however_equal(tape: Tape) -> None:
    writer, _ = unrewarded(tape)
    ids = [writer.reward(1.0), writer.reward(1.0)]
    assert verdict(tape) == (None, "conflict", ["reward_conflict"])
    assert row(fold(tape.tables()), "t")["reward_event_ids"] == sorted(ids)


def test_superseding_settles_a_conflict_and_chains(tape: Tape) -> None:
    writer, _ = unrewarded(tape)
    first = writer.reward(1.0)
    second = writer.reward(0.5, supersedes=[[first]])
    assert verdict(tape) == (0.5, "earned", [])
    third = writer.reward(0.25, supersedes=[[second]])
    assert verdict(tape) == (0.25, "earned", [])
    assert row(fold(tape.tables()), "t")["reward_event_ids"] == [third]
    writer.reward(None, state="missing", supersedes=[[third]])
    assert verdict(tape) == (None, "missing", ["reward_missing"])


def test_a_reward_supersedes_neither_itself_nor_another_trajectorys(tape: Tape) -> None:
    one, _ = unrewarded(tape, "one")
    other, _ = unrewarded(tape, "other")
    others = other.reward(0.5)
    one.reward(1.0, event_id="mine", supersedes=[[others, "mine"]])
    assert verdict(tape, "one") == (1.0, "earned", [])
    assert verdict(tape, "other") == (0.5, "earned", [])


def test_a_reward_belongs_to_its_attempt(tape: Tape) -> None:
    old, _ = unrewarded(tape, attempt=0)
    new, _ = unrewarded(tape, attempt=1)
    old.reward(0.5)
    new.reward(1.0)
    folded = fold(tape.tables())
    assert [row(folded, "t", attempt)["reward"] for attempt in (0, 1)] == [0.5, 1.0]


def test_rewards_of_single_actions_lie_at_their_token(tape: Tape) -> None:
    writer, first = unrewarded(tape)
    last_token = writer.reward(0.5, target_event_id=first)
    first_token = writer.reward(0.25, target_event_id=first, target_token=0)
    found = row(fold(tape.tables()), "t")
    assert found["token_rewards"] == [
        {"segment_index": 0, "position": 0, "scalar": 0.25, "event_id": first_token},
        {"segment_index": 0, "position": 1, "scalar": 0.5, "event_id": last_token},
    ]
    assert (found["reward"], found["reward_state"]) == (None, "earned")
    assert found["untrainable_reasons"] == ["reward_missing"]  # nobody judged the attempt as a whole
    writer.reward(1.0)
    assert verdict(tape) == (1.0, "earned", [])


def test_a_reward_in_a_later_segment(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    writer.rewrite([1, 9])
    writer.observe([30])
    action = writer.act([21, 22])
    writer.end()
    writer.reward(1.0)
    writer.reward(0.5, target_event_id=action)
    [token_reward] = row(fold(tape.tables()), "t")["token_rewards"]
    assert (token_reward["segment_index"], token_reward["position"]) == (1, 2)


@pytest.mark.parametrize(("target", "token"), [("unknown", None), (None, 2), (None, -5)])
def test_a_target_that_does_not_exist_is_invalid(tape: Tape, target: str | None, token: int | None) -> None:
    writer, first = unrewarded(tape)
    writer.reward(1.0)
    writer.reward(0.5, target_event_id=target or first, target_token=token)
    assert verdict(tape) == (1.0, "invalid", ["reward_invalid"])


def test_two_rewards_for_one_token_are_a_conflict(tape: Tape) -> None:
    writer, first = unrewarded(tape)
    writer.reward(1.0)
    writer.reward(0.5, target_event_id=first)
    writer.reward(0.5, target_event_id=first, target_token=1)
    assert verdict(tape)[1:] == ("conflict", ["reward_conflict"])
    assert row(fold(tape.tables()), "t")["token_rewards"] == []


def test_masked_tokens_stay_in_the_context_and_leave_the_loss(tape: Tape) -> None:
    writer, first = unrewarded(tape)
    writer.reward()
    span = {"event_id": first, "start": 1, "length": 1}
    mask = writer.add("mask_assigned", indexed=False, ranges=[[span]], assigned_by="judge")
    folded = fold(tape.tables())
    [segment] = segments(folded, "t")
    assert segment["response_token_ids"] == [20, 21, 30, 22]
    assert segment["response_mask"] == [True, False, False, True]
    assert segment["rollout_log_probs"] == [-0.5, -0.5, None, -0.5]
    found = row(folded, "t")
    assert found["mask_event_ids"] == [mask]
    assert (found["num_action_tokens"], found["untrainable_reasons"]) == (3, [])


@pytest.mark.parametrize(
    ("start", "length", "kept"),
    [(0, 2, [22]), (None, None, [22]), (1, None, [20, 22]), (-3, 9, [22]), (2, 5, [20, 21, 22]), (0, 0, [20, 21, 22])],
)
def test_mask_ranges_are_cut_to_the_action(tape: Tape, start: int | None, length: int | None, kept: list[int]) -> None:
    writer, first = unrewarded(tape)
    writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": first, "start": start, "length": length}]])
    [segment] = segments(fold(tape.tables()), "t")
    pairs = zip(segment["response_token_ids"], segment["response_mask"], strict=True)
    assert [token for token, mask in pairs if mask] == kept


def test_a_mask_that_names_no_action_of_the_attempt_forbids_training(tape: Tape) -> None:
    writer, _ = unrewarded(tape)
    writer.reward()
    writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": "elsewhere", "start": 0, "length": 1}]])
    assert verdict(tape)[2] == ["mask_unresolved"]


def test_a_mask_follows_its_tokens_into_a_resumed_attempt(tape: Tape) -> None:
    old = AttemptWriter(tape, "t", 0)
    old.start([1])
    first = old.act([20, 21])
    mask = old.add("mask_assigned", indexed=False, ranges=[[{"event_id": first, "start": 0, "length": 1}]])
    new = AttemptWriter(tape, "t", 1)
    new.resume(0, 1, [1, 20, 21])
    new.act([22])
    new.end()
    new.reward()
    folded = fold(tape.tables())
    [segment] = segments(folded, "t", 1)
    assert segment["response_mask"] == [False, True, True]
    assert row(folded, "t", 1)["mask_event_ids"] == [mask]
    assert row(folded, "t", 1)["untrainable_reasons"] == []


def digests(tape: Tape) -> dict[str, dict[str, Any]]:
    table = content_digests_of(fold(tape.tables()))
    return {found["trajectory_id"]: found for found in table.to_pylist()}


def test_digests_ignore_ids_and_positions_and_name_the_tensor_that_differs(tape: Tape) -> None:
    whole(tape, "a")
    whole(tape, "b")
    whole(tape, "token", tokens=(5, 6, 8))
    whole(tape, "log_prob", log_probs=(-0.5, -0.5, np.nextafter(np.float32(-0.5), np.float32(0))))
    whole(tape, "version", version=1)
    writer = AttemptWriter(tape, "reward")
    writer.start()
    writer.act([5, 6, 7])
    writer.end()
    writer.reward(0.5)
    masked = AttemptWriter(tape, "mask")
    masked.start()
    action = masked.act([5, 6, 7])
    masked.end()
    masked.reward()
    masked.add("mask_assigned", indexed=False, ranges=[[{"event_id": action, "start": 0, "length": 1}]])
    found = digests(tape)
    columns = {
        "token": "token_ids",
        "log_prob": "log_probs",
        "version": "versions",
        "reward": "rewards",
        "mask": "masks",
    }
    assert {k: v for k, v in found["a"].items() if k != "trajectory_id"} == {
        k: v for k, v in found["b"].items() if k != "trajectory_id"
    }
    for name, column in columns.items():
        differing = {k for k in columns.values() if found[name][k] != found["a"][k]}
        assert differing == {column}, name
        assert found[name]["content"] != found["a"]["content"]


def test_digests_tell_a_null_log_prob_from_zero_and_from_nan(tape: Tape) -> None:
    whole(tape, "null", log_probs=(None, -0.5, -0.5))
    whole(tape, "zero", log_probs=(0.0, -0.5, -0.5))
    whole(tape, "minus zero", log_probs=(-0.0, -0.5, -0.5))
    whole(tape, "nan", log_probs=(float("nan"), -0.5, -0.5))
    found = digests(tape)
    assert len({row_["log_probs"] for row_ in found.values()}) == 4


def test_digests_tell_where_a_segment_begins(tape: Tape) -> None:
    for name, cut in (("one", 1), ("two", 2)):
        writer = AttemptWriter(tape, name)
        writer.start([1, 2, 3][:cut])
        writer.act([*[1, 2, 3][cut:], 4])
        writer.end()
    found = digests(tape)
    assert found["one"]["token_ids"] != found["two"]["token_ids"]


def test_digests_tell_two_segments_from_one_that_looks_like_their_frames(tape: Tape) -> None:
    two = AttemptWriter(tape, "two")
    two.start([1])
    two.act([4])
    two.rewrite([2])
    two.act([5])
    one = AttemptWriter(tape, "one")
    one.start([1])
    one.act([4, 1, 1, 2, 5])
    zeros = AttemptWriter(tape, "zeros")
    zeros.start([1])
    zeros.act([4, 1, 0, 2, 5])
    found = digests(tape)
    assert len({found[name]["token_ids"] for name in ("two", "one", "zeros")}) == 3


def test_digests_tell_an_unknown_context_from_an_empty_one(tape: Tape) -> None:
    for name, prompt in (("unknown", None), ("empty", [])):
        writer = AttemptWriter(tape, name)
        writer.start(prompt)
        writer.act([4])
    found = digests(tape)
    assert found["unknown"]["token_ids"] != found["empty"]["token_ids"]


def test_digests_of_one_attempt_do_not_depend_on_its_neighbours(tape: Tape) -> None:
    alone = Tape()
    whole(alone, "m", log_probs=(-1.0, None, -0.25))
    for name in ("a", "m", "z"):
        whole(tape, name, log_probs=(-1.0, None, -0.25) if name == "m" else None)
    assert digests(tape)["m"] == digests(alone)["m"]


def test_segment_digests_of_sliced_segments_and_given_rewards(tape: Tape) -> None:
    whole(tape, "a")
    whole(tape, "b", tokens=(8, 9))
    table = fold(tape.tables())
    expected = content_digests_of(table).to_pylist()[1]
    [found] = segment_digests(table.segments.slice(1), [1.0])
    assert found.content == expected["content"]
    assert segment_digests(table.segments.slice(0, 0), []) == []
    with pytest.raises(ValueError, match=r"zip\(\)"):
        segment_digests(table.segments, [1.0])


def test_attempts_without_segments_have_no_digest(tape: Tape) -> None:
    AttemptWriter(tape, "t").dead_letter(0)
    folded = fold(tape.tables())
    assert folded.trajectories.schema == TRAJECTORY_SCHEMA
    assert content_digests_of(folded).num_rows == 0
