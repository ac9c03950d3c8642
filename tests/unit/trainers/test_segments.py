"""Rows of rollouts with several segments: who is trained once, in which order, with which rewards (§2.1, §4.12)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
from tests.attempts import AttemptWriter
from tests.conftest import Tape

from rolltape.schema.fold import Fold, content_digests_of, fold
from rolltape.trainers.algorithms.rollouts import total_rewards
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.compaction import complete_rollouts, tokens_after
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.gae import credited_rewards
from rolltape.trainers.members import pack_members

COMPACTION = BatchRules.of(TrainerConfig(algorithm="compaction"))
COMPACTION_ALONE: dict[str, Any] = {"algorithm": "compaction"}
SAO = BatchRules.of(TrainerConfig(algorithm="sao", epsilon_low=0.3, epsilon_high=5.0))
VERSIONS = VersionRules(current=0, newest=0, single_version=False)


def compacted(tape: Tape, name: str = "t", *, member: int = 0, status: str = "completed", **reward: Any) -> None:
    """Execution, a rejected summary, an accepted one, execution; tokens 20, 70, 80, 21."""
    writer = AttemptWriter(tape, name, group_id="g", problem_id="p")
    writer.add(
        "rollout_dispatched",
        indexed=False,
        purpose="train",
        group_ordinal=0,
        member=member,
        group_size=1,
        worker_id="w",
    )
    writer.start([1])
    writer.act([20])
    call = [1, 20, 9]
    writer.rewrite(call, reason="summary_call")
    rejected = writer.act([70], action_kind="summary")
    writer.rewrite(call, reason="summary_call")
    accepted = writer.act([80], action_kind="summary")
    writer.rewrite([1, 80], summary_event_id=accepted, rejected_event_ids=[[rejected]])
    writer.act([21])
    writer.end(status)
    writer.reward(**reward)


def planned(tape: Tape, rules: BatchRules = COMPACTION) -> tuple[Fold, BatchPlan]:
    folded = fold(tape.tables())
    return folded, plan_batch(folded, VERSIONS, rules)


def packed(tape: Tape, rules: BatchRules = COMPACTION) -> PackedBatch:
    folded, plan = planned(tape, rules)
    return pack_members(folded, plan.members, rules)


def trained(batch: PackedBatch) -> list[int]:
    ids: list[int] = batch.token_ids[batch.action_mask].tolist()
    return ids


@pytest.mark.parametrize(
    ("options", "tokens", "is_summary"),
    [
        ({}, [20, 80, 21], [False, True, False]),
        ({"train_summary": False}, [20, 21], [False, False]),
        ({"train_rejected_summaries": True}, [20, 70, 80, 21], [False, True, True, False]),
        ({"train_summary": False, "train_rejected_summaries": True}, [20, 21], [False, False]),
    ],
)
def test_which_summaries_are_trained_is_an_option(
    tape: Tape, options: dict[str, Any], tokens: list[int], is_summary: list[bool]
) -> None:
    compacted(tape)
    batch = packed(tape, BatchRules.of(TrainerConfig(algorithm="compaction", **options)))
    assert trained(batch) == tokens
    assert batch.is_summary.tolist() == is_summary
    assert batch.segment_index.tolist() == list(range(len(tokens)))
    assert batch.num_segments.tolist() == [len(tokens)]
    assert complete_rollouts(batch.row_member, batch.segment_index, batch.num_segments).tolist() == [True]
    rows = batch.row_of_token()[batch.action_mask]
    after = tokens_after(rows, batch.row_member, batch.segment_index)
    assert after.tolist() == list(range(len(tokens) - 1, -1, -1)), "N_after counts what is trained, and nothing else"


def test_a_summary_that_was_cut_off_and_ended_the_rollout_is_trained_and_flagged(tape: Tape) -> None:
    """§5. No rewrite accepted it, and none rejected it: it is the rollout's last action, and earned its reward."""
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    call = [1, 20, 9]
    writer.rewrite(call, reason="summary_call")
    writer.act([70], action_kind="summary")
    writer.rewrite(call, reason="summary_call")
    writer.act([80, 81], action_kind="summary", finish_reason="length", truncated=True)
    writer.end("truncated", cause="context_overflow")
    writer.reward(0.0)
    batch = packed(tape)
    assert trained(batch) == [20, 80, 81]
    assert batch.is_summary.tolist() == [False, True]
    assert batch.is_truncated.tolist() == [True]


