"""Assembly of rollouts with any turns, segments, masks and rewards (algorithms.md §2.1, §6.1, §6.7)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attempts import AttemptWriter
from tests.conftest import Tape
from tests.scored import problem, route, score, start_run

from rolltape.schema.fold import Fold, fold
from rolltape.trainers.aggregation import aggregation_weights
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.compaction import complete_rollouts, tokens_after
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.gae import credited_rewards
from rolltape.trainers.members import MemberPacker, pack_members
from rolltape.trainers.score_book import ScoreBook

RULES = BatchRules.of(TrainerConfig(algorithm="compaction"))
VERSIONS = VersionRules(current=0, newest=0, single_version=False)


@dataclass
class Turn:
    """One action; ``observed`` tokens follow it, and where ``cut`` is set the next begins a new segment."""

    length: int
    observed: int
    cut: bool
    masked: bool
    reward: float | None


TURN = st.builds(
    Turn,
    length=st.integers(0, 3),
    observed=st.integers(0, 2),
    cut=st.booleans(),
    masked=st.sampled_from([False, False, True]),
    reward=st.sampled_from([None, None, 0.5, -1.0]),
)
ROLLOUTS = st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=4)


@dataclass
class Written:
    """What a rollout's writer knows: every sampled token is another number, so each can be found again."""

    trained: list[int] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """By the token that a reward is credited to: the last trained one that is not after it."""


def write(tape: Tape, name: str, turns: list[Turn], first: int, *, cuts: bool = True) -> Written:
    written, token = Written(), first
    writer = AttemptWriter(tape, name, group_id=name, problem_id="p")
    writer.start([1])
    for turn in turns:
        ids = list(range(token, token + turn.length))
        token += turn.length
        action = writer.act(ids)
        if turn.masked:
            span = {"event_id": action, "start": 0, "length": turn.length}
            writer.add("mask_assigned", indexed=False, ranges=[[span]])
        else:
            written.trained += ids
        if turn.reward is not None and turn.length:
            writer.reward(turn.reward, target_event_id=action)
            if written.trained:
                place = written.trained[-1]
                written.rewards[place] = written.rewards.get(place, 0.0) + turn.reward
        if turn.observed:
            writer.observe([2] * turn.observed)
        if turn.cut and cuts:
            writer.rewrite([1, 3])
    writer.end()
    writer.reward(1.0)
    return written


def tape_of(rollouts: list[list[Turn]], *, cuts: bool = True) -> tuple[Tape, list[Written]]:
    tape = Tape()
    return tape, [write(tape, f"t{n}", turns, 100 * (n + 1), cuts=cuts) for n, turns in enumerate(rollouts)]


def planned(tape: Tape) -> tuple[Fold, BatchPlan]:
    folded = fold(tape.tables())
    return folded, plan_batch(folded, VERSIONS, RULES)


def trained(batch: PackedBatch) -> list[int]:
    ids: list[int] = batch.token_ids[batch.action_mask].tolist()
    return ids


