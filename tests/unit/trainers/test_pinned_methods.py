"""A recorded batch read again: exactly the scores and rewards that it names, for its own method and for another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.attempts import AttemptWriter
from tests.conftest import Tape
from tests.scored import problem, route, score, start_run

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import DigestMismatchError, UntrainableError
from rolltape.schema.fold import fold
from rolltape.store.lake import Lake
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.members import pack_members
from rolltape.trainers.pinned import PinnedBatch, member_columns, read_pinned
from rolltape.trainers.records import batch_formed_columns
from rolltape.trainers.score_book import ScoreBook

MOPD = BatchRules.of(TrainerConfig(algorithm="mopd"))
SAO = BatchRules.of(TrainerConfig(algorithm="sao", epsilon_low=0.3, epsilon_high=5.0))
COMPACTION = BatchRules.of(TrainerConfig(algorithm="compaction"))
GRPO = BatchRules()
ALL = (GRPO, BatchRules.of(TrainerConfig(algorithm="opd")), MOPD, SAO, COMPACTION)


class Recorded:
    """Two rollouts of two segments each, with observations, mixed rewards and scores, and their batch."""

    def __init__(self, tape: Tape, folder: Path) -> None:
        self.tape, self.folder = tape, folder
        start_run(tape)
        problem(tape, "p", "math")
        route(tape, "math", "teacher-math")
        self.names = ("a", "b")
        self.actions = [self._rollout(name, member) for member, name in enumerate(self.names)]
        self.scores = {(name, s): score(tape, name, "teacher-math", segment=s) for name in self.names for s in (0, 1)}

    def _rollout(self, name: str, member: int) -> list[str]:
        writer = AttemptWriter(self.tape, name, group_id="g", problem_id="p")
        writer.add(
            "rollout_dispatched", indexed=False, purpose="train", group_ordinal=0, member=member, group_size=2,
            worker_id="w",
        )  # fmt: skip
        writer.start([1, 2])
        actions = [writer.act([20, 21 + member])]
        writer.observe([30])
        actions.append(writer.act([22]))
        writer.rewrite([1, 9])
        actions.append(writer.act([24, 25]))
        writer.end("truncated" if member else "completed")
        writer.reward(0.5, target_event_id=actions[1])
        writer.reward(float(member))
        return actions

    def pin(self, rules: BatchRules) -> PackedBatch:
        """Form the batch as the live trainer does; what it trained."""
        tables = self.tape.tables()
        folded, book = fold(tables), ScoreBook.of(tables, tables["run_started"], rules)
        plan: BatchPlan = plan_batch(folded, VersionRules(current=0, newest=0), rules, book)
        structs, digest = member_columns(folded, plan.members, rules, book)
        columns = batch_formed_columns(
            batch_id="batch",
            trainer_id="trainer",
            algorithm="any",
            step=1,
            members=structs,
            dropped=plan.dropped,
            staleness_version=0,
            staleness_run_epoch=1,
            cursors=(Cursor(), Cursor()),
            batch_digest=digest,
        )
        self.tape.add("batch_formed", **columns)
        return pack_members(folded, plan.members, rules, book)

    def read(self, rules: BatchRules, without: Sequence[str] = ()) -> PinnedBatch:
        """Read it from a lake that holds the tape."""
        lake = Lake.create(self.folder / f"lake-{len(list(self.folder.iterdir()))}")
        tables = {kind: table for kind, table in self.tape.tables().items() if kind not in without}
        lake.append(tables, {})
        return read_pinned(lake, "run", "batch", rules)


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
