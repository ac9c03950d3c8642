"""Faults that others met (cases D5 to D9, D12 to D16), from events to one optimizer step.

D25 and D26 are in ``test_teacher_scores.py``, D28 in ``test_segments.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attempts import SAMPLING, AttemptWriter
from tests.conftest import Tape

from rolltape.numerics.models import build_model
from rolltape.numerics.packed import micro_batches
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold, content_digests_of, fold
from rolltape.store.lake import Lake
from rolltape.trainers.advantages import group_advantages
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.members import pack_members
from rolltape.trainers.probe import probe
from rolltape.trainers.step import StepOutcome, train_step

VERSIONS = VersionRules(current=0, newest=0)
SINGLE = BatchRules(uses_groups=False)


class Group:
    """Writes rollouts of one action, each a member of a group."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.count = 0

    def add(
        self,
        group: str,
        size: int,
        *,
        tokens: tuple[int, ...] = (5, 6),
        reward: float | None = 1.0,
        status: str = "completed",
        cause: str | None = None,
        state: str = "earned",
        **action: Any,
    ) -> str:
        name = f"t{self.count}"
        self.count += 1
        writer = AttemptWriter(self.tape, name, group_id=group, problem_id=group)
        writer.add(
            "rollout_dispatched",
            indexed=False,
            purpose="train",
            group_ordinal=ord(group),
            member=self.count,
            group_size=size,
            worker_id="w",
        )
        writer.start([1, 2, 3])
        writer.act(tokens, **action)
        writer.end(status, cause=cause)
        if state != "nobody judged it":
            writer.reward(reward, state)
        return name


@pytest.fixture
def group(tape: Tape) -> Group:
    return Group(tape)


def planned(tape: Tape, rules: BatchRules = SINGLE) -> tuple[Fold, BatchPlan]:
    folded = fold(tape.tables())
    return folded, plan_batch(folded, VERSIONS, rules)


def packed(tape: Tape, rules: BatchRules = SINGLE) -> PackedBatch:
    folded, plan = planned(tape, rules)
    return pack_members(folded, plan.members, rules)


def dropped(tape: Tape, rules: BatchRules = SINGLE) -> dict[str, str]:
    return {item.trajectory_id: item.reason for item in planned(tape, rules)[1].dropped}


def step(batch: PackedBatch, **options: Any) -> tuple[StepOutcome, torch.nn.Module]:
    config = TrainerConfig(**options)
    model = build_model("char-64x2", 0)
    outcome = train_step(Learner(model, make_optimizer(model, config)), batch, config, step=1, temperature=1.0)
    return outcome, model


@pytest.mark.parametrize("tokens", [(5, 6), (5,)])
def test_case_d5_as_many_targets_are_trained_as_tokens_were_generated(
    tape: Tape, group: Group, tokens: tuple[int, ...]
) -> None:
    """Masks are aligned to targets: the first response token is one, scored in the state before it."""
    group.add("g", 1, tokens=tokens)
    batch = packed(tape)
    assert batch.action_mask.tolist() == [False] * 3 + [True] * len(tokens)
    [part] = micro_batches(batch.token_ids, batch.cu_seqlens, token_budget=64, scored=batch.action_mask)
    assert part.targets.tolist() == list(tokens)
    assert part.source.tolist() == list(range(2, 2 + len(tokens))), "the state before each"
    input_mask = torch.zeros(part.input_ids.numel(), dtype=torch.bool)
    input_mask[part.source] = True  # as others mask: the positions that predict
    back = torch.cat([torch.tensor([False]), input_mask])
    assert torch.equal(back, batch.action_mask)


def test_case_d6_log_probs_of_another_distribution_are_refused_never_rescaled(tape: Tape, group: Group) -> None:
    cool = {**SAMPLING, "temperature": 0.6}
    raw = group.add("a", 1, sampling=[{**cool, "logprobs_mode": "raw_logprobs"}], log_probs=[-0.5, -0.7])
    processed = group.add("b", 1, sampling=[cool], log_probs=[-0.1, -0.2])
    unknown = group.add("c", 1, sampling=[{**cool, "logprobs_mode": None}])
    assert dropped(tape) == {raw: "unscaled_log_probs", unknown: "unknown_logprobs_mode"}
    batch = packed(tape)
    assert batch.num_members == 1
    assert torch.equal(batch.rollout_log_probs[batch.action_mask], torch.tensor([-0.1, -0.2])), processed