def credited(batch: PackedBatch) -> dict[int, float]:
    rows = batch.row_of_token()
    positions = torch.arange(batch.num_tokens) - (batch.cu_seqlens[:-1] + batch.context_lengths)[rows]
    of, mask = batch.token_rewards, batch.action_mask
    found = credited_rewards(of.amounts, of.rows, of.positions, rows[mask], positions[mask])
    return {token: float(amount) for token, amount in zip(trained(batch), found, strict=True) if amount}


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS)
def test_every_sampled_token_is_trained_once_and_every_reward_is_credited_once(rollouts: list[list[Turn]]) -> None:
    tape, written = tape_of(rollouts)
    folded, plan = planned(tape)
    assert [m.trajectory_id for m in plan.members] == [f"t{n}" for n in range(len(rollouts))]
    batch = pack_members(folded, plan.members, RULES)
    assert trained(batch) == [token for rollout in written for token in rollout.trained]
    expected = {token: amount for rollout in written for token, amount in rollout.rewards.items() if amount}
    assert credited(batch) == expected
    assert complete_rollouts(batch.row_member, batch.segment_index, batch.num_segments).all()
    assert torch.equal(torch.bincount(batch.row_member, minlength=batch.num_members), batch.num_segments)


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS)
def test_cutting_a_rollout_into_segments_changes_no_token_mean_and_no_distance_to_the_end(
    rollouts: list[list[Turn]],
) -> None:
    """§6.7: token_mean, N_after and the credited rewards do not see where segments are cut."""
    distances, weights, rewards = [], [], []
    for cuts in (False, True):
        tape, _ = tape_of(rollouts, cuts=cuts)
        folded, plan = planned(tape)
        batch = pack_members(folded, plan.members, RULES)
        rows = batch.row_of_token()[batch.action_mask]
        after = tokens_after(rows, batch.row_member, batch.segment_index)
        ends = torch.bincount(rows, minlength=batch.num_rows).cumsum(0)
        to_end = ends[rows] - torch.arange(rows.numel()) - 1 + after[rows]
        distances.append(dict(zip(trained(batch), to_end.tolist(), strict=True)))
        weights.append(aggregation_weights(rows, mode="token_mean", num_rows=batch.num_rows).tolist())
        rewards.append(credited(batch))
    assert distances[0] == distances[1]
    assert weights[0] == weights[1]
    assert rewards[0] == rewards[1]


@settings(max_examples=40, deadline=None)
@given(ROLLOUTS, st.randoms(use_true_random=False))
def test_the_order_of_members_moves_rows_and_changes_none(rollouts: list[list[Turn]], order: random.Random) -> None:
    tape, _ = tape_of(rollouts)
    folded, plan = planned(tape)
    shuffled = list(plan.members)
    order.shuffle(shuffled)
    plain, other = pack_members(folded, plan.members, RULES), pack_members(folded, shuffled, RULES)
    assert rows_by_name(plain, plan.members) == rows_by_name(other, shuffled)
    assert credited(plain) == credited(other)


def rows_by_name(batch: PackedBatch, members: Any) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Each row's content, by rollout and segment."""
    found = {}
    for row in range(batch.num_rows):
        tokens = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        member = int(batch.row_member[row])
        names = ("token_ids", "action_mask", "rollout_log_probs", "policy_versions")
        content = tuple(tuple(getattr(batch, name)[tokens].tolist()) for name in names)
        facts = (int(batch.num_segments[member]), float(batch.rewards[member]), int(batch.context_lengths[row]))
        found[members[member].trajectory_id, int(batch.segment_index[row])] = (*content, *facts)
    return found


@settings(max_examples=25, deadline=None)
@given(ROLLOUTS, st.randoms(use_true_random=False), st.integers(1, 3))
def test_scores_stay_with_their_tokens_in_any_order_of_events_and_parts(
    rollouts: list[list[Turn]], order: random.Random, size: int
) -> None:
    tape, written = tape_of(rollouts)
    start_run(tape)
    problem(tape, "p", "math")
    route(tape, "math", "teacher")
    for segment in fold(tape.tables()).segments.to_pylist():
        if segment["response_token_ids"]:
            score(tape, segment["trajectory_id"], "teacher", segment=segment["segment_index"])
    tables = {kind: shuffled(table, order) for kind, table in tape.tables().items()}
    rules = BatchRules.of(TrainerConfig(algorithm="mopd"))
    folded, book = fold(tables), ScoreBook.of(tables, tables["run_started"], rules)
    plan = plan_batch(folded, VERSIONS, rules, book)
    assert len(plan.members) == len(rollouts)
    packer = MemberPacker(rules, book)
    for first in range(0, len(plan.members), size):
        packer.add(folded, plan.members[first : first + size])
    batch = packer.finish()
    assert trained(batch) == [token for rollout in written for token in rollout.trained]
    assert batch.teacher is not None
    scores = batch.teacher.log_probs[batch.action_mask]
    assert torch.equal(scores, -batch.token_ids[batch.action_mask].float() / 64)


def shuffled(table: pa.Table, order: random.Random) -> pa.Table:
    rows = list(range(table.num_rows))
    order.shuffle(rows)
    return table.take(pa.array(rows, pa.int64()))
