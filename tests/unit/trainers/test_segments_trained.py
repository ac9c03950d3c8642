"""Which segments of a rollout become rows of a batch (design §4, Fold)."""

from __future__ import annotations

from tests.attempts import AttemptWriter
from tests.conftest import Tape

from rolltape.schema.fold import fold
from rolltape.trainers.members import Member, pack_members


def test_accepted_summaries_are_trained_and_rejected_ones_are_not(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    call = [1, 20, 9]
    writer.rewrite(call, reason="summary_call")
    rejected = writer.act([70], action_kind="summary")
    writer.rewrite(call, reason="summary_call")
    accepted = writer.act([80], action_kind="summary")
    writer.rewrite([1, 80], summary_event_id=accepted, rejected_event_ids=[[rejected]])
    writer.act([21])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    member = Member(trajectory_id="t", attempt=0, group_id="g", group_ordinal=0, member=0)
    batch = pack_members(folded, [member])
    assert folded.segments.num_rows == 4
    assert batch.token_ids[batch.action_mask].tolist() == [20, 80, 21]
    assert batch.row_member.tolist() == [0, 0, 0]
