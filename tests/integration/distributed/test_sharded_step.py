"""A training step over two ranks is the step of one process: loss, gradients, tokens, new weights (issue's 1e-6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.integration.distributed.ranks import Ranks as Processes
from torch import Tensor

from rolltape.numerics.models import ModelSpec, build_model
from rolltape.numerics.packed import MicroBatch, micro_batches, packed_log_probs
from rolltape.numerics.support import TokenSupport
from rolltape.numerics.weights import named_gradients, named_weights
from rolltape.schema.errors import ConfigError
from rolltape.trainers.batch import PackedBatch, TokenRewards
from rolltape.trainers.compute import decoder_blocks
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.ranks import ONE_PROCESS, Ranks
from rolltape.trainers.sharded import ShardedRanks, broadcast_batch, recompute_blocks
from rolltape.trainers.step import StepOutcome, train_step

CONTEXTS = (3, 2, 4, 1, 3, 2, 5)
RESPONSES = (4, 1, 6, 3, 2, 5, 0)
CONFIG = TrainerConfig(entropy_coef=0.01, token_budget=10, icepop_beta=1.3, max_grad_norm=1e9, lr=1e-3)
MODEL = "char-64x2"


class Options(NamedTuple):
    """How a step is run."""

    order: tuple[int, ...] = tuple(range(7))
    recompute: bool = False
    compute_dtype: torch.dtype | None = None
    model_dtype: str = "float32"
    limited: bool = False  # every token was sampled from a part of the vocabulary


class Found(NamedTuple):
    """What a step computed, whole."""

    outcome: StepOutcome
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


@cache
def batch() -> PackedBatch:
    """Seven rows in two groups, one without a response, one with an observation; a gate takes some and rejects some."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(CONTEXTS) + torch.tensor(RESPONSES)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(3, 16, (int(bounds[-1]),), generator=generator, dtype=torch.int32)
    action = torch.cat([torch.arange(a + b) >= a for a, b in zip(CONTEXTS, RESPONSES, strict=True)])
    action[4] = False
    with torch.no_grad():
        own = packed_log_probs(build_model(MODEL, 1), ids, bounds, token_budget=1000).log_probs
    noise = 0.3 * torch.randn(len(ids), generator=generator)
    return PackedBatch(
        token_ids=ids,
        cu_seqlens=bounds,
        context_lengths=torch.tensor(CONTEXTS),
        action_mask=action,
        rollout_log_probs=torch.where(action, own + noise, 0.0).clamp(max=0.0),
        policy_versions=torch.where(action, 0, -1).int(),
        row_member=torch.arange(7),
        rewards=torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        groups=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        is_padding=torch.zeros(7, dtype=torch.bool),
    )