def test_a_segment_whose_tokens_are_all_masked_is_no_row(tape: Tape) -> None:
    """An erroneous span that is a whole segment leaves neither a row nor a gap in the numbers."""
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    writer.rewrite([1, 2])
    wrong = writer.act([50, 51])
    writer.rewrite([1, 3])
    writer.act([21])
    writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": wrong, "start": 0, "length": 2}]])
    writer.end()
    writer.reward()
    batch = packed(tape)
    assert trained(batch) == [20, 21]
    assert batch.segment_index.tolist() == [0, 1]
    assert batch.num_segments.tolist() == [2]


def test_an_erroneous_span_stays_in_the_context_and_out_of_the_loss(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    wrong = writer.act([50, 51])
    writer.observe([30])
    writer.act([21])
    writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": wrong, "start": 0, "length": 2}]])
    writer.end()
    writer.reward()
    batch = packed(tape, SAO)
    assert batch.token_ids.tolist() == [1, 50, 51, 30, 21]
    assert trained(batch) == [21]


def test_a_rollout_that_lacks_a_segment_is_dropped_whole(tape: Tape) -> None:
    compacted(tape, "a", member=0)
    compacted(tape, "b", member=1)
    folded = fold(tape.tables())
    lacking = [
        row for row, key in enumerate(folded.segments.select(["trajectory_id", "segment_index"]).to_pylist())
        if key != {"trajectory_id": "a", "segment_index": 2}
    ]  # fmt: skip
    part = Fold(trajectories=folded.trajectories, segments=folded.segments.take(pa.array(lacking)))
    plan = plan_batch(part, VERSIONS, COMPACTION)
    assert [(d.trajectory_id, d.reason) for d in plan.dropped] == [("a", "segment_missing")]
    assert trained(pack_members(part, plan.members, COMPACTION)) == [20, 80, 21]


def test_case_d28_segments_do_not_weigh_in_group_statistics_and_train_each_token_once(tape: Tape) -> None:
    """Rollout A has one segment and reward 0, B three that share a sampled prefix of five tokens, and reward 1."""
    from rolltape.trainers.advantages import group_advantages

    for name, member in (("A", 0), ("B", 1)):
        writer = AttemptWriter(tape, name, group_id="g")
        writer.add(
            "rollout_dispatched", indexed=False, purpose="train", group_ordinal=0, member=member, group_size=2,
            worker_id="w",
        )  # fmt: skip
        writer.start([1])
        prefix = [50, 51, 52, 53, 54]
        action = writer.act(prefix)
        for token in (60, 61) if name == "B" else ():
            copied = [{"start": 1, "length": 5, "event_id": action, "source_start": 0}]
            writer.rewrite([1, *prefix], reason="rewind", provenance=[copied])
            writer.act([token])
        writer.end()
        writer.reward(float(member))
    batch = packed(tape, BatchRules())
    assert trained(batch) == [*prefix, *prefix, 60, 61]
    assert batch.num_segments.tolist() == [1, 3], "the count is visible"
    assert batch.rewards.mean() == 0.5
    assert group_advantages(batch.rewards, batch.groups, norm="mean").tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_branch_is_no_member_of_its_own_where_a_group_is_compared(tape: Tape, dispatched: bool) -> None:
    """Group statistics are per root: a group of rewards 0 and 1 has the mean 0.5, whatever its branches earned."""
    for name, member in (("A", 0), ("B", 1)):
        writer = AttemptWriter(tape, name, group_id="g")
        if dispatched:
            writer.add(
                "rollout_dispatched", indexed=False, purpose="train", group_ordinal=0, member=member, group_size=2,
                worker_id="w",
            )  # fmt: skip
        writer.start([1])
        action = writer.act([20 + member, 30])
        writer.end()
        writer.reward(float(member))
    branch = AttemptWriter(tape, "Branch", group_id="g", root_rollout_id="A", parent_event_id=action)
    branch.start([1, 20, 30], forked_from_event_id=action)
    branch.act([40])
    branch.end()
    branch.reward(1.0)
    folded = fold(tape.tables())
    plan = plan_batch(folded, VERSIONS, BatchRules())
    assert [(d.trajectory_id, d.reason) for d in plan.dropped] == [("Branch", "branch")]
    batch = pack_members(folded, plan.members)
    assert batch.rewards.tolist() == [0.0, 1.0]
    assert trained(batch) == [20, 30, 21, 30]
    alone = plan_batch(folded, VERSIONS, COMPACTION)
    assert sorted(member.trajectory_id for member in alone.members) == ["A", "B", "Branch"], "nothing is compared"


def turns(tape: Tape, name: str = "t", *, masked: tuple[int, ...] = ()) -> tuple[AttemptWriter, list[str]]:
    """Actions of two tokens, observations between, in two segments (a0 o a1 | a2 o); the writer and their ids."""
    writer = AttemptWriter(tape, name)
    writer.start([1, 2])
    actions = [writer.act([20, 21])]
    writer.observe([30, 31, 32])
    actions.append(writer.act([22, 23]))
    writer.rewrite([1, 9])
    actions.append(writer.act([24, 25]))
    writer.observe([33])
    for number in masked:
        writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": actions[number], "start": 0, "length": 2}]])
    writer.end()
    return writer, actions


def credited(batch: PackedBatch) -> dict[int, float]:
    """Rewards by the token that they are credited to."""
    rows = batch.row_of_token()
    positions = torch.arange(batch.num_tokens) - (batch.cu_seqlens[:-1] + batch.context_lengths)[rows]
    given, mask = batch.token_rewards, batch.action_mask
    found = credited_rewards(given.amounts, given.rows, given.positions, rows[mask], positions[mask])
    tokens = batch.token_ids[mask]
    return {int(token): float(amount) for token, amount in zip(tokens, found, strict=True) if amount}


def test_rewards_of_single_tokens_lie_where_they_were_earned(tape: Tape) -> None:
    writer, actions = turns(tape)
    writer.reward(0.25, target_event_id=actions[0], target_token=0)
    writer.reward(0.5, target_event_id=actions[1])
    writer.reward(-1.0, target_event_id=actions[2])
    batch = packed(tape, SAO)
    assert batch.token_rewards.rows.tolist() == [0, 0, 1]
    assert batch.token_rewards.positions.tolist() == [0, 6, 1]
    assert batch.token_rewards.amounts.tolist() == [0.25, 0.5, -1.0]
    assert credited(batch) == {20: 0.25, 23: 0.5, 25: -1.0}


def test_a_padding_copy_has_the_rewards_of_its_source(tape: Tape) -> None:
    writer, actions = turns(tape)
    writer.reward(0.5, target_event_id=actions[1])
    folded, plan = planned(tape, SAO)
    [member] = plan.members
    batch = pack_members(folded, [member, member._replace(is_padding=True)], SAO)
    assert batch.token_rewards.rows.tolist() == [0, 2]
    assert batch.token_rewards.amounts.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("masked", "expected"),
    [
        ((0,), {23: 0.5, 25: -1.0}),  # before every trained token: no return of a later token has it in it
        ((1,), {20: 0.25, 21: 0.5, 25: -1.0}),
        ((2,), {20: 0.25, 23: -0.5}),  # of a segment that has nothing to train: the last trained token before it
        ((0, 1), {25: -1.0}),
    ],
)
def test_a_reward_of_a_masked_token_goes_to_the_last_trained_one_before_it(
    tape: Tape, masked: tuple[int, ...], expected: dict[int, float]
) -> None:
    writer, actions = turns(tape, masked=masked)
    writer.reward(0.25, target_event_id=actions[0], target_token=0)
    writer.reward(0.5, target_event_id=actions[1])
    writer.reward(-1.0, target_event_id=actions[2])
    assert credited(packed(tape, SAO)) == expected


