"""A recorded batch read again: exactly the scores and rewards that it names, for its own method and for another's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import Tape
from tests.recorded_batch import Recorded
from tests.scored import score

from rolltape.schema.errors import DigestMismatchError, UntrainableError
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.forming import open_batch
from rolltape.trainers.history import RunHistory
from rolltape.trainers.members import Dropped

MOPD = BatchRules.of(TrainerConfig(algorithm="mopd"))
SAO = BatchRules.of(TrainerConfig(algorithm="sao", epsilon_low=0.3, epsilon_high=5.0))
COMPACTION = BatchRules.of(TrainerConfig(algorithm="compaction"))
GRPO = BatchRules()
ALL = (GRPO, BatchRules.of(TrainerConfig(algorithm="opd")), MOPD, SAO, COMPACTION)


@pytest.fixture
def recorded(tape: Tape, tmp_path: Path) -> Recorded:
    return Recorded(tape, tmp_path)


def require_equal(found: PackedBatch, expected: PackedBatch) -> None:
    """Bit for bit, a NaN for a NaN."""
    for name in PackedBatch.__slots__:
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(torch.nan_to_num(one, nan=77), torch.nan_to_num(other, nan=77)), name
    for name in ("amounts", "rows", "positions"):
        assert torch.equal(getattr(found.token_rewards, name), getattr(expected.token_rewards, name)), name
    assert found.domains == expected.domains
    assert (found.teacher is None) == (expected.teacher is None)
    if found.teacher is not None and expected.teacher is not None:
        assert found.teacher.teacher_ids == expected.teacher.teacher_ids
        one, other = found.teacher.log_probs, expected.teacher.log_probs
        assert torch.equal(torch.nan_to_num(one, nan=77), torch.nan_to_num(other, nan=77))


@pytest.mark.parametrize("rules", ALL)
def test_a_batch_of_any_method_is_read_as_it_was_trained(recorded: Recorded, rules: BatchRules) -> None:
    trained = recorded.pin(rules)
    require_equal(recorded.read(rules).packed, trained)


class HalfValid(Recorded):
    """The second rollout is of a version that is not there yet: its group is filled up with a copy of the first."""

    def _rollout(self, name: str, member: int) -> list[str]:
        self.version = member
        try:
            return super()._rollout(name, member)
        finally:
            self.version = 0


def test_an_open_batch_is_taken_up_with_those_that_it_dropped(tape: Tape, tmp_path: Path) -> None:
    """A trainer that died between batch and step logs the same of the step as one that did not."""
    recorded = HalfValid(tape, tmp_path)
    recorded.pin(SAO)
    assert recorded.read(SAO).dropped == (Dropped(trajectory_id="b", attempt=0, group_id="g", reason="future_version"),)
    lake, trainer = recorded.lake(), TrainerConfig(algorithm="sao", epsilon_low=0.3, epsilon_high=5.0)
    job: Any = SimpleNamespace(run_id="run", trainer=trainer)
    found = open_batch(lake, RunHistory.read(lake, "run"), job, 1)
    assert found is not None
    assert found.plan.dropped_by_reason == {"future_version": 1}


@pytest.mark.parametrize("rules", [SAO, COMPACTION, MOPD])
def test_a_method_without_groups_trains_no_copies(tape: Tape, tmp_path: Path, rules: BatchRules) -> None:
    recorded = HalfValid(tape, tmp_path)
    grpo = BatchRules(pad_rule="ge_half")
    trained = recorded.pin(grpo)
    assert trained.is_padding.tolist() == [False, True]
    require_equal(recorded.read(grpo).packed, trained)
    found = recorded.read(rules)
    assert [(member.trajectory_id, member.is_padding) for member in found.members] == [("a", False)]
    assert found.packed.num_members == 1
    assert found.digest == recorded.read(grpo).digest


def test_scores_that_came_later_change_nothing(recorded: Recorded) -> None:
    trained = recorded.pin(MOPD)
    assert trained.teacher is not None
    for name in recorded.names:
        score(recorded.tape, name, "teacher-math", log_probs=[-9.0] * 4)
    recorded.tape.batches["teacher_scored"].reverse()
    require_equal(recorded.read(MOPD).packed, trained)
    members = recorded.tape.tables()["batch_formed"]["batch_formed"][0].as_py()["members"]
    named = [[recorded.scores[name, segment] for segment in (0, 1)] for name in recorded.names]
    assert [member["teacher_event_ids"] for member in members] == named


def said_otherwise(recorded: Recorded, **changes: Any) -> None:
    """The tape says under the same event id what was not trained on."""
    [row] = recorded.tape.tables()["teacher_scored"].slice(0, 1).to_pylist()
    writer = Tape()
    envelope = ("event_id", "trajectory_id", "attempt", "group_id", "problem_id", "segment_index", "log_offset")
    given = {name: row[name] for name in envelope} | row["teacher_scored"] | changes
    lists = {name: [value] for name, value in given.items() if isinstance(value, list)}
    writer.add("teacher_scored", **(given | lists))
    recorded.tape.batches["teacher_scored"][0] = writer.batches["teacher_scored"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"log_probs": [-1.0, -2.0, -3.0, None]},
        {"log_probs": [-0.078125, -0.09375, -0.046875, -0.12500001]},  # one bit of the last
        {"top_k": 1, "top_k_token_ids": [1, 1, 1, 1], "top_k_log_probs": [-1.0] * 4},
    ],
)
def test_a_score_that_is_not_what_was_trained_on_is_named(recorded: Recorded, changes: dict[str, Any]) -> None:
    trained = recorded.pin(MOPD)
    said_otherwise(recorded)
    require_equal(recorded.read(MOPD).packed, trained)
    assert recorded.verified()
    said_otherwise(recorded, **changes)
    with pytest.raises(DigestMismatchError, match=r"batch batch: trajectory a .*teacher's scores differ"):
        recorded.read(MOPD)
    assert recorded.read(GRPO).packed.teacher is None, "who reads no scores is not concerned"
    assert not recorded.verified()


def test_a_score_under_the_same_id_later_in_the_log_changes_nothing(recorded: Recorded) -> None:
    """A second service that scores again makes the same event ids."""
    trained = recorded.pin(MOPD)
    first = recorded.tape.batches["teacher_scored"][0]
    said_otherwise(recorded, log_offset=99, log_probs=[-1.0, -2.0, -3.0, -4.0])
    recorded.tape.batches["teacher_scored"].append(first)
    require_equal(recorded.read(MOPD).packed, trained)


def test_a_batch_without_a_digest_of_its_scores_is_read(recorded: Recorded) -> None:
    """As releases before this one pinned it."""
    trained = recorded.pin(MOPD)
    recorded.forget_teacher_digests()
    said_otherwise(recorded, log_probs=[-1.0, -2.0, -3.0, -4.0])
    assert not torch.equal(recorded.read(MOPD).packed.teacher.log_probs, trained.teacher.log_probs)  # type: ignore[union-attr]
    assert recorded.verified()


def test_one_recorded_batch_serves_every_method(recorded: Recorded) -> None:
    """Counterfactual replay: what another method would have made of it, scores among it that the batch never named."""
    recorded.pin(GRPO)
    batches = [recorded.read(rules).packed for rules in ALL]
    for batch in batches[1:]:
        for name in ("token_ids", "action_mask", "segment_index", "row_member", "rewards"):
            assert torch.equal(getattr(batch, name), getattr(batches[0], name)), name
    assert [batch.teacher is not None for batch in batches] == [False, True, True, False, False]
    assert all(batch.token_rewards.amounts.tolist() == [0.5, 0.5] for batch in batches)
    assert batches[0].is_truncated.tolist() == [False, True]


def test_a_method_whose_scores_the_tape_lacks_is_refused_by_name(recorded: Recorded) -> None:
    recorded.pin(GRPO)
    with pytest.raises(UntrainableError, match=r"teacher_score_missing.*trajectory a"):
        recorded.read(MOPD, without=["teacher_scored"])
    with pytest.raises(UntrainableError, match=r"unknown_domain.*trajectory a"):
        recorded.read(MOPD, without=["teacher_routed"])
    assert recorded.read(SAO, without=["teacher_scored"]).packed.teacher is None


def test_what_becomes_of_truncated_rollouts_is_the_readers_option_and_the_tape_keeps_the_reward(
    recorded: Recorded,
) -> None:
    recorded.pin(BatchRules.of(TrainerConfig(truncated="zero_reward")))
    assert recorded.read(GRPO).packed.rewards.tolist() == [0.0, 1.0]
    zero = BatchRules.of(TrainerConfig(truncated="zero_reward", truncation_penalty=0.25))
    assert recorded.read(zero).packed.rewards.tolist() == [0.0, -0.25]


def test_a_token_reward_that_is_not_what_was_trained_is_named(recorded: Recorded) -> None:
    recorded.pin(SAO)
    rewards = recorded.tape.batches["reward_assigned"]
    writer = Tape()
    writer.add(
        "reward_assigned",
        event_id=rewards[0]["event_id"].to_pylist(),
        trajectory_id="a",
        attempt=0,
        group_id="g",
        problem_id="p",
        state="earned",
        scalar=0.75,
        target_event_id=recorded.actions[0][1],
    )
    rewards[0] = writer.batches["reward_assigned"][0]
    with pytest.raises(DigestMismatchError, match=r"trajectory a .*reward differs"):
        recorded.read(SAO)