def test_case_d6_a_batch_that_mixes_modes_is_refused(tape: Tape, group: Group) -> None:
    group.add("a", 1, sampling=[{**SAMPLING, "logprobs_mode": "raw_logprobs"}])
    group.add("b", 1)
    with pytest.raises(UntrainableError, match=r"mixed_logprobs_mode.*processed_logprobs.*raw_logprobs"):
        packed(tape)


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}])
def test_case_d7_a_ratio_over_an_unknown_support_is_refused(tape: Tape, group: Group, cut: dict[str, float]) -> None:
    """Processed log-probs are over what was kept; without the kept ids the ratio carries the kept mass."""
    count = 1000
    name = group.add(
        "a", 1, tokens=(5,) * count, log_probs=[-1.0 - math.log(0.895)] * count, sampling=[{**SAMPLING, **cut}]
    )
    assert dropped(tape) == {name: "unknown_support"}


def test_case_d7_a_support_that_cannot_be_replayed_is_refused_where_a_ratio_is_asked_and_only_there(
    tape: Tape, group: Group
) -> None:
    """Its log-probs are over what was kept, the trainer's over all: the ratio would carry the kept mass."""
    kept: dict[str, Any] = {"support_token_ids": [[5, 6, 7, 6]], "support_offsets": [[0, 4]]}
    name = group.add("a", 1, sampling=[{**SAMPLING, "top_p": 0.8}], **kept)
    raw = group.add("b", 1, sampling=[{**SAMPLING, "top_p": 0.8, "logprobs_mode": "raw_logprobs"}])
    assert dropped(tape) == {name: "limited_support"}, raw
    divergence = BatchRules.of(TrainerConfig(algorithm="mopd", opd_form="full"))
    assert not divergence.needs_ratio
    assert dropped(tape, BatchRules(uses_groups=False, needs_ratio=False)) == {}


def test_case_d8_a_null_or_nan_log_prob_costs_that_token_and_nothing_else(tape: Tape, group: Group) -> None:
    group.add("g", 2, tokens=(5, 6, 7, 8), log_probs=[-0.1, None, math.nan, -0.2])
    group.add("g", 2, tokens=(5, 6, 7, 8), reward=0.0)
    batch = packed(tape, BatchRules())
    values = batch.rollout_log_probs[batch.action_mask][:4]
    assert torch.isnan(values).tolist() == [False, True, True, False], "neither is 0.0"
    outcome, model = step(batch, icepop_beta=1e6)
    assert outcome.trusted[batch.action_mask].tolist() == [True, False, False, True] + [True] * 4
    assert math.isfinite(outcome.loss)
    assert math.isfinite(outcome.grad_norm)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize(("sentinels", "bad"), [((), 2), ((-100.0,), 3)])
def test_case_d9_sentinels_are_recognised_and_not_averaged(
    tape: Tape, group: Group, sentinels: tuple[float, ...], bad: int
) -> None:
    """vLLM writes -9999, OpenAI -100; -100 could be a log-prob, so a run has to say that it is none."""
    values = [-math.inf, -9999.0, -100.0, -1e-7]
    group.add("g", 2, tokens=(5, 6, 7, 8), log_probs=values)
    group.add("g", 2, tokens=(5, 6, 7, 8), reward=0.0)
    config = TrainerConfig(sentinels=sentinels)
    batch = packed(tape, BatchRules.of(config))
    outcome, _ = step(batch, sentinels=sentinels, correction="tis", tis_high=1e30)
    assert outcome.trusted[batch.action_mask].tolist() == [False] * bad + [True] * (8 - bad)
    assert math.isfinite(outcome.loss)
    probed = probe(batch, outcome, beta=2.0)
    assert probed.num_tokens == 8 - bad
    assert probed.max_abs_delta is not None
    assert probed.max_abs_delta < 101.0, "-9999 is no distance between two engines"


