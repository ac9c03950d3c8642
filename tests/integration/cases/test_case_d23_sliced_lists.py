"""Case D23: row i has exactly its own tokens after slice, filter, IPC, the log, the lake and SQL.

Reported elsewhere: ``ListArray.values`` ignores a slice's offset, so rows get their neighbours' tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rolltape.ingest import Recorder, open_log
from rolltape.schema.build import build_batch
from rolltape.schema.codec import decode, encode
from rolltape.store.lake import Lake

TOKENS = [[1], [1, 2], [1, 2, 3]]


def sliced(rows: list[list[int]], front: list[int] | None, dtype: pa.DataType) -> pa.Array:
    """``rows`` as the tail of a longer array, behind ``front``."""
    return pa.array([front, *rows], pa.list_(dtype)).slice(1)


def log_probs(rows: list[list[int]]) -> list[list[float]]:
    return [[-float(token) for token in row] for row in rows]


@pytest.mark.parametrize("front", [[9, 9], None, []])
def test_case_d23_a_sliced_column_is_recorded_row_by_row(tmp_path: Path, front: list[int] | None) -> None:
    lake = Lake.create(tmp_path / "lake")
    probs = pa.array([[0.0] * len(front) if front is not None else None, *log_probs(TOKENS)], pa.list_(pa.float32()))
    with open_log(str(tmp_path / "lake")) as log, Recorder(log, producer_id="p", run_id="r") as recorder:
        receipt = recorder.record_batch(
            "action_sampled",
            {
                "trajectory_id": ["a", "b", "c"],
                "attempt": 0,
                "token_ids": sliced(TOKENS, front, pa.int32()),
                "rollout_log_probs": probs.slice(1),
            },
        )
        assert receipt.refused == ()
        recorder.flush("logged")
    rows = lake.read("action_sampled").to_pylist()
    assert [row["token_ids"] for row in rows] == TOKENS
    assert [row["rollout_log_probs"] for row in rows] == log_probs(TOKENS)
    counted = lake.sql(
        "SELECT trajectory_id, list(token_id ORDER BY position) AS ids FROM tokens GROUP BY ALL ORDER BY 1"
    )
    assert [row["ids"] for row in counted.rows()] == TOKENS


def test_case_d23_slices_and_filters_of_a_batch_round_trip(tmp_path: Path) -> None:
    tokens = [list(range(length)) for length in (3, 0, 5, 1, 4)]
    batch = build_batch(
        "action_sampled",
        {"trajectory_id": list("abcde"), "attempt": 0, "token_ids": tokens, "rollout_log_probs": log_probs(tokens)},
    ).batch
    for start in range(5):
        for length in range(1, 6 - start):
            part = decode(encode(batch.slice(start, length)))
            assert part["token_ids"].to_pylist() == tokens[start : start + length]
            assert part["rollout_log_probs"].to_pylist() == log_probs(tokens[start : start + length])
    mask = np.array([False, True, True, False, True])
    kept = decode(encode(batch.filter(pa.array(mask)).slice(1)))
    assert kept["token_ids"].to_pylist() == [tokens[2], tokens[4]]
