"""A batch of which nothing is trained: everything dropped, the step skipped, and all of it on the tape."""

from __future__ import annotations

from tests.group_streams import TIMEOUT_S, GroupWriter, StreamTrainer

from rolltape.ingest.memory import MemoryLog
from rolltape.schema import reasons
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.members import one_temperature, pack_members, temperatures_of
from rolltape.trainers.pinned import member_columns
from rolltape.trainers.records import batch_formed_columns, tokens_trained_columns
from rolltape.trainers.step import train_step
from rolltape.trainers.summary import component_metrics, step_metrics


def test_a_batch_without_members_is_a_skipped_step() -> None:
    from rolltape.numerics.models import build_model

    log = MemoryLog()
    writer, trainer = GroupWriter(log), StreamTrainer(log)
    writer.whole(0, version=0)
    found = trainer.gather(version=9, events=[trainer.wait(TIMEOUT_S)])
    assert found.plan.members == ()
    members, digest = member_columns(found.folded, found.plan.members)
    columns = batch_formed_columns(
        batch_id="b",
        trainer_id="trainer",
        algorithm="grpo",
        step=1,
        members=members,
        dropped=found.plan.dropped,
        staleness_version=9,
        staleness_run_epoch=1,
        cursors=found.cursors,
        batch_digest=digest,
    )
    assert not writer.recorder.record_batch("batch_formed", columns).refused
    packed = pack_members(found.folded, found.plan.members)
    assert (packed.num_rows, packed.num_tokens) == (0, 0)
    config = TrainerConfig(algorithm="dis", epsilon_low=0.5, epsilon_high=1.0)
    model = build_model("char-64x2", 0)
    temperature = one_temperature(temperatures_of(found.folded, found.plan.members))
    outcome = train_step(Learner(model, make_optimizer(model, config)), packed, config, step=1, temperature=temperature)
    assert outcome.skipped
    metrics = step_metrics(
        packed, found.plan, outcome, config, newest_version=9, component_metrics=component_metrics(found.rewards)
    )
    assert metrics[f"dropped/{reasons.STALE}"] == 4
    assert metrics["skip_step"] == 1.0
    trained = tokens_trained_columns(packed, found.plan.members, outcome, batch_id="b", step=1)
    assert not writer.recorder.record_batch("tokens_trained", trained, 0).event_ids
