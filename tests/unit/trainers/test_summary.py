"""Metrics of a step that the batch itself decides: staleness, versions, rewards."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from rolltape.schema.render import arrow_schema
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.summary import _version_metrics, component_metrics


def batch(versions: list[list[int]], row_member: list[int]) -> PackedBatch:
    """Rows of action tokens behind one context token each."""
    lengths = torch.tensor([len(row) + 1 for row in versions])
    flat = [value for row in versions for value in (-1, *row)]
    members = max(row_member) + 1
    return PackedBatch(
        token_ids=torch.zeros(len(flat), dtype=torch.int32),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        context_lengths=torch.ones(len(versions), dtype=torch.int64),
        action_mask=torch.tensor(flat) >= 0,
        rollout_log_probs=torch.zeros(len(flat)),
        policy_versions=torch.tensor(flat, dtype=torch.int32),
        row_member=torch.tensor(row_member),
        rewards=torch.zeros(members, dtype=torch.float64),
        groups=torch.zeros(members, dtype=torch.int64),
        is_padding=torch.zeros(members, dtype=torch.bool),
    )


def test_token_lag_histogram_of_the_specification() -> None:
    metrics = _version_metrics(batch([[17, 17, 18, 19]], [0]), 20)
    assert {key: value for key, value in metrics.items() if key.startswith("token_lag/")} == {
        "token_lag/3": 2.0,
        "token_lag/2": 1.0,
        "token_lag/1": 1.0,
    }
    assert metrics["trajectory_lag/3"] == 1.0
    assert metrics["versions_per_trajectory_max"] == 3.0


def test_a_trajectory_is_as_old_as_its_oldest_token_in_any_segment() -> None:
    metrics = _version_metrics(batch([[19], [18, 19], [20]], [0, 0, 1]), 20)
    assert {key: value for key, value in metrics.items() if key.startswith("trajectory_lag/")} == {
        "trajectory_lag/2": 1.0,
        "trajectory_lag/0": 1.0,
    }
    assert metrics["versions_per_trajectory_mean"] == 1.5


def test_lags_are_counted_in_updates_of_the_optimizer_too() -> None:
    """D26: two published versions may lie any number of updates apart."""
    updates_at = {17: 40, 18: 42, 19: 42, 20: 45}
    metrics = _version_metrics(batch([[17, 17, 18, 19]], [0]), 20, updates_at)
    assert metrics["optimizer_lag_max"] == 5.0
    assert metrics["optimizer_lag_mean"] == (5 + 5 + 3 + 3) / 4
    assert "optimizer_lag_max" not in _version_metrics(batch([[17]], [0]), 20, {20: 45})


def rewarded(*parts: dict[str, float]) -> pa.Table:
    rows = [
        {
            "kind": "reward_assigned",
            "reward_assigned": {"components": [{"name": n, "value": v, "status": "ok"} for n, v in part.items()]},
        }
        for part in parts
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema("reward_assigned"))


def test_components_that_part_company_are_seen_in_any_order_of_rows() -> None:
    """§4.13: the spread of each, and the correlation of any two over the rollouts that have both."""
    parts = [
        {"rule": 1.0, "judge": 0.25, "flat": 0.5},
        {"judge": 0.5, "rule": 0.0, "flat": 0.5},
        {"rule": 1.0, "judge": 0.1, "flat": 0.5},
        {"judge": 0.9},
    ]
    metrics = component_metrics(rewarded(*parts))
    assert metrics["reward_component_std/rule"] == pytest.approx(np.std([1.0, 0.0, 1.0]))
    both = np.corrcoef([1.0, 0.0, 1.0], [0.25, 0.5, 0.1])[0, 1]
    assert both < -0.8
    assert metrics["reward_component_corr/judge~rule"] == pytest.approx(both)
    assert not any("flat" in name for name in metrics if "corr" in name)
    assert component_metrics(rewarded(*parts[::-1])) == metrics


def test_the_order_of_rows_is_not_in_the_last_bit() -> None:
    rng = np.random.default_rng(5)
    parts = [{"a": float(a), "b": float(b), "flat": 0.1} for a, b in rng.random((40, 2))]
    expected = component_metrics(rewarded(*parts))
    assert not any("flat" in name for name in expected if "corr" in name)
    for _ in range(20):
        assert component_metrics(rewarded(*(parts[place] for place in rng.permutation(len(parts))))) == expected


def test_component_means_leave_out_what_was_not_scored() -> None:
    components = [
        [{"name": "exact", "value": 1.0, "status": "ok"}, {"name": "judge", "value": None, "status": "timeout"}],
        [{"name": "exact", "value": 0.0, "status": "ok"}, {"name": "judge", "value": 0.5, "status": "ok"}],
    ]
    rows = [{"kind": "reward_assigned", "reward_assigned": {"components": part}} for part in components]
    table = pa.Table.from_pylist(rows, schema=arrow_schema("reward_assigned"))
    assert component_metrics(table) == {
        "reward_component/exact": 0.5,
        "reward_component/judge": 0.5,
        "reward_component_std/exact": 0.5,
        "reward_component_std/judge": 0.0,
    }
    assert component_metrics(arrow_schema("reward_assigned").empty_table()) == {}
