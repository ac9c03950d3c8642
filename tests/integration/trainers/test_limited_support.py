"""A run sampled with top-p: its steps compare log-probs over the kept tokens, as its replays do (case D7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow.compute as pc
import pytest
import torch
from tests.training_runs import TrainingRun, small_config

from rolltape.recipes.runs import trainer_job
from rolltape.store.lake import Lake
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.pinned import read_pinned
from rolltape.trainers.replay import replay_step

NUM_STEPS = 2
MAX_DELTA = 1e-5  # float32, an engine with a cache against packed rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    base = small_config(num_steps=NUM_STEPS, probe_every=1)
    config = replace(base, rollout=replace(base.rollout, top_p=0.8, num_workers=1))
    with TrainingRun(tmp_path_factory.mktemp("limited"), config=config) as made:
        made.start()
        made.wait()
        yield made


def pinned(run: TrainingRun, step: int) -> PackedBatch:
    lake: Lake = run.lake
    batches = lake.read("batch_formed", run_id=run.config.run_id)["batch_formed"].combine_chunks()
    [batch_id] = batches.filter(pc.equal(pc.struct_field(batches, "step"), step)).field("batch_id").to_pylist()
    return read_pinned(lake, run.config.run_id, batch_id, BatchRules.of(run.config.trainer)).packed


@pytest.mark.timeout(300)
def test_what_was_sampled_is_what_is_trained(run: TrainingRun) -> None:
    assert run.problems() == []
    probes = run.lake.sql("select max_abs_delta, control_max_abs_delta, num_tokens from mismatch_probed").arrow()
    found = probes.to_pylist()
    assert len(found) == NUM_STEPS
    for probed in found:
        assert probed["num_tokens"] > 0
        assert probed["max_abs_delta"] < MAX_DELTA
        assert probed["control_max_abs_delta"] > 0.01
    dropped = run.lake.sql("select count(*) as n from batch_members where not is_completed").arrow().to_pylist()
    assert dropped == [{"n": 0}]
    for step in range(1, NUM_STEPS + 1):
        batch = pinned(run, step)
        assert batch.support is not None
        counts = batch.support.offsets.diff()
        assert torch.equal(counts > 0, batch.action_mask)
        assert 1 < float(counts[batch.action_mask].double().mean()) < 16


@pytest.mark.timeout(300)
def test_its_steps_replay_to_the_bit(run: TrainingRun) -> None:
    for step in range(1, NUM_STEPS + 1):
        assert replay_step(run.lake, trainer_job(run.config), step).comparison.differences == ()
