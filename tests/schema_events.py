"""Stamped columns of a plain event, for tests of one room that need a valid row of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.schema.build import build_batch


def stamps(num_rows: int, *, first_seq: int = 0, producer_id: str = "p") -> dict[str, Any]:
    """What a recorder fills in."""
    return {
        "event_id": [f"event-{producer_id}-{first_seq + row:04d}" for row in range(num_rows)],
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": producer_id,
        "producer_epoch": 1,
        "lane_seq": np.arange(first_seq, first_seq + num_rows),
        "recorded_at": np.full(num_rows, 1_796_000_000_000_000),
    }


def action(num_rows: int = 1, **columns: Any) -> dict[str, Any]:
    """Valid columns of ``action_sampled`` events, one a trajectory; any can be given instead."""
    return {
        **stamps(num_rows),
        "trajectory_id": [f"t{row}" for row in range(num_rows)],
        "attempt": 0,
        "group_id": "g",
        "event_index": np.ones(num_rows, np.int64),
        "token_ids": [[5, 6, 7]] * num_rows,
        "rollout_log_probs": [[-0.5, -0.25, 0.0]] * num_rows,
        **columns,
    }


def batch_of(kind: str, columns: dict[str, Any]) -> pa.RecordBatch:
    """The batch of ``columns``, all of whose rows must be fit."""
    built = build_batch(kind, columns)
    assert built.refused == ()
    return built.batch


def action_batch(num_rows: int = 1, **columns: Any) -> pa.RecordBatch:
    """The batch of :func:`action`."""
    return batch_of("action_sampled", action(num_rows, **columns))