def test_token_rewards_alone_make_a_judged_rollout_where_the_method_reads_them(tape: Tape) -> None:
    writer, actions = turns(tape)
    writer.reward(0.5, target_event_id=actions[1])
    for rules in (SAO, COMPACTION):
        _, plan = planned(tape, rules)
        assert [m.trajectory_id for m in plan.members] == ["t"]
        assert torch.isnan(packed(tape, rules).rewards).tolist() == [True]
    _, plan = planned(tape, BatchRules(uses_groups=False))
    assert [d.reason for d in plan.dropped] == ["reward_missing"]


@pytest.mark.parametrize("state", ["missing", "invalid"])
def test_a_whole_reward_that_is_said_to_be_missing_is_missing_for_all(tape: Tape, state: str) -> None:
    writer, actions = turns(tape)
    writer.reward(0.5, target_event_id=actions[1])
    writer.reward(None, state)
    _, plan = planned(tape, SAO)
    assert [d.reason for d in plan.dropped] == [f"reward_{state}"]


def test_rewards_of_single_tokens_are_part_of_a_batchs_digest(tape: Tape) -> None:
    writer, actions = turns(tape, "t")
    writer.reward(0.5, target_event_id=actions[1])
    turns(tape, "u")
    plain = content_digests_of(fold(tape.tables())).to_pylist()
    writer, actions = turns(tape, "v")
    writer.reward(0.5, target_event_id=actions[0])
    digests = {row["trajectory_id"]: row for row in content_digests_of(fold(tape.tables())).to_pylist()}
    assert [digests[row["trajectory_id"]] for row in plain] == plain
    assert len({row["rewards"] for row in digests.values()}) == 3
    assert len({row["token_ids"] for row in digests.values()}) == 1


