"""Teachers' scores in a batch: the routed teacher's, of these ids, under this context, or none (§4.7 to §4.9)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.attempts import SAMPLING, AttemptWriter
from tests.conftest import Tape
from tests.scored import TOKENIZER, faithful, problem, route, score, start_run

from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold, fold
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch, TeacherScores
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.distill import opd_gap
from rolltape.trainers.members import MemberPacker, pack_members
from rolltape.trainers.pinned import member_columns
from rolltape.trainers.score_book import ScoreBook

MOPD = BatchRules.of(TrainerConfig(algorithm="mopd"))
TOP_2 = BatchRules.of(TrainerConfig(algorithm="mopd", opd_form="top_k", top_k=2))
VERSIONS = VersionRules(current=0, newest=0)


def one_turn(
    tape: Tape, name: str, *, tokens: tuple[int, ...] = (5, 6, 7), domain: str = "math", **action: Any
) -> None:
    writer = AttemptWriter(tape, name, problem_id=f"problem-{domain}", group_id=f"group-{name}")
    writer.start([1, 2])
    writer.act(tokens, **action)
    writer.end()
    writer.reward()


def two_turns(tape: Tape, name: str, domain: str = "math") -> None:
    """Action, observation, action."""
    writer = AttemptWriter(tape, name, problem_id=f"problem-{domain}", group_id=f"group-{name}")
    writer.start([1, 2])
    writer.act([20, 21])
    writer.observe([30, 31])
    writer.act([22])
    writer.end()
    writer.reward()


@pytest.fixture
def tape(tape: Tape) -> Tape:
    start_run(tape)
    for domain in ("math", "code"):
        problem(tape, f"problem-{domain}", domain)
        route(tape, domain, f"teacher-{domain}")
    return tape


def planned(tape: Tape, rules: BatchRules = MOPD) -> tuple[Fold, BatchPlan, ScoreBook]:
    tables = tape.tables()
    folded, book = fold(tables), ScoreBook.of(tables, tables["run_started"], rules)
    return folded, plan_batch(folded, VERSIONS, rules, book), book


def packed(tape: Tape, rules: BatchRules = MOPD) -> tuple[PackedBatch, TeacherScores]:
    folded, plan, book = planned(tape, rules)
    batch = pack_members(folded, plan.members, rules, book)
    assert batch.teacher is not None
    return batch, batch.teacher


def refused(tape: Tape, rules: BatchRules = MOPD) -> dict[str, str]:
    _, plan, _ = planned(tape, rules)
    return {item.trajectory_id: item.reason for item in plan.dropped}


def test_scores_lie_at_their_own_tokens_and_nowhere_else(tape: Tape) -> None:
    two_turns(tape, "a")
    one_turn(tape, "b", domain="code")
    score(tape, "a", "teacher-math")
    score(tape, "b", "teacher-code")
    batch, teacher = packed(tape)
    expected = [math.nan] * 2 + faithful([20, 21, 30, 31, 22]) + [math.nan] * 2 + faithful([5, 6, 7])
    assert torch.equal(torch.nan_to_num(teacher.log_probs, nan=9.0), torch.nan_to_num(torch.tensor(expected), nan=9.0))
    assert teacher.teacher_ids == ("teacher-math", "teacher-code")
    assert batch.domains == ("math", "code")
    assert teacher.top_k_ids is None
    assert batch.num_bytes == sum(t.nbytes for t in _tensors(batch)) + teacher.log_probs.nbytes


def _tensors(batch: PackedBatch) -> list[torch.Tensor]:
    names = [name for name in batch.__slots__ if isinstance(getattr(batch, name), torch.Tensor)]
    rewards = batch.token_rewards
    return [*(getattr(batch, name) for name in names), rewards.amounts, rewards.rows, rewards.positions]


def test_a_null_or_infinite_score_stays_what_it_is(tape: Tape) -> None:
    """A teacher's -inf or null leaves that token untrusted; nothing is put in its place."""
    one_turn(tape, "a")
    score(tape, "a", "teacher-math", log_probs=[-0.5, None, float("-inf")])
    _, teacher = packed(tape)
    assert teacher.log_probs[2] == -0.5
    assert torch.isnan(teacher.log_probs[3])
    assert torch.isneginf(teacher.log_probs[4])