def test_case_d12_statistics_are_by_group_whatever_members_are_lost(tape: Tape, group: Group) -> None:
    rewards = {"a": (1, 0, 0, 1), "b": (1, 1, 0), "c": (0, 0, 0, 1)}
    for name, given in rewards.items():
        for reward in given:
            group.add(name, 4, reward=float(reward))
    padded = packed(tape, BatchRules())
    assert padded.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert padded.rewards.tolist() == [1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1]
    assert padded.is_padding.tolist() == [False] * 7 + [True] + [False] * 4
    means = group_advantages(padded.rewards, padded.groups, norm="mean")
    assert means.tolist() == [0.5, -0.5, -0.5, 0.5, 0.25, 0.25, -0.75, 0.25, -0.25, -0.25, -0.25, 0.75]
    valid = group_advantages(padded.rewards, padded.groups, norm="mean", counted=~padded.is_padding)
    assert valid[4:7].tolist() == pytest.approx([1 / 3, 1 / 3, -2 / 3]), "n = 3 is the other option (D10)"


def test_case_d12_a_group_that_lost_half_is_dropped_alone(tape: Tape, group: Group) -> None:
    for reward in (1.0, 0.0):
        group.add("a", 4, reward=reward)
    kept = [group.add("b", 2, reward=reward) for reward in (1.0, 0.0)]
    assert set(dropped(tape, BatchRules()).values()) == {"group_incomplete"}
    assert [m.trajectory_id for m in planned(tape, BatchRules())[1].members] == kept
    ge_half = packed(tape, BatchRules(pad_rule="ge_half"))
    assert ge_half.groups.tolist() == [0] * 4 + [1] * 2


ALL_EQUAL = {"a": (0.0, 0.0, 0.0, 0.0), "b": (1.0, 1.0, 1.0, 1.0), "c": (0.1 + 0.2, 0.3, 0.3, 0.3)}


def test_case_d13_a_group_without_spread_has_advantages_of_exactly_zero(tape: Tape, group: Group) -> None:
    for name, given in ALL_EQUAL.items():
        for reward in given:
            group.add(name, 4, reward=reward)
    batch = packed(tape, BatchRules())
    assert group_advantages(batch.rewards, batch.groups).tolist() == [0.0] * 12
    assert batch.num_members == 12, "kept, in the denominators, unless the run says otherwise"


def test_case_d13_dropping_such_groups_is_an_option_that_counts_them(tape: Tape, group: Group) -> None:
    for name, given in ALL_EQUAL.items():
        for reward in given:
            group.add(name, 4, reward=reward)
    kept = [group.add("d", 2, reward=reward) for reward in (1.0, 0.0)]
    rules = BatchRules.of(TrainerConfig(zero_std_groups="drop"))
    plan = planned(tape, rules)[1]
    assert plan.dropped_by_reason == {"zero_std_group": 12}
    assert [m.trajectory_id for m in plan.members] == kept
    mixed = BatchRules.of(TrainerConfig(algorithm="opd", task_coef=0.5, zero_std_groups="drop"))
    assert not mixed.drops_zero_std, "rows that learn from a teacher too are kept"
    group.add("e", 1)
    with pytest.raises(UntrainableError, match="group_of_one"):
        planned(tape, rules)


def test_case_d13_rewards_that_truncation_makes_equal_are_equal(tape: Tape, group: Group) -> None:
    group.add("a", 2, reward=0.0)
    group.add("a", 2, reward=1.0, status="truncated")
    rules = BatchRules.of(TrainerConfig(zero_std_groups="drop", truncated="zero_reward"))
    assert set(dropped(tape, rules).values()) == {"zero_std_group"}
    assert dropped(tape, BatchRules.of(TrainerConfig(zero_std_groups="drop"))) == {}


def test_case_d14_infrastructure_is_no_reward_of_zero(tape: Tape, group: Group) -> None:
    """A verifier that timed out says nothing of the policy; a policy that ran out of time does."""
    passed = group.add("g", 4, reward=1.0)
    failed = group.add("g", 4, reward=0.0)
    infra = group.add("g", 4, reward=None, state="invalid", status="env_failed", cause="verifier_timeout")
    slow = group.add("g", 4, reward=0.0, status="truncated", cause="wall_clock")
    folded, plan = planned(tape, BatchRules())
    assert {d.trajectory_id: d.reason for d in plan.dropped} == {infra: "env_failed"}
    assert [m.trajectory_id for m in plan.members if not m.is_padding] == [passed, failed, slow]
    causes = dict(zip(*(folded.trajectories[n].to_pylist() for n in ("trajectory_id", "cause")), strict=True))
    assert causes == {passed: None, failed: None, infra: "verifier_timeout", slow: "wall_clock"}
    batch = packed(tape, BatchRules())
    valid = group_advantages(batch.rewards, batch.groups, norm="mean", counted=~batch.is_padding)
    assert valid[:3].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3]), "out of mean and deviation"


