"""Numbers of algorithms.md §4.5 (staleness) and §4.6 (group completeness)."""

from __future__ import annotations

import pytest
import torch

from rolltape.schema import reasons
from rolltape.trainers.groups import GroupPlan, PadRule, complete_groups
from rolltape.trainers.staleness import is_fresh, lag_histogram, trajectory_lags, version_refusal

VERSIONS = torch.tensor([17, 18, 19])


@pytest.mark.parametrize(("reference", "tau", "kept"), [(19, 2, True), (20, 2, False), (19, 1, False)])
def test_staleness(reference: int, tau: int, kept: bool) -> None:
    lags = trajectory_lags(VERSIONS, torch.zeros(3, dtype=torch.int64), 1, reference)
    assert is_fresh(lags, tau).tolist() == [kept]
    assert version_refusal(17, 19, reference=reference, tau=tau) == (None if kept else reasons.STALE)


def test_token_lag_histogram() -> None:
    histogram = lag_histogram(20 - torch.tensor([17, 17, 18, 19]))
    assert histogram == {3: 2, 2: 1, 1: 1}
    assert list(histogram) == [3, 2, 1]


def plan(size: int, num_valid: int, rule: PadRule = "gt_half") -> GroupPlan:
    valid = torch.arange(size) < num_valid
    return complete_groups(torch.zeros(size, dtype=torch.int64), torch.full((size,), size), valid, pad_rule=rule)


@pytest.mark.parametrize(
    ("size", "num_valid", "rule", "used"),
    [
        (8, 8, "gt_half", True),
        (8, 5, "gt_half", True),
        (8, 4, "gt_half", False),
        (8, 4, "ge_half", True),
        (8, 3, "gt_half", False),
        (8, 3, "ge_half", False),
        (5, 3, "gt_half", True),
        (5, 3, "ge_half", True),
        (5, 2, "ge_half", False),
        (8, 0, "ge_half", False),
        (1, 0, "ge_half", False),
    ],
)
def test_pad_or_drop(size: int, num_valid: int, rule: PadRule, used: bool) -> None:
    result = plan(size, num_valid, rule)
    assert result.member_index.numel() == (size if used else 0)
    assert result.dropped_groups.tolist() == ([] if used else [0])
    assert int(result.is_padding.sum()) == (size - num_valid if used else 0)
    assert result.padded_groups.tolist() == ([0] if used and num_valid < size else [])


def test_padding_repeats_round_robin_in_ascending_order() -> None:
    valid = torch.tensor([True, False, True, True, False, True, False, True])
    result = complete_groups(torch.zeros(8, dtype=torch.int64), torch.full((8,), 8), valid)
    assert result.member_index.tolist() == [0, 2, 3, 5, 7, 0, 2, 3]
    assert result.is_padding.tolist() == [False] * 5 + [True] * 3