def test_what_a_teachers_engine_writes_for_no_log_prob_is_none(tape: Tape) -> None:
    """Case D9 on the teacher's side: the stand-ins that a run names are none of a teacher's log-probs either."""
    one_turn(tape, "a")
    score(tape, "a", "teacher-math", log_probs=[-0.5, -100.0, -9999.0])
    _, teacher = packed(tape)
    assert teacher.log_probs[2:].tolist() == [-0.5, -100.0, -9999.0]
    _, teacher = packed(tape, BatchRules.of(TrainerConfig(algorithm="mopd", sentinels=(-100.0,))))
    gap = opd_gap(teacher.log_probs[2:], torch.zeros(3), max_gap=5.0)
    assert gap.nonfinite.tolist() == [False, True, True]


def test_the_first_in_the_log_counts_whatever_order_the_rows_are_read_in(tape: Tape) -> None:
    one_turn(tape, "a")
    first = score(tape, "a", "teacher-math", log_probs=[-1.0, -2.0, -3.0])
    score(tape, "a", "teacher-math", log_probs=[-4.0, -5.0, -6.0])
    tape.batches["teacher_scored"].reverse()
    folded, plan, book = planned(tape)
    structs, _ = member_columns(folded, plan.members, MOPD, book)
    assert structs.field("teacher_event_ids").to_pylist() == [[first]]
    _, teacher = packed(tape)
    assert teacher.log_probs[2:].tolist() == [-1.0, -2.0, -3.0]


def test_rows_are_scored_by_their_own_domains_teachers(tape: Tape) -> None:
    """The oracle of §4.9, from the tape to the gap."""
    one_turn(tape, "a")
    one_turn(tape, "b", tokens=(5,), domain="code")
    score(tape, "a", "teacher-math", log_probs=[-0.1, -1.4, -1.0])
    score(tape, "b", "teacher-code", log_probs=[-0.4])
    batch, teacher = packed(tape)
    student = torch.tensor([-0.2, -0.9, -1.5, -0.7])
    gap = opd_gap(teacher.log_probs[batch.action_mask], student).advantage
    assert gap.tolist() == pytest.approx([0.1, -0.5, 0.5, 0.3], abs=1e-6)


def test_a_domain_is_matched_exactly_or_held(tape: Tape) -> None:
    for name, domain in (("a", "Math"), ("b", "math "), ("c", "mathematics")):
        problem(tape, f"problem-{domain}", domain)
        one_turn(tape, name, domain=domain)
        score(tape, name, "teacher-math")
    _, plan, _ = planned(tape)
    assert {d.trajectory_id: d.reason for d in plan.dropped} == dict.fromkeys("abc", "unknown_domain")
    assert plan.awaiting == {(name, 0) for name in "abc"}


def test_a_misrouted_score_is_refused_and_never_stands_in(tape: Tape) -> None:
    """§4.9: row 2 (code) scored by the math teacher alone would give a wrong gap; it is not trained."""
    one_turn(tape, "a", domain="code")
    one_turn(tape, "b", domain="code")
    score(tape, "a", "teacher-math")
    score(tape, "b", "teacher-math", log_probs=[-3.0] * 3)
    score(tape, "b", "teacher-code", log_probs=[-0.4] * 3)
    assert refused(tape) == {"a": "teacher_misrouted"}
    _, teacher = packed(tape)
    assert torch.equal(teacher.log_probs[2:], torch.full((3,), -0.4))


def test_other_weights_under_the_same_name_are_another_teacher(tape: Tape) -> None:
    one_turn(tape, "a")
    score(tape, "a", "teacher-math", weights_digest="weights-of-another-version")
    assert refused(tape) == {"a": "teacher_misrouted"}


def test_two_teachers_for_one_domain_are_refused(tape: Tape) -> None:
    route(tape, "math", "teacher-math")
    planned(tape)
    route(tape, "math", "teacher-code")
    with pytest.raises(UntrainableError, match=r"teacher_misrouted.*'math'.*teacher-math.*teacher-code"):
        planned(tape)


def test_an_unknown_domain_has_no_teacher(tape: Tape) -> None:
    """§5: unknown domain, refuse sample. A domain of the tape without a route may get one; a null one never does."""
    problem(tape, "problem-law", "law")
    problem(tape, "problem-none", None)
    one_turn(tape, "law", domain="law")
    one_turn(tape, "none", domain="none")
    one_turn(tape, "math")
    score(tape, "math", "teacher-math")
    _, plan, _ = planned(tape)
    assert {d.trajectory_id: d.reason for d in plan.dropped} == {"law": "unknown_domain", "none": "unknown_domain"}
    assert plan.awaiting == {("law", 0)}
    route(tape, "law", "teacher-law")
    score(tape, "law", "teacher-law")
    assert refused(tape) == {"none": "unknown_domain"}


