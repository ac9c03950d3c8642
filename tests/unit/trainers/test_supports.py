"""Rollouts of a limited support are trained over the support that was kept (case D7, algorithms.md §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attempts import SAMPLING, AttemptWriter
from tests.conftest import Tape
from torch import nn

from rolltape.numerics.models import build_model
from rolltape.numerics.packed import packed_log_probs
from rolltape.numerics.weights import named_weights, save_shards
from rolltape.rollout.engine import GenerationBatch, GenerationRequest, PolicyVersion, PublishedWeights, SamplingConfig
from rolltape.rollout.transformers_engine import TransformersEngine
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import fold
from rolltape.store.location import Location
from rolltape.trainers.assembly import VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.members import Member, pack_members
from rolltape.trainers.probe import probe
from rolltape.trainers.segments import limited_supports
from rolltape.trainers.step import StepOutcome, train_step

VERSIONS = VersionRules(current=0, newest=0)
LIMITED = {**SAMPLING, "top_p": 0.8}
SINGLE = BatchRules(uses_groups=False)
NUM_ROWS, NUM_TOKENS = 20, 50
MAX_DELTA = 2e-6  # an engine with a cache against packed rows, float32


def sharp_model() -> nn.Module:
    """Distributions far from uniform, as those of a trained model."""
    model = build_model("char-64x2", 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def generate(
    folder: Path, model: nn.Module, sampling: SamplingConfig
) -> tuple[list[GenerationRequest], GenerationBatch]:
    """1,000 tokens as an engine samples them."""
    location = Location.parse(str(folder))
    manifest = save_shards(location, named_weights(model))
    version = PolicyVersion("actor", 1, 0, manifest.weights_digest)
    engine = TransformersEngine(build_model("char-64x2", 7), engine_id="e", on_activated=lambda _v, _s: None)
    engine.stage(PublishedWeights(version=version, location=location, manifest=manifest))
    engine.activate(version)
    contexts = [np.array([3 + row % 9, 4], np.int32) for row in range(NUM_ROWS)]
    asked = [GenerationRequest(prompt_token_ids=context, seed=row) for row, context in enumerate(contexts)]
    return asked, engine.generate(asked, sampling)


def support_columns(generations: GenerationBatch, row: int) -> dict[str, Any]:
    """What the tape holds of one action's support."""
    ids, offsets = generations.support_token_ids, generations.support_offsets
    assert ids is not None
    assert offsets is not None
    own = offsets[generations.offsets[row] : generations.offsets[row + 1] + 1]
    return {
        "support_token_ids": [ids[own[0] : own[-1]].tolist()],
        "support_offsets": [(own - own[0]).tolist()],
    }


def write(tape: Tape, name: str, tokens: Sequence[int], *, context: Sequence[int] = (1, 2), **action: Any) -> None:
    writer = AttemptWriter(tape, name, problem_id="p")
    writer.add("rollout_dispatched", indexed=False, purpose="train", group_ordinal=0, group_size=1)
    writer.start(context)
    writer.act(tokens, **action)
    writer.end()
    writer.reward(float(len(tape.batches["rollout_ended"]) % 2))


def packed(tape: Tape, rules: BatchRules = SINGLE) -> PackedBatch:
    folded = fold(tape.tables())
    return pack_members(folded, plan_batch(folded, VERSIONS, rules).members, rules)


