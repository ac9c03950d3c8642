"""Metrics of a step that the batch itself decides: staleness, versions, rewards."""

from __future__ import annotations

import pyarrow as pa
import torch

from rolltape.schema.render import arrow_schema
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.summary import _version_metrics, component_means


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


def test_component_means_leave_out_what_was_not_scored() -> None:
    components = [
        [{"name": "exact", "value": 1.0, "status": "ok"}, {"name": "judge", "value": None, "status": "timeout"}],
        [{"name": "exact", "value": 0.0, "status": "ok"}, {"name": "judge", "value": 0.5, "status": "ok"}],
    ]
    rows = [{"kind": "reward_assigned", "reward_assigned": {"components": part}} for part in components]
    table = pa.Table.from_pylist(rows, schema=arrow_schema("reward_assigned"))
    assert component_means(table) == {"exact": 0.5, "judge": 0.5}
    assert component_means(arrow_schema("reward_assigned").empty_table()) == {}