def test_case_d15_a_missing_reward_is_not_zero_and_a_late_one_is_an_event(tape: Tape, group: Group) -> None:
    for _ in range(2):
        group.add("g", 4, reward=-1.0)
    silent = group.add("g", 4, state="nobody judged it")
    missing = group.add("g", 4, reward=None, state="missing")
    assert dropped(tape, BatchRules()) == {
        silent: "reward_missing",
        missing: "reward_missing",
        "t0": "group_incomplete",
        "t1": "group_incomplete",
    }
    late: dict[str, Any] = {"trajectory_id": silent, "attempt": 0, "group_id": "g", "state": "earned"}
    [first] = tape.add("reward_assigned", scalar=0.5, **late)
    assert packed(tape, BatchRules()).rewards.tolist() == [-1.0, -1.0, 0.5, -1.0]
    tape.add("reward_assigned", scalar=0.75, **late)
    assert dropped(tape, BatchRules())[silent] == "reward_conflict"
    [second] = [row["event_id"] for row in tape.tables()["reward_assigned"].to_pylist()][-1:]
    tape.add("reward_assigned", scalar=0.75, supersedes=[[first, second]], **late)
    assert packed(tape, BatchRules()).rewards.tolist() == [-1.0, -1.0, 0.75, -1.0]


def test_case_d15_the_tape_as_of_a_moment_shows_what_was_known_then(tape: Tape, group: Group, tmp_path: Path) -> None:
    for value in (-1.0, -1.0, -1.0):
        group.add("g", 4, reward=value)
    late = group.add("g", 4, state="nobody judged it")
    version = content_digests_of(fold(tape.tables())).to_pylist()
    reward: dict[str, Any] = {"trajectory_id": late, "attempt": 0, "group_id": "g", "state": "earned"}
    tape.add("reward_assigned", scalar=0.5, **reward)
    lake = Lake.create(tmp_path / "lake")
    lake.append(tape.tables(), {})
    offset = max(lake.read("reward_assigned")["log_offset"].to_pylist())
    found = {}
    for moment in (offset, offset + 1):
        as_of = Cursor.parse(f"rollout/0:{moment}")
        known = lake.sql("SELECT trajectory_id, reward FROM trajectories ORDER BY 1", as_of=as_of).rows()
        found[moment] = [row["reward"] for row in known]
    assert found == {offset: [-1.0, -1.0, -1.0, None], offset + 1: [-1.0, -1.0, -1.0, 0.5]}
    now = content_digests_of(fold(tape.tables())).to_pylist()
    changed = [one["trajectory_id"] for one, other in zip(now, version, strict=True) if one != other]
    assert changed == [late], "a batch that was pinned before is another version of the group"


def test_case_d16_an_empty_response_trains_nothing_and_counts_in_its_group(tape: Tape, group: Group) -> None:
    group.add("g", 2, tokens=(), reward=10.0)
    group.add("g", 2, tokens=(7,), reward=0.0)
    batch = packed(tape, BatchRules())
    assert (batch.num_rows, batch.row_member.tolist(), batch.num_segments.tolist()) == (1, [1], [0, 1])
    assert group_advantages(batch.rewards, batch.groups, norm="mean").tolist() == [5.0, -5.0]
    outcome, _ = step(batch, icepop_beta=1e6)
    assert torch.nonzero(outcome.advantages).flatten().tolist() == [3], "nothing is written outside the response"
    assert outcome.trusted.sum() == 1


def test_case_d16_a_lone_end_token_trains(tape: Tape, group: Group) -> None:
    group.add("g", 2, tokens=(9,), reward=1.0)
    group.add("g", 2, tokens=(8,), reward=0.0)
    outcome, _ = step(packed(tape, BatchRules()), icepop_beta=1e6)
    assert not outcome.skipped
    assert outcome.grad_norm > 0
