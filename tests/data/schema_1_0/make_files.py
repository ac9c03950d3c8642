"""Writes the files of this folder as a producer of schema version 1.0 wrote them; its specs are frozen here.

Run by hand, once: ``python tests/data/schema_1_0/make_files.py``. Tests read the committed files only.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

SAMPLING = pa.struct([("temperature", pa.float64()), ("seed", pa.int64()), ("logprobs_mode", pa.string())])
ACTION = pa.struct(
    [
        ("action_kind", pa.string()),
        ("policy_version", pa.int64()),
        ("policy_id", pa.string()),
        ("sampling", SAMPLING),
        ("finish_reason", pa.string()),
    ]
)
STARTED = pa.struct([("stage", pa.string()), ("prompt", pa.string()), ("prompt_token_ids", pa.list_(pa.int32()))])


def envelope(kind: str, num_rows: int, event_index: int) -> dict[str, pa.Array]:
    """The envelope of 1.0: as today's, without those columns that are null here."""
    rows = range(num_rows)
    return {
        "event_id": pa.array([f"{kind}-{row}" for row in rows]),
        "kind": pa.array([kind] * num_rows),
        "schema_version": pa.array(["1.0"] * num_rows),
        "run_id": pa.array(["run-1.0"] * num_rows),
        "run_epoch": pa.array([2] * num_rows, pa.int32()),
        "producer_id": pa.array(["worker-0"] * num_rows),
        "producer_epoch": pa.array([1] * num_rows, pa.int32()),
        "lane_seq": pa.array([event_index * num_rows + row for row in rows], pa.int64()),
        "trajectory_id": pa.array([f"t{row}" for row in rows]),
        "attempt": pa.array([0] * num_rows, pa.int32()),
        "group_id": pa.array(["g"] * num_rows),
        "event_index": pa.array([event_index] * num_rows, pa.int32()),
        "recorded_at": pa.array([datetime(2026, 3, 1, tzinfo=UTC)] * num_rows, pa.timestamp("us", tz="UTC")),
    }


def write(name: str, columns: dict[str, pa.Array]) -> None:
    """One record, as an Arrow IPC stream."""
    batch = pa.RecordBatch.from_pydict(columns)
    path = Path(__file__).with_name(f"{name}.arrows")
    with ipc.new_stream(path, batch.schema, options=ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)


def main() -> None:
    """Write both records: three actions (stamped, empty, unknown version) and three starts."""
    sampling = {"temperature": 1.0, "seed": 7, "logprobs_mode": "processed_logprobs"}
    actions = [
        {"action_kind": "execution", "policy_version": 4, "policy_id": "actor", "sampling": sampling},
        {"action_kind": "execution", "policy_version": 5, "policy_id": "actor", "finish_reason": "stop"},
        {"action_kind": "execution", "policy_version": None, "policy_id": None},
    ]
    write(
        "action_sampled",
        {
            **envelope("action_sampled", 3, 1),
            "token_ids": pa.array([[11, 12, 13], [], [14]], pa.list_(pa.int32())),
            "rollout_log_probs": pa.array([[-0.5, -0.0, float("nan")], [], [-1.25]], pa.list_(pa.float32())),
            "action_sampled": pa.array(actions, ACTION),
        },
    )
    starts = [
        {"stage": "reasoning", "prompt": "sort 312", "prompt_token_ids": [3, 1, 2]},
        {"stage": "reasoning", "prompt": None, "prompt_token_ids": [1]},
        None,
    ]
    write("rollout_started", {**envelope("rollout_started", 3, 0), "rollout_started": pa.array(starts, STARTED)})


if __name__ == "__main__":
    main()