def test_a_rollout_waits_for_every_segment_and_an_unusable_one_for_none(tape: Tape) -> None:
    writer = AttemptWriter(tape, "a", problem_id="problem-math")
    writer.start([1])
    writer.act([20])
    writer.rewrite([1, 9])
    writer.act([21, 22])
    writer.end()
    writer.reward()
    failed = AttemptWriter(tape, "f", problem_id="problem-math")
    failed.start([1])
    failed.act([20])
    failed.end("env_failed")
    failed.reward()
    empty = AttemptWriter(tape, "z", problem_id="problem-math")
    empty.start([1])
    empty.act([])
    empty.end()
    empty.reward()
    score(tape, "a", "teacher-math", segment=1)
    _, plan, _ = planned(tape)
    assert plan.awaiting == {("a", 0)}
    assert {d.trajectory_id: d.reason for d in plan.dropped} == {"a": "teacher_score_missing", "f": "env_failed"}
    score(tape, "a", "teacher-math")
    batch, teacher = packed(tape)
    assert torch.equal(teacher.log_probs[batch.action_mask], torch.tensor(faithful([20, 21, 22])))
    assert teacher.teacher_ids == ("teacher-math", None), "nobody scores an empty response"


def test_distillation_needs_no_reward_unless_a_task_is_mixed_in(tape: Tape) -> None:
    writer = AttemptWriter(tape, "a", problem_id="problem-math")
    writer.start([1])
    writer.act([20])
    writer.end()
    writer.reward(None, "missing")
    score(tape, "a", "teacher-math")
    batch, _ = packed(tape)
    assert torch.isnan(batch.rewards).tolist() == [True]
    mixed = BatchRules.of(TrainerConfig(algorithm="mopd", task_coef=0.5))
    with pytest.raises(UntrainableError, match="group_of_one"):
        planned(tape, mixed)
    assert mixed.needs_reward
    assert not mixed.drops_zero_std


def test_full_distributions_are_scored_on_demand_so_only_the_route_is_read(tape: Tape) -> None:
    full = BatchRules.of(TrainerConfig(algorithm="mopd", opd_form="full"))
    one_turn(tape, "a", domain="code")
    _, teacher = packed(tape, full)
    assert teacher.teacher_ids == ("teacher-code",)
    assert torch.isnan(teacher.log_probs).all()
    folded, plan, book = planned(tape, full)
    structs, _ = member_columns(folded, plan.members, full, book)
    assert structs.field("teacher_event_ids").to_pylist() == [None]


def top_k(ids: list[list[int]], log_probs: list[list[float]]) -> dict[str, Any]:
    return {
        "top_k": len(ids[0]),
        "top_k_token_ids": [[token for row in ids for token in row]],
        "top_k_log_probs": [[value for row in log_probs for value in row]],
    }


def test_top_k_payloads_are_cut_to_what_the_algorithm_asks_for(tape: Tape) -> None:
    one_turn(tape, "a", tokens=(5, 6))
    score(tape, "a", "teacher-math", **top_k([[5, 8, 9], [7, 6, 5]], [[-0.1, -2.0, -3.0], [-0.5, -1.0, -2.5]]))
    _, teacher = packed(tape, TOP_2)
    assert teacher.top_k_ids is not None
    assert teacher.top_k_log_probs is not None
    assert teacher.top_k_ids.tolist() == [[-1, -1], [-1, -1], [5, 8], [7, 6]]
    assert torch.isnan(teacher.top_k_log_probs[:2]).all()
    assert torch.equal(teacher.top_k_log_probs[2:], torch.tensor([[-0.1, -2.0], [-0.5, -1.0]]))
    assert teacher.top_k_ids.dtype == torch.int64


@pytest.mark.parametrize(
    "payload",
    [
        {},
        top_k([[5], [6], [7]], [[-0.1], [-0.1], [-0.1]]),
        {**top_k([[5, 8]] * 3, [[-0.1, -2.0]] * 3), "top_k_log_probs": [[-0.1, -2.0]]},
    ],
)
def test_a_score_without_enough_likeliest_tokens_is_refused(tape: Tape, payload: dict[str, Any]) -> None:
    one_turn(tape, "a")
    score(tape, "a", "teacher-math", **payload)
    assert refused(tape, TOP_2) == {"a": "teacher_top_k_missing"}