def reordered(order: tuple[int, ...]) -> PackedBatch:
    """The same batch with its rows (and members) in another order."""
    whole, rows = batch(), list(order)
    bounds = whole.cu_seqlens.tolist()
    index = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in rows])
    changes: dict[str, Any] = {
        name: getattr(whole, name)[index]
        for name in ("token_ids", "action_mask", "rollout_log_probs", "policy_versions")
    }
    changes["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), whole.cu_seqlens.diff()[rows].cumsum(0)])
    for name in ("context_lengths", "rewards", "groups"):
        changes[name] = getattr(whole, name)[rows]
    return dataclasses.replace(whole, **changes)


def support_of(ids: Tensor) -> TokenSupport:
    """Of every token: itself and the next two ids."""
    kept = torch.stack([ids, (ids + 1) % 16, (ids + 2) % 16], 1).flatten()
    return TokenSupport(ids=kept, offsets=torch.arange(len(ids) + 1) * 3)


def run_step(config: TrainerConfig, options: Options, *, sharded: bool) -> Found:
    """One step, in this process or as one of the ranks."""
    spec = ModelSpec(name=MODEL, family="char", dtype=options.model_dtype)  # type: ignore[arg-type]
    model = build_model(spec, 1)
    if options.recompute:
        recompute_blocks(model)
    ranks: Ranks = ShardedRanks(model, compute_dtype=options.compute_dtype) if sharded else ONE_PROCESS
    optimizer = make_optimizer(model, config)
    packed = reordered(options.order)
    if options.limited:
        packed = dataclasses.replace(packed, support=support_of(packed.token_ids))
    outcome = train_step(Learner(model, optimizer), packed, config, step=1, temperature=0.9, ranks=ranks)
    gradients, weights = (dict(ranks.whole(named(model))) for named in (named_gradients, named_weights))
    return Found(outcome, *({k: v.clone() for k, v in part.items()} for part in (gradients, weights)))


def on_a_rank(config: TrainerConfig, options: Options) -> Found:
    return run_step(config, options, sharded=True)


@cache
def alone(config: TrainerConfig, options: Options = Options()) -> Found:  # noqa: B008  # immutable
    return run_step(config, options, sharded=False)


def assert_same(found: Found, expected: Found, tolerance: float = 1e-6) -> None:
    for name in ("loss", "grad_norm"):
        assert getattr(found.outcome, name) == pytest.approx(getattr(expected.outcome, name), abs=tolerance), name
    for name in ("old_log_probs", "current_log_probs", "entropy", "advantages", "gate_weights", "member_advantages"):
        torch.testing.assert_close(
            getattr(found.outcome, name), getattr(expected.outcome, name), atol=tolerance, rtol=tolerance
        )
    assert torch.equal(found.outcome.trusted, expected.outcome.trusted)
    assert found.outcome.skipped == expected.outcome.skipped
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("token_budget", [1, 10, 24, 1000])
@pytest.mark.parametrize("algorithm", ["grpo", "dis"])
def test_two_ranks_find_what_one_process_finds(two_ranks: Processes, token_budget: int, algorithm: Any) -> None:
    """With 6, 5, 3 and 1 micro-batches: ranks with as many, and a rank that lacks one, or has none."""
    config = CONFIG.with_algorithm(
        algorithm,
        token_budget=token_budget,
        epsilon_low=0.2,
        epsilon_high=0.28,
        aggregation="seq_mean",
        adv_norm="mean_std",
    )
    expected = alone(config)
    assert 0 < int(expected.outcome.trusted.sum()) < int(batch().action_mask.sum())
    found = two_ranks.run(on_a_rank, config, Options())
    for result in found:
        assert result.outcome.micro_batches == expected.outcome.micro_batches
        assert_same(result, expected)
    # What goes onto the tape is the same to the bit, whichever rank writes it.
    assert found[0].outcome.loss_bits == found[1].outcome.loss_bits
    assert found[0].outcome.gradient_digests == found[1].outcome.gradient_digests
    assert found[0].outcome.weight_digests == found[1].outcome.weight_digests


def test_two_ranks_score_over_the_same_supports(two_ranks: Processes) -> None:
    config = dataclasses.replace(CONFIG, icepop_beta=1e3)
    expected = alone(config, Options(limited=True))
    assert bool(expected.outcome.trusted.any())
    assert not torch.equal(expected.outcome.old_log_probs, alone(config).outcome.old_log_probs)
    for result in two_ranks.run(on_a_rank, config, Options(limited=True)):
        assert_same(result, expected)


@pytest.mark.parametrize("token_budget", [10, 24])
def test_neither_row_order_nor_micro_batches_matter_on_two_ranks(two_ranks: Processes, token_budget: int) -> None:
    order = (5, 2, 6, 0, 4, 1, 3)
    config = dataclasses.replace(CONFIG, token_budget=token_budget)
    expected = alone(dataclasses.replace(CONFIG, token_budget=1000))
    for result in two_ranks.run(on_a_rank, config, Options(order=order)):
        assert result.outcome.loss == pytest.approx(expected.outcome.loss, abs=1e-6)
        assert result.outcome.grad_norm == pytest.approx(expected.outcome.grad_norm, abs=1e-6)
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(result.gradients[name], gradient, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean", "seq_sum", "rollout_mean"])
def test_ranks_agree_on_the_denominators_of_the_whole_batch(two_ranks: Processes, aggregation: Any) -> None:
    """Ranks have unequal numbers of rows and tokens: means of their means would be another loss."""
    config = dataclasses.replace(CONFIG, aggregation=aggregation, token_budget=24)
    for result in two_ranks.run(on_a_rank, config, Options()):
        assert_same(result, alone(config))


def test_several_updates_agree(two_ranks: Processes) -> None:
    """θ_old's log-probs are shared as well; the second update starts from weights that agree to 1e-6."""
    config = dataclasses.replace(CONFIG, updates_per_batch=3)
    for result in two_ranks.run(on_a_rank, config, Options()):
        assert_same(result, alone(config), tolerance=2e-5)


def test_gradients_are_clipped_by_the_norm_over_all_ranks(two_ranks: Processes) -> None:
    config = dataclasses.replace(CONFIG, max_grad_norm=0.05)
    assert alone(config).outcome.grad_norm > config.max_grad_norm
    for result in two_ranks.run(on_a_rank, config, Options()):
        assert_same(result, alone(config))
        norm = torch.stack([gradient.double().square().sum() for gradient in result.gradients.values()]).sum().sqrt()
        assert float(norm) == pytest.approx(config.max_grad_norm, rel=1e-4)


def test_nothing_moves_where_nothing_is_trusted(two_ranks: Processes) -> None:
    config = dataclasses.replace(CONFIG, icepop_beta=1.0)
    expected = alone(config)
    assert expected.outcome.skipped
    start = named_weights(build_model(MODEL, 1))
    for result in two_ranks.run(on_a_rank, config, Options()):
        assert result.outcome.skipped
        assert all(torch.equal(result.weights[name], start[name]) for name in start)


def test_recomputing_blocks_changes_no_bit(two_ranks: Processes) -> None:
    plain = alone(CONFIG)
    again = alone(CONFIG, Options(recompute=True))
    assert again.outcome.gradient_digests == plain.outcome.gradient_digests
    sharded = two_ranks.run(on_a_rank, CONFIG, Options())
    for one, other in zip(sharded, two_ranks.run(on_a_rank, CONFIG, Options(recompute=True)), strict=True):
        assert one.outcome.gradient_digests == other.outcome.gradient_digests


def test_bfloat16_for_computing_leaves_float32_weights_and_log_probs(two_ranks: Processes) -> None:
    """Log-probs come out in float32, near those of float32 parameters, and equal to bfloat16 parameters' elsewhere."""
    expected, rounded = alone(CONFIG), alone(CONFIG, Options(model_dtype="bfloat16"))
    for result in two_ranks.run(on_a_rank, CONFIG, Options(compute_dtype=torch.bfloat16)):
        assert result.outcome.current_log_probs.dtype == torch.float32
        assert all(weight.dtype == torch.float32 for weight in result.weights.values())
        assert all(gradient.dtype == torch.float32 for gradient in result.gradients.values())
        torch.testing.assert_close(
            result.outcome.current_log_probs, rounded.outcome.current_log_probs, atol=1e-6, rtol=0.0
        )
        torch.testing.assert_close(
            result.outcome.current_log_probs, expected.outcome.current_log_probs, atol=0.05, rtol=0.05
        )
        assert not torch.equal(result.outcome.current_log_probs, expected.outcome.current_log_probs)


def shards_of_a_step() -> tuple[int, int, int]:
    """Elements of parameters, gradients and moments that this rank holds after a step."""
    model = build_model(MODEL, 1)
    ranks = ShardedRanks(model)
    optimizer = make_optimizer(model, CONFIG)
    train_step(Learner(model, optimizer), batch(), CONFIG, step=1, temperature=1.0, ranks=ranks)
    parameters = list(model.parameters())
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return tuple(  # type: ignore[return-value]
        sum(ranks.local(tensor).numel() for tensor in tensors) for tensors in (parameters, gradients, moments)
    )


def test_each_rank_holds_half_of_parameters_gradients_and_moments(two_ranks: Processes) -> None:
    whole = sum(parameter.numel() for parameter in build_model(MODEL, 1).parameters())
    held = two_ranks.run(shards_of_a_step)
    for numbers in zip(*held, strict=True):
        assert sum(numbers) == whole
        assert max(numbers) < 0.52 * whole


def batch_of_rank_0() -> PackedBatch:
    return broadcast_batch(batch() if dist.get_rank() == 0 else None)


def test_a_batch_that_one_rank_formed_reaches_all(two_ranks: Processes) -> None:
    for found in two_ranks.run(batch_of_rank_0):
        for item in dataclasses.fields(PackedBatch):
            ours, theirs = getattr(found, item.name), getattr(batch(), item.name)
            if isinstance(theirs, TokenRewards):
                ours, theirs = ours.amounts, theirs.amounts
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs, item.name


def own_rows(token_budget: int) -> list[list[int]]:
    ranks = ShardedRanks(build_model(MODEL, 1))
    whole = batch()
    parts = micro_batches(whole.token_ids, whole.cu_seqlens, token_budget=token_budget, scored=whole.action_mask)
    return [part.rows.tolist() for part in ranks.own_parts(parts)]


def test_micro_batches_are_dealt_out_and_an_empty_one_fills_up(two_ranks: Processes) -> None:
    whole = batch()
    for token_budget, empty in ((1, 0), (24, 1), (1000, 1)):
        parts = micro_batches(whole.token_ids, whole.cu_seqlens, token_budget=token_budget, scored=whole.action_mask)
        expected = [part.rows.tolist() for part in parts]
        first, second = two_ranks.run(own_rows, token_budget)
        assert len(first) == len(second)
        assert [rows for pair in zip(first, second, strict=True) for rows in pair] == expected + [[]] * empty


def score_another_model() -> str:
    ranks = ShardedRanks(build_model(MODEL, 1))
    nothing = torch.zeros(0, dtype=torch.int64)
    part = MicroBatch(
        rows=nothing,
        input_ids=torch.zeros((1, 1), dtype=torch.int64),
        source=nothing,
        targets=nothing,
        flat_index=nothing,
    )
    try:
        ranks.score(build_model(MODEL, 1), part, temperature=1.0)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_model_that_was_not_sharded_is_refused(two_ranks: Processes) -> None:
    for message in two_ranks.run(score_another_model):
        assert "got another model" in message


def test_without_a_process_group_sharding_is_refused() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        ShardedRanks(build_model(MODEL, 1))


def test_blocks_to_recompute_must_exist() -> None:
    model = build_model(MODEL, 1)
    assert len(decoder_blocks(model.base_model)) == 2  # type: ignore[arg-type]
    model.base_model.h = torch.nn.Identity()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="decoder blocks"):
        recompute_blocks(model)
