"""Every method's step over two ranks is the step of one process, the critic's included."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import pytest
import torch
from tests.integration.distributed.ranks import Ranks as Processes
from tests.methods import CONFIGS, TEMPERATURE, batch, gradients, learner, reordered, scorers
from torch import Tensor

from rolltape.numerics.weights import named_weights
from rolltape.schema.errors import ConfigError
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic_model import CriticCounts, compute_dtype
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.ranks import ONE_PROCESS, Ranks
from rolltape.trainers.sharded import ShardedRanks
from rolltape.trainers.step import StepOutcome, train_step

ROWS = [7, 2, 9, 0, 5, 3, 8, 1, 6, 4]
MEMBERS = [4, 1, 5, 0, 3, 2]


class Found(NamedTuple):
    """What a step computed, whole."""

    outcome: StepOutcome
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    counts: CriticCounts | None


def sharded(made: Learner, config: TrainerConfig) -> Ranks:
    """Shard a learner's models in place; its optimizers are made anew, over the shards."""
    critic = made.critic
    ranks = ShardedRanks(
        made.model, critic=None if critic is None else critic.model, compute_dtype=compute_dtype(config)
    )
    made.optimizer = make_optimizer(made.model, config)
    if critic is not None:
        critic.optimizer = make_optimizer(critic.model, config, lr=config.critic_lr)
    return ranks


def run_step(config: TrainerConfig, *, is_sharded: bool, is_reordered: bool, steps: int = 1) -> Found:
    """Steps in this process, or as one of the ranks."""
    made = learner(config)
    ranks = sharded(made, config) if is_sharded else ONE_PROCESS
    on = reordered(batch(), ROWS, MEMBERS) if is_reordered else batch()
    outcomes = [
        train_step(made, on, config, step=number, temperature=TEMPERATURE, ranks=ranks, scorers=scorers())
        for number in range(1, steps + 1)
    ]
    weights = dict(named_weights(made.model))
    if made.critic is not None:
        weights |= {f"critic/{name}": weight for name, weight in named_weights(made.critic.model).items()}
    whole = ranks.whole(weights)
    return Found(
        outcomes[-1],
        gradients(made, ranks),
        {name: whole[name].clone() for name in whole},
        None if made.critic is None else made.critic.counts,
    )


def on_a_rank(config: TrainerConfig, is_reordered: bool = False, steps: int = 1) -> Found:
    return run_step(config, is_sharded=True, is_reordered=is_reordered, steps=steps)


@cache
def alone(config: TrainerConfig) -> Found:
    return run_step(config, is_sharded=False, is_reordered=False)


def assert_same(found: Found, expected: Found) -> None:
    assert found.outcome.loss == pytest.approx(expected.outcome.loss, abs=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.weights.keys() == expected.weights.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, atol=1e-6, rtol=1e-5)
    assert found.counts == expected.counts
    ours, theirs = found.outcome.critic, expected.outcome.critic
    if theirs is not None:
        assert ours is not None
        assert ours.losses == pytest.approx(theirs.losses, abs=1e-6)
        assert ours.explained_variance == pytest.approx(theirs.explained_variance, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_find_what_one_process_finds(two_ranks: Processes, name: str) -> None:
    """In six micro-batches or so, and with rows and members in another order; both updates of a critic."""
    config = dataclasses.replace(CONFIGS[name], critic_lr=TrainerConfig().critic_lr, token_budget=24)
    expected = alone(config)
    assert len(expected.outcome.micro_batches) > 2
    found = two_ranks.run(on_a_rank, config)
    for result in found:
        assert_same(result, expected)
        for part in ("current_log_probs", "entropy", "advantages", "gate_weights"):
            torch.testing.assert_close(
                getattr(result.outcome, part), getattr(expected.outcome, part), atol=1e-6, rtol=1e-6, equal_nan=True
            )
        for part, values in expected.outcome.parts.items():
            torch.testing.assert_close(result.outcome.parts[part], values, atol=1e-6, rtol=1e-6, equal_nan=True)
        assert torch.equal(result.outcome.trusted, expected.outcome.trusted)
    assert found[0].outcome.loss_bits == found[1].outcome.loss_bits
    assert found[0].outcome.gradient_digests == found[1].outcome.gradient_digests
    assert found[0].outcome.weight_digests == found[1].outcome.weight_digests
    for result in two_ranks.run(on_a_rank, config, True):
        assert_same(result, expected)


@pytest.mark.parametrize("name", ["sao", "compaction"])
def test_a_critic_on_two_ranks_learns_all_that_one_does(two_ranks: Processes, name: str) -> None:
    """Warm-up, two updates a step, a normaliser that rescales a sharded head, truncated ends, values read again."""
    config = dataclasses.replace(
        CONFIGS[name],
        critic_warmup_steps=1,
        token_budget=24,
        lr=1e-6,
        critic_lr=1e-5,
        value_norm=True,
        value_norm_rate=0.5,
        bootstrap_truncated=True,
        advantage_values="post_update",
        max_grad_norm=1.0,
    )
    expected = run_step(config, is_sharded=False, is_reordered=False, steps=3)
    for result in two_ranks.run(on_a_rank, config, False, 3):
        assert result.counts == expected.counts
        for key, weight in expected.weights.items():
            # Adam takes a gradient's sign: where that is noise, weights differ by as much as they move.
            torch.testing.assert_close(result.weights[key], weight, atol=2e-4 if "critic/" in key else 1e-5, rtol=0.0)
        assert expected.outcome.critic is not None
        assert result.outcome.critic is not None
        torch.testing.assert_close(result.outcome.critic.values, expected.outcome.critic.values, atol=1e-3, rtol=0.0)
        torch.testing.assert_close(result.outcome.advantages, expected.outcome.advantages, atol=1e-3, rtol=0.0)
        frozen = {key for key in expected.weights if key.startswith("critic/") and "attn" in key}
        start = learner(config)
        assert start.critic is not None
        first = named_weights(start.critic.model)
        assert frozen
        assert all(torch.equal(result.weights[key], first[key.removeprefix("critic/")]) for key in frozen)


@pytest.mark.parametrize("name", ["opd-full", "sao"])
def test_bfloat16_for_computing_is_the_same_on_two_ranks(two_ranks: Processes, name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], compute_dtype="bfloat16", critic_updates=1, token_budget=1000)
    expected = alone(config)
    for result in two_ranks.run(on_a_rank, config):
        assert result.outcome.current_log_probs.dtype == torch.float32
        torch.testing.assert_close(
            result.outcome.current_log_probs, expected.outcome.current_log_probs, atol=1e-6, rtol=0.0
        )
        assert all(weight.dtype == torch.float32 for weight in result.weights.values())


def error_of_another_type() -> str:
    config = CONFIGS["grpo"]
    made = learner(config)
    ranks = ShardedRanks(made.model)
    try:
        ranks.forward(made.model, lambda model: torch.zeros(len(list(model.parameters()))), dtype=torch.bfloat16)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_are_made_for_one_type(two_ranks: Processes) -> None:
    for message in two_ranks.run(error_of_another_type):
        assert "compute_dtype: expected None" in message
