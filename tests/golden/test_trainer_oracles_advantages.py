"""Numbers of algorithms.md §4.1 (GRPO advantages) and of §4.6 (statistics after padding)."""

from __future__ import annotations

import pytest
import torch

from rolltape.trainers.advantages import group_advantages, group_statistics, token_advantages
from rolltape.trainers.groups import complete_groups


def advantages(*rewards: float, **options: object) -> list[float]:
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), groups, **options).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ((1, 0, 0, 1), {}, (0.866024, -0.866024, -0.866024, 0.866024)),
        ((1, 0, 0, 1), {"eps": 1e-4}, (0.865875, -0.865875, -0.865875, 0.865875)),
        ((1, 0, 0, 0), {}, (1.499997, -0.499999, -0.499999, -0.499999)),
        ((1, 0, 0, 0), {"norm": "mean"}, (0.75, -0.25, -0.25, -0.25)),
        ((1, 1, 1, 1), {}, (0, 0, 0, 0)),
        ((1, 1, 1, 1), {"norm": "mean"}, (0, 0, 0, 0)),
        ((1,) * 3 + (0,) * 29, {}, (3.060150,) * 3 + (-0.316567,) * 29),
    ],
)
def test_advantages(rewards: tuple[float, ...], options: dict[str, object], expected: tuple[float, ...]) -> None:
    assert advantages(*rewards, **options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "population"),
    [((1, 0, 0, 1), (1, -1)), ((1, 0, 0, 0), (1.732051, -0.577350)), ((1,) * 3 + (0,) * 29, (3.109126, -0.321634))],
)
def test_the_deviation_is_the_samples_not_the_populations(
    rewards: tuple[float, ...], population: tuple[float, float]
) -> None:
    """The spec's ddof 0 figures, which ours must not be: they are ours times sqrt(n / (n - 1))."""
    n = len(rewards)
    ours = advantages(*rewards, eps=0.0)
    assert ours[0] * (n / (n - 1)) ** 0.5 == pytest.approx(population[0], abs=1e-6)
    assert min(ours) * (n / (n - 1)) ** 0.5 == pytest.approx(population[1], abs=1e-6)
    assert abs(ours[0] - population[0]) > 0.01


def test_equal_rewards_give_exactly_zero() -> None:
    assert advantages(1.0, 1.0, 1.0, 1.0) == [0.0] * 4
    # Spread by rounding only: 0.1 + 0.2 against 0.3.
    assert advantages(0.1 + 0.2, 0.3, 0.3) == [0.0] * 3
    # Relative to the mean where that is large.
    assert advantages(1e6, 1e6 + 0.5) == [0.0] * 2
    assert advantages(0.0, 2e-6) != [0.0] * 2


def test_padding_changes_the_baseline() -> None:
    rewards = torch.tensor([1, 0, 0, 0, 1, 0, 1, 0], dtype=torch.float64)
    valid = torch.tensor([True, True, True, False, True, False, True, False])
    plan = complete_groups(torch.zeros(8, dtype=torch.int64), torch.full((8,), 8), valid)
    padded = rewards[plan.member_index]
    groups = torch.zeros(8, dtype=torch.int64)
    assert padded.tolist() == [1, 0, 0, 1, 1, 1, 0, 0]
    statistics = group_statistics(padded, groups)
    assert float(statistics.mean[0]) == 0.5
    assert group_advantages(padded, groups).abs().tolist() == pytest.approx([0.935413] * 8, abs=1e-6)
    valid_only = group_advantages(padded, groups, counted=~plan.is_padding)
    assert float(group_statistics(padded, groups, counted=~plan.is_padding).mean[0]) == pytest.approx(0.6)
    expected = [0.730295 if reward else -1.095443 for reward in padded.tolist()]
    assert valid_only.tolist() == pytest.approx(expected, abs=1e-6)


def test_groups_are_told_apart_by_number_not_by_place() -> None:
    """The same members, interleaved and of uneven sizes: a reshape would mix them."""
    rewards = torch.tensor([1, 5, 0, 0, 7, 1], dtype=torch.float64)
    groups = torch.tensor([0, 1, 0, 0, 1, 0])
    result = group_advantages(rewards, groups)
    assert result[groups == 0].tolist() == pytest.approx(advantages(1, 0, 0, 1))
    assert result[groups == 1].tolist() == pytest.approx(advantages(5, 7))


def test_every_token_of_a_member_has_its_advantage() -> None:
    result = token_advantages(torch.tensor([0.5, -1.0]), torch.tensor([0, 0, 1, 0]))
    assert result.tolist() == [0.5, 0.5, -1.0, 0.5]