def step(batch: PackedBatch, model: nn.Module, temperature: float = 1.0, **options: Any) -> StepOutcome:
    config = TrainerConfig(**options)
    return train_step(Learner(model, make_optimizer(model, config)), batch, config, step=1, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_case_d7_with_its_support_the_ratio_of_1000_tokens_returns_to_1(
    tape: Tape, tmp_path: Path, temperature: float
) -> None:
    """Without it, it is each token's kept mass: no wrong sign, no lost token shows it, only a mean below 1."""
    model = sharp_model()
    sampling = SamplingConfig(temperature=temperature, top_p=0.8, max_tokens=NUM_TOKENS)
    asked, generations = generate(tmp_path, model, sampling)
    for row, (request, generation) in enumerate(zip(asked, generations, strict=True)):
        write(
            tape,
            f"t{row:02d}",
            generation.token_ids.tolist(),
            context=request.prompt_token_ids.tolist(),
            log_probs=generation.log_probs.tolist(),
            sampling=[{**LIMITED, "temperature": temperature}],
            **support_columns(generations, row),
        )
    batch = packed(tape)
    assert int(batch.action_mask.sum()) == 1000
    outcome = step(batch, model, temperature)
    log_ratio = (outcome.old_log_probs - batch.rollout_log_probs)[batch.action_mask].double()
    assert float(log_ratio.abs().max()) < MAX_DELTA
    assert float(log_ratio.exp().mean()) == pytest.approx(1.0, abs=1e-6)
    assert bool(outcome.trusted[batch.action_mask].all())
    found = probe(batch, outcome, beta=2.0)
    assert found.mean_abs_delta is not None
    assert found.mean_abs_delta < 1e-6
    unlimited = step(replace(batch, support=None), sharp_model(), temperature)
    ratio = (unlimited.old_log_probs - batch.rollout_log_probs)[batch.action_mask].double().exp()
    assert 0.8 <= float(ratio.mean()) < 0.95
    assert float(ratio.min()) > 0.79
    assert torch.equal(unlimited.entropy, outcome.entropy), "the entropy is of the whole distribution"


def test_supports_of_rows_lie_at_their_tokens_in_a_batch(tape: Tape) -> None:
    """Only those of tokens to train: not of context, of observations, or of what was sampled from everything."""
    write(tape, "a", [5, 6])
    writer = AttemptWriter(tape, "b", problem_id="p")
    writer.start([1, 2, 3])
    writer.act([5, 6], sampling=[LIMITED], support_token_ids=[[5, 9, 6]], support_offsets=[[0, 2, 3]])
    writer.observe([30])
    writer.act([7])
    masked = writer.act([8], sampling=[LIMITED], support_token_ids=[[2, 8]], support_offsets=[[0, 2]])
    writer.act([4], sampling=[LIMITED], support_token_ids=[[3, 4]], support_offsets=[[0, 2]])
    writer.end()
    writer.reward()
    writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": masked, "start": 0, "length": 1}]])
    batch = packed(tape)
    assert batch.action_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True] * 2 + [
        False,
        True,
        False,
        True,
    ]
    assert batch.support is not None
    counts = batch.support.offsets.diff().tolist()
    assert counts == [0] * 7 + [2, 1, 0, 0, 0, 2]
    assert batch.support.ids.tolist() == [5, 9, 6, 3, 4]
    twice = pack_twice(tape)
    assert twice.support is not None
    assert twice.support.offsets.diff().tolist() == counts[4:] * 2 + counts[:4]
    assert twice.support.ids.tolist() == [5, 9, 6, 3, 4] * 2
    assert batch.num_bytes > replace(batch, support=None).num_bytes


def pack_twice(tape: Tape) -> PackedBatch:
    """Row b, its padding copy, then row a."""
    order = [("b", False), ("b", True), ("a", False)]
    members = [
        Member(trajectory_id=name, attempt=0, group_id="g", group_ordinal=0, member=0, is_padding=padding)
        for name, padding in order
    ]
    return pack_members(fold(tape.tables()), members, SINGLE)


def test_a_batch_without_supports_has_none(tape: Tape) -> None:
    write(tape, "a", [5, 6])
    assert packed(tape).support is None


