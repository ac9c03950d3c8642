"""A committer of its own process: appends one lane's events until it is told to stop or dies.

usage: lane_writer.py LAKE LANE NUM_COMMITS

It starts from the lane's mark in the lake, commits three events at a time, and prints the mark after each commit. A
commit that finds another writer on the lane prints ``fenced`` and ends with status 3.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from rolltape.schema.build import build_batch
from rolltape.schema.errors import CommitterFencedError
from rolltape.store import Lake

ROWS = 3


def rows(lane: str, first: int) -> pa.Table:
    """Three events of the lane, whose ids say their place in it."""
    built = build_batch(
        "reward_assigned",
        {
            "event_id": [f"{lane}-{first + i}" for i in range(ROWS)],
            "run_id": "run",
            "run_epoch": 1,
            "producer_id": lane,
            "producer_epoch": 1,
            "lane_seq": np.arange(first, first + ROWS),
            "log_topic": "rollout",
            "log_partition": 0,
            "log_offset": first // ROWS,
            "recorded_at": datetime(2026, 11, 30, tzinfo=UTC),
            "trajectory_id": [f"{first + i:08d}" for i in range(ROWS)],
            "state": "missing",
            "scalariser_version": "1",
        },
    )
    return pa.Table.from_batches([built.batch])


def main(url: str, lane: str, num_commits: int) -> int:
    """Append ``num_commits`` commits."""
    lake = Lake.open(url)
    app = f"lane/{lane}/1/rollout/0"
    mark = lake.snapshot().transactions.get(app, -1)
    for _ in range(num_commits):
        expected = {app: mark if mark >= 0 else None}
        try:
            lake.append({"reward_assigned": rows(lane, mark + 1)}, {app: mark + ROWS}, expected)
        except CommitterFencedError:
            print("fenced", flush=True)
            return 3
        mark += ROWS
        print(mark, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