@pytest.mark.parametrize(
    ("options", "rewards", "rows"),
    [
        ({}, [1.0, 1.0], 6),
        ({"truncation_penalty": 0.25}, [1.0, 0.75], 6),
        ({"truncated": "zero_reward"}, [1.0, 0.0], 6),
        ({"truncated": "zero_reward", "truncation_penalty": 0.25}, [1.0, -0.25], 6),
        ({"truncated": "mask"}, [1.0, 1.0], 3),
    ],
)
def test_what_becomes_of_a_truncated_rollout_is_an_option(
    tape: Tape, options: dict[str, Any], rewards: list[float], rows: int
) -> None:
    """§2.2: being cut off is no environment failure. A masked one keeps its place in the batch, without a token."""
    compacted(tape, "a", member=0)
    compacted(tape, "b", member=1, status="truncated")
    batch = packed(tape, BatchRules.of(TrainerConfig(algorithm="compaction", **options)))
    assert batch.is_truncated.tolist() == [False, True]
    assert batch.rewards.tolist() == rewards
    assert batch.num_rows == rows
    assert batch.num_segments.tolist() == [3, rows - 3]


def test_a_truncated_rollout_of_token_rewards_alone(tape: Tape) -> None:
    writer, actions = turns(tape)
    writer.reward(0.5, target_event_id=actions[1])
    tape.batches["rollout_ended"].clear()
    writer.index -= 1
    writer.end("truncated")
    sao: dict[str, Any] = {"algorithm": "sao", "epsilon_low": 0.3, "epsilon_high": 5.0}
    batch = packed(tape, BatchRules.of(TrainerConfig(**sao, truncation_penalty=0.25)))
    assert (batch.rewards.tolist(), batch.token_rewards.amounts.tolist()) == ([-0.25], [0.5])
    batch = packed(tape, BatchRules.of(TrainerConfig(**sao, truncated="zero_reward")))
    assert (batch.rewards.tolist(), batch.token_rewards.amounts.tolist()) == ([0.0], [])


def test_the_fields_of_an_old_batch_follow_from_its_rows() -> None:
    batch = PackedBatch(
        token_ids=torch.arange(4, dtype=torch.int32),
        cu_seqlens=torch.arange(5),
        context_lengths=torch.zeros(4, dtype=torch.int64),
        action_mask=torch.ones(4, dtype=torch.bool),
        rollout_log_probs=torch.zeros(4),
        policy_versions=torch.zeros(4, dtype=torch.int32),
        row_member=torch.tensor([1, 0, 1, 1]),
        rewards=torch.zeros(3, dtype=torch.float64),
        groups=torch.zeros(3, dtype=torch.int64),
        is_padding=torch.zeros(3, dtype=torch.bool),
    )
    assert batch.segment_index.tolist() == [0, 0, 1, 2]
    assert batch.num_segments.tolist() == [1, 3, 0]
    assert batch.num_members == 3
    assert not batch.is_summary.any()
    assert not batch.is_truncated.any()
    assert batch.token_rewards.amounts.numel() == 0
    assert (batch.teacher, batch.domains) == (None, (None, None, None))


@pytest.mark.parametrize("method", [{"algorithm": "sao", "epsilon_low": 0.3, "epsilon_high": 5.0}, COMPACTION_ALONE])
def test_a_rollout_whose_rewarded_tokens_are_not_trained_earned_nothing_that_is(
    tape: Tape, method: dict[str, Any]
) -> None:
    """Its tokens alone were rewarded, and none of them is in the batch: its reward is 0, not a missing one."""
    rules = BatchRules.of(TrainerConfig(**method, truncated="mask"))
    writer = AttemptWriter(tape, "t", group_id="g", problem_id="p")
    writer.start([1])
    action = writer.act([20, 21])
    writer.end("truncated")
    writer.reward(0.5, target_event_id=action)
    batch = packed(tape, rules)
    assert (batch.num_members, batch.num_rows) == (1, 0)
    assert total_rewards(batch).tolist() == [0.0]