def test_case_d25_a_teacher_of_another_tokenizer_is_refused_by_hash(tape: Tape) -> None:
    """A padded vocabulary is not another tokenizer: the digest is over the ids of a probe text, not over a width."""
    one_turn(tape, "other")
    one_turn(tape, "unknown")
    one_turn(tape, "same")
    score(tape, "other", "teacher-math", tokenizer_digest="tokenizer-of-another-model")
    score(tape, "unknown", "teacher-math", tokenizer_digest=None)
    score(tape, "same", "teacher-math", tokenizer_digest=TOKENIZER)
    assert refused(tape) == dict.fromkeys(("other", "unknown"), "teacher_tokenizer_differs")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"template_digest": "template-b"}, "teacher_template_differs"),
        ({"template_digest": None}, "teacher_template_differs"),
        ({"temperature": 0.0}, "teacher_temperature_differs"),
        ({"temperature": None}, "teacher_temperature_differs"),
        ({"logprobs_mode": "raw_logprobs"}, "teacher_mode_differs"),
        ({"logprobs_mode": None}, "teacher_mode_differs"),
        ({"prefix_digest": "sha256:00"}, "teacher_prefix_differs"),
        ({"scored_token_ids": [[5, 6, 8]]}, "teacher_ids_differ"),
        ({"start_position": 3}, "teacher_ids_differ"),
        ({"start_position": None}, "teacher_ids_differ"),
    ],
)
def test_case_d26_a_score_made_otherwise_is_refused_and_never_mixed(
    tape: Tape, fields: dict[str, Any], reason: str
) -> None:
    one_turn(tape, "odd")
    one_turn(tape, "even")
    score(tape, "odd", "teacher-math", **fields)
    score(tape, "even", "teacher-math")
    folded, plan, book = planned(tape)
    assert {d.trajectory_id: d.reason for d in plan.dropped} == {"odd": reason}
    assert [m.trajectory_id for m in plan.members] == ["even"]
    odd = plan.members[0]._replace(trajectory_id="odd")
    with pytest.raises(UntrainableError, match=rf"{reason}.*odd"):
        pack_members(folded, [odd], MOPD, book)


def test_case_d26_a_list_one_longer_is_aligned_by_absolute_position(tape: Tape) -> None:
    """None first, as the score begins at the last context token; the response's tokens keep their own log-probs."""
    one_turn(tape, "a", tokens=(5, 6, 7))
    score(
        tape,
        "a",
        "teacher-math",
        start_position=1,
        scored_token_ids=[[2, 5, 6, 7]],
        log_probs=[None, -0.5, -0.25, -0.125],
    )
    batch, teacher = packed(tape)
    assert teacher.log_probs[batch.action_mask].tolist() == [-0.5, -0.25, -0.125]


def test_case_d26_tokens_without_a_score_are_null_and_a_list_of_another_length_is_refused(tape: Tape) -> None:
    one_turn(tape, "short", tokens=(5, 6, 7))
    one_turn(tape, "long", tokens=(5, 6, 7))
    score(tape, "short", "teacher-math", scored_token_ids=[[5, 6]], log_probs=[-0.5, -0.25])
    score(tape, "long", "teacher-math", log_probs=[None, -0.5, -0.25, -0.125])
    assert refused(tape) == {"long": "teacher_ids_differ"}
    batch, teacher = packed(tape)
    assert teacher.log_probs[batch.action_mask][:2].tolist() == [-0.5, -0.25]
    assert torch.isnan(teacher.log_probs[batch.action_mask][2])


def test_a_rollout_at_another_temperature_needs_a_score_at_it(tape: Tape) -> None:
    one_turn(tape, "a", sampling=[{**SAMPLING, "temperature": 0.6}])
    score(tape, "a", "teacher-math", temperature=0.6)
    assert refused(tape) == {}


def test_a_batch_in_parts_is_the_batch_in_one(tape: Tape) -> None:
    for name in ("a", "b", "c"):
        two_turns(tape, name)
        score(tape, name, "teacher-math", **top_k([[5, 8]] * 5, [[-0.1, -2.0]] * 5))
    folded, plan, book = planned(tape, TOP_2)
    packer = MemberPacker(TOP_2, book)
    for member in plan.members:
        packer.add(folded, [member])
    parts, whole = packer.finish().teacher, pack_members(folded, plan.members, TOP_2, book).teacher
    assert parts is not None
    assert whole is not None
    for name in ("log_probs", "top_k_ids", "top_k_log_probs"):
        assert torch.equal(torch.nan_to_num(getattr(parts, name)), torch.nan_to_num(getattr(whole, name))), name
