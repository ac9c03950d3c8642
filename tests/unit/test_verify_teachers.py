"""Verification of teacher scores: silent on sound ones, and it names each planted fault and where it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rolltape.schema.digest import prefix_digest
from rolltape.store.sources import TableSource
from rolltape.store.verify import CHECKS
from rolltape.store.verify_context import Context
from rolltape.store.verify_report import CheckResult

CHECKED = ("teachers", "scored_tokens", "scored_as_sampled", "teacher_routes", "teacher_top_k")
PROMPT, TOKENS = [1, 2], [5, 6, 7]
QUARTER, HALF, EIGHTH = math.log(0.25), math.log(0.5), math.log(0.125)
WHO: dict[str, Any] = {"teacher_id": "up", "weights_digest": "w-up"}
TOP_K: dict[str, Any] = {
    "top_k": 2,
    "log_probs": [[HALF, EIGHTH, QUARTER]],
    "top_k_token_ids": [[5, 3, 1, 4, 2, 7]],
    "top_k_log_probs": [[HALF, QUARTER, HALF, QUARTER, QUARTER, QUARTER]],
    "tail_mass": [[0.25, 0.25, 0.5]],
}


def run_check(tape: Any, name: str) -> CheckResult:
    context = Context(TableSource(tape.tables()))
    return next(c for c in CHECKS if c.name == name).result(context)


def broken(tape: Any) -> dict[str, list[str]]:
    """Messages of the checks that broke."""
    results = [run_check(tape, name) for name in CHECKED]
    return {result.check: [finding.message for finding in result.findings] for result in results if not result.ok}


@pytest.fixture
def scored(tape: Any) -> Any:
    """A run with a rollout and its route; ``score`` adds what a teacher says of it."""
    tape.add("run_started", purpose="train", tokenizer=[{"behaviour_digest": "ids"}], chat_template_digest="chat")
    tape.add("problem_registered", problem_id="problem-g0", domain="up")
    tape.add("teacher_routed", domain="up", tokenizer_digest="ids", student_tokenizer_digest="ids", **WHO)
    tape.rollout("t")
    return tape


def score(tape: Any, **changes: Any) -> str:
    sound = {
        "trajectory_id": "t", "attempt": 0, "segment_index": 0, "group_id": "g0", "problem_id": "problem-g0", **WHO,
        "logprobs_mode": "processed_logprobs", "temperature": 1.0, "template_digest": "chat", "tokenizer_digest": "ids",
        "prefix_digest": prefix_digest(PROMPT), "start_position": len(PROMPT), "scored_token_ids": [TOKENS],
        "log_probs": [[-0.5, -0.25, -1.0]],
    }  # fmt: skip
    (event_id,) = tape.add("teacher_scored", **{**sound, **changes})
    return str(event_id)


def test_sound_scores(scored: Any) -> None:
    score(scored)
    assert broken(scored) == {}
    assert [run_check(scored, name).num_checked for name in CHECKED] == [1, 1, 1, 1, 0]


def test_sound_top_k_payload(scored: Any) -> None:
    score(scored, **TOP_K)
    assert broken(scored) == {}
    assert run_check(scored, "teacher_top_k").num_checked == 3


def test_a_part_of_a_segment_may_be_scored(scored: Any) -> None:
    score(
        scored,
        scored_token_ids=[[6, 7]],
        log_probs=[[-1, -1]],
        start_position=3,
        prefix_digest=prefix_digest([1, 2, 5]),
    )
    assert broken(scored) == {}


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([5, 9, 7], "got 9 for 6 at position 3"),
        ([5, 6, 7, 8], "got 8 for none at position 5"),
        ([2, 5, 6], "got 2 for 5 at position 2"),
    ],
)
def test_other_ids_than_the_sampled_ones(scored: Any, ids: list[int], said: str) -> None:
    """The last: a list that is one longer at the front, so that every score belongs to the id before."""
    event_id = score(scored, scored_token_ids=[ids], log_probs=[[-1.0] * len(ids)])
    found = broken(scored)
    assert list(found) == ["scored_tokens"]
    assert said in found["scored_tokens"][0]
    assert run_check(scored, "scored_tokens").findings[0].event_id == event_id


def test_another_context(scored: Any) -> None:
    score(scored, prefix_digest=prefix_digest([1, 3]))
    assert list(broken(scored)) == ["scored_tokens"]


def test_a_score_of_nothing_on_the_tape(scored: Any) -> None:
    score(scored, segment_index=1)
    assert "the tape does not have it" in broken(scored)["scored_tokens"][0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.0}, "at 0.0 under chat"),
        ({"temperature": 0.7}, "at 0.7 under chat"),
        ({"logprobs_mode": "raw_logprobs"}, "got raw_logprobs"),
        ({"template_digest": "think"}, "under think"),
    ],
)
def test_scored_otherwise_than_sampled(scored: Any, changes: dict[str, Any], said: str) -> None:
    score(scored, **changes)
    found = broken(scored)
    assert list(found) == ["scored_as_sampled"]
    assert said in found["scored_as_sampled"][0]


def test_two_ways_of_scoring_in_one_run(scored: Any) -> None:
    scored.rollout("u", member=1)
    score(scored)
    score(scored, trajectory_id="u", template_digest="think")
    assert set(broken(scored)) == {"teachers", "scored_as_sampled"}


def test_another_teacher_than_the_domains(scored: Any) -> None:
    score(scored, teacher_id="down", weights_digest="w-down")
    assert "expected teacher up (w-up) of domain 'up', got down (w-down)" in broken(scored)["teacher_routes"][0]


def test_other_weights_under_the_same_name(scored: Any) -> None:
    score(scored, weights_digest="w-other")
    assert list(broken(scored)) == ["teacher_routes"]


def test_a_domain_without_a_route(scored: Any) -> None:
    scored.add("problem_registered", problem_id="problem-g1", domain="law")
    scored.rollout("u", group_id="g1")
    score(scored, trajectory_id="u", problem_id="problem-g1")
    assert "of domain 'law'" in broken(scored)["teacher_routes"][0]


def test_scored_twice(scored: Any) -> None:
    score(scored)
    score(scored)
    assert "expected one score by teacher up, got 2" in broken(scored)["teacher_routes"][0]


@pytest.mark.parametrize("other", [{"weights_digest": "w-other"}, {"teacher_id": "down"}])
def test_two_teachers_for_one_domain(scored: Any, other: dict[str, str]) -> None:
    scored.add(
        "teacher_routed", domain="up", tokenizer_digest="ids", student_tokenizer_digest="ids", **{**WHO, **other}
    )
    assert "expected one teacher" in broken(scored)["teacher_routes"][0]


def test_a_teacher_of_other_ids(scored: Any) -> None:
    scored.add("teacher_routed", domain="down", tokenizer_digest="x", student_tokenizer_digest="ids", **WHO)
    assert "with tokenizer ['x'] for ['ids']" in broken(scored)["teacher_routes"][0]


def test_scores_of_a_run_without_routes_are_counted(tape: Any) -> None:
    tape.add("run_started", purpose="import", tokenizer=[{"behaviour_digest": "ids"}], chat_template_digest="chat")
    tape.rollout("t")
    score(tape)
    result = run_check(tape, "teacher_routes")
    assert (result.num_broken, result.counts) == (0, {"unrouted": 1})


@pytest.mark.parametrize(
    ("name", "value", "said", "index"),
    [
        ("top_k_token_ids", [3, 5, 1, 4, 2, 7], "own log-prob", 0),
        ("top_k_token_ids", [5, 3, 1, 4, 7, 2], "ties by rising id", 2),
        ("top_k_log_probs", [HALF, QUARTER, QUARTER, HALF, QUARTER, QUARTER], "fall", 1),
        ("tail_mass", [0.25, 0.3, 0.5], "a tail of 1", 1),
        ("log_probs", [HALF, QUARTER + 0.1, QUARTER], "own log-prob", 1),
        ("log_probs", [QUARTER, EIGHTH, QUARTER], "own log-prob", 0),
    ],
)
def test_top_k_payloads_that_are_not_sound(scored: Any, name: str, value: list[float], said: str, index: int) -> None:
    score(scored, **{**TOP_K, name: [value]})
    (message,) = broken(scored)["teacher_top_k"]
    assert said in message
    assert run_check(scored, "teacher_top_k").findings[0].index == index


def test_a_control_may_carry_what_was_said_of_other_tokens(scored: Any) -> None:
    scored.add("problem_registered", problem_id="problem-g1", domain="c")
    who = {"teacher_id": "up-shuffled", "weights_digest": "w-up"}
    scored.add("teacher_routed", domain="c", tokenizer_digest="ids", student_tokenizer_digest="ids", **who)
    scored.rollout("u", group_id="g1")
    moved = {**TOP_K, "log_probs": [[QUARTER, HALF, EIGHTH]]}
    score(scored, trajectory_id="u", group_id="g1", problem_id="problem-g1", **{**moved, **who})
    assert broken(scored) == {}