def test_a_token_that_is_not_in_its_support_is_not_trusted_and_counted(tape: Tape) -> None:
    """Whoever reported it: that log-prob cannot be of this token."""
    write(tape, "a", [5, 6], sampling=[LIMITED], support_token_ids=[[5, 7, 7, 8]], support_offsets=[[0, 2, 4]])
    write(tape, "b", [5, 6])
    batch = packed(tape)
    values = batch.rollout_log_probs[batch.action_mask]
    assert torch.isnan(values).tolist() == [False, True, False, False]
    assert batch.support is not None
    assert batch.support.offsets.diff().tolist() == [0, 0, 2, 0, 0, 0, 0, 0]
    model = build_model("char-64x2", 0)
    outcome = step(batch, model, algorithm="dis", epsilon_low=0.99, epsilon_high=1e6, adv_norm="mean")
    assert outcome.trusted[batch.action_mask].tolist() == [True, False, True, True]
    assert torch.isfinite(torch.tensor([outcome.loss, outcome.grad_norm])).all()
    found = probe(batch, outcome, beta=2.0)
    assert found.num_tokens == 3


def test_a_support_is_not_replayed_against_a_teacher(tape: Tape) -> None:
    """Its scores are over the whole vocabulary; a gap to a renormalised log-prob would carry the kept mass."""
    write(tape, "a", [5], sampling=[LIMITED], support_token_ids=[[5, 7]], support_offsets=[[0, 2]])
    write(tape, "b", [5])
    folded = fold(tape.tables())
    assert limited_supports(folded, SINGLE) == set()
    assert limited_supports(folded, BatchRules(teacher="scores")) == {("a", 0)}


def test_a_batch_that_cannot_be_replayed_is_refused_when_it_is_packed(tape: Tape) -> None:
    """As for the question what another method would have made of a recorded batch."""
    write(tape, "a", [5], sampling=[LIMITED], support_token_ids=[[5, 5]], support_offsets=[[0, 2]])
    member = Member(trajectory_id="a", attempt=0, group_id="g", group_ordinal=0, member=0)
    with pytest.raises(UntrainableError, match=r"limited_support: trajectory a attempt 0"):
        pack_members(fold(tape.tables()), [member], SINGLE)
    assert pack_members(fold(tape.tables()), [member], replace(SINGLE, needs_ratio=False)).num_rows == 1


@pytest.mark.parametrize("updates", [1, 2])
def test_any_cut_into_micro_batches_trains_the_same(tape: Tape, updates: int) -> None:
    """And scores its tokens over their supports."""
    for row in range(6):
        tokens = [5 + row, 6, 7, 8][: 2 + row % 3]
        kept = [sorted({token, 2 + place, 11}) for place, token in enumerate(tokens)]
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in kept])]).tolist()
        write(
            tape,
            f"t{row}",
            tokens,
            sampling=[LIMITED],
            support_token_ids=[[token for ids in kept for token in ids]],
            support_offsets=[offsets],
            log_probs=[-1.0] * len(tokens),
        )
    batch = packed(tape)
    options: dict[str, Any] = {"updates_per_batch": updates, "icepop_beta": 1e6}
    outcomes = [step(batch, build_model("char-64x2", 0), token_budget=budget, **options) for budget in (4, 11, 1000)]
    assert len({len(outcome.micro_batches) for outcome in outcomes}) == 3
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome.old_log_probs, outcomes[0].old_log_probs, atol=2e-6, rtol=0)
        assert outcome.loss == pytest.approx(outcomes[0].loss, abs=1e-6)
        assert outcome.grad_norm == pytest.approx(outcomes[0].grad_norm, rel=1e-4)
    assert outcomes[0].grad_norm > 0.01
    fresh = build_model("char-64x2", 0)
    with torch.no_grad():
        scored = packed_log_probs(
            fresh,
            batch.token_ids,
            batch.cu_seqlens,
            token_budget=1000,
            scored=batch.action_mask,
            support=batch.support,
        )
    torch.testing.assert_close(outcomes[2].old_log_probs, scored.log_probs, atol=2e-6, rtol=0)
