"""GRPO's advantages and generalised advantages: verl's numbers."""

from __future__ import annotations

import pytest
import torch
from tests.oracles.batches import assert_agree, random_batch
from tests.oracles.peers import Peers
from torch import Tensor

from rolltape.schema.errors import UntrainableError
from rolltape.trainers.advantages import Norm, group_advantages, token_advantages
from rolltape.trainers.gae import credited_rewards, generalised_advantages, value_targets, whitened

SEEDS = range(3)


def verl_grpo(
    peers: Peers, rewards: Tensor, groups: Tensor, norm: Norm = "mean_std", *, vectorized: bool = False
) -> Tensor:
    """``[M]``."""
    answer = peers.ask(
        "verl_grpo",
        rewards=rewards[:, None],
        mask=torch.ones(len(rewards), 1, dtype=rewards.dtype),
        groups=groups,
        by_std=norm == "mean_std",
        vectorized=vectorized,
    )
    advantages: Tensor = answer["advantages"][:, 0]
    return advantages


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", ["mean_std", "mean"])
@pytest.mark.parametrize("vectorized", [False, True])
def test_group_advantages_are_verls(peers: Peers, seed: int, norm: Norm, vectorized: bool) -> None:
    """Groups of 2 to 6 members, in any order; verl's vectorised form works in float32, which 1e-6 allows here."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 7, (5,), generator=generator)
    groups = torch.repeat_interleave(torch.arange(5), sizes)
    groups = groups[torch.randperm(len(groups), generator=generator)]
    rewards = torch.randn(len(groups), generator=generator, dtype=torch.float64)
    found = group_advantages(rewards, groups, norm=norm)
    assert_agree(found, verl_grpo(peers, rewards, groups, norm, vectorized=vectorized))


@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages_of_rewards_of_0_and_1_are_verls(peers: Peers, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(4).repeat(8)
    rewards = (torch.rand(32, generator=generator) < 0.4).double()
    assert_agree(group_advantages(rewards, groups), verl_grpo(peers, rewards, groups))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rollouts_tokens_share_its_advantage_in_both(peers: Peers, seed: int) -> None:
    batch = random_batch(seed)
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    rewards = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    last = torch.zeros_like(batch.mask).index_put((torch.arange(6), batch.mask.cumsum(1).argmax(1)), rewards)
    answer = peers.ask("verl_grpo", rewards=last, mask=batch.mask, groups=groups, by_std=True, vectorized=False)
    assert_agree(token_advantages(group_advantages(rewards, groups), batch.rows), batch.flat(answer["advantages"]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.9, 1.0)])
def test_returns_and_whitened_advantages_are_verls(peers: Peers, seed: int, gamma: float, lam: float) -> None:
    """Observations are skipped by both: neither their values nor their number matter. Rewards at several tokens."""
    batch = random_batch(seed)
    rewards = batch.mask * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    answer = peers.ask("verl_gae", rewards=rewards, values=batch.values, mask=batch.mask, gamma=gamma, lam=lam)
    values, flat = batch.flat(batch.values), batch.flat(rewards)
    assert not bool(batch.actions.all())
    found = generalised_advantages(values, flat, batch.rows, gamma=gamma, lam=lam)
    assert_agree(found + values, batch.flat(answer["returns"]))
    assert_agree(value_targets(values, flat, batch.rows, gamma=gamma, critic_lam=lam), batch.flat(answer["returns"]))
    assert_agree(whitened(found), batch.flat(answer["advantages"]))


# On purpose


def test_a_group_of_one_is_refused_where_verl_trains_on_the_raw_reward(peers: Peers) -> None:
    """A group estimator cannot compare one rollout with itself; its reward is not an advantage (§2.5)."""
    rewards, groups = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64), torch.tensor([0, 1, 1])
    assert verl_grpo(peers, rewards, groups)[0] == pytest.approx(3.0, abs=1e-5)
    with pytest.raises(UntrainableError, match="group_of_one"):
        group_advantages(rewards, groups)


def test_equal_rewards_give_exactly_nothing_where_verl_divides_float_noise(peers: Peers) -> None:
    """D4: rewards that are equal but for rounding have no variance. Divided by it, noise becomes a signal."""
    groups = torch.zeros(3, dtype=torch.int64)
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64) + 1e-7 * torch.tensor([1.0, 0.0, 0.0])
    assert float(verl_grpo(peers, rewards, groups).abs().max()) > 0.05
    assert group_advantages(rewards, groups).tolist() == [0.0, 0.0, 0.0]


def test_a_reward_at_an_observation_is_credited_where_verl_drops_it(peers: Peers) -> None:
    """It arrives with the environment's answer, and belongs to the last action token before it (§4.11)."""
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    values = torch.zeros_like(mask)
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    answer = peers.ask("verl_gae", rewards=rewards, values=values, mask=mask, gamma=1.0, lam=1.0)
    assert answer["returns"][0, :2].tolist() == [0.0, 0.0]
    rows = torch.tensor([0, 0])
    credited = credited_rewards(torch.ones(1), torch.tensor([0]), torch.tensor([2]), rows, torch.tensor([0, 1]))
    assert value_targets(values[0, :2], credited, rows, gamma=1.0).tolist() == [1.0, 1.0]


def test_advantages_are_not_whitened_unless_asked(peers: Peers) -> None:
    """D13 and §4.11: SAO does not say so. verl always whitens: its advantages of a batch have mean 0."""
    batch = random_batch(3)
    rewards = batch.mask * 0.5
    answer = peers.ask("verl_gae", rewards=rewards, values=batch.values, mask=batch.mask, gamma=1.0, lam=0.9)
    plain = generalised_advantages(batch.flat(batch.values), batch.flat(rewards), batch.rows, gamma=1.0, lam=0.9)
    assert abs(float(batch.flat(answer["advantages"]).mean())) < 1e-9
    assert abs(float(plain.mean())) > 0.1
