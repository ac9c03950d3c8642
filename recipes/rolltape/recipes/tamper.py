"""Making a damaged copy of a tape, to show that the damage is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.schema.errors import ReplayError
from rolltape.schema.render import arrow_schema
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.log_actions import Actions
from rolltape.store.snapshot import DataFile
from rolltape.trainers.history import RunHistory


def flip_one_log_prob_bit(lake: Lake, run_id: str, step: int, target: Location) -> tuple[Lake, str]:
    """Copy a lake to ``target`` and flip the lowest bit of one log-prob that ``step`` trained.

    Returns the damaged copy and the trajectory that was damaged.
    """
    trajectory = _trained_trajectory(lake, run_id, step)
    lake.location.copy_to(target, without=("spool", "weights", "blobs"))
    copy = Lake.open(target)
    for file in copy.snapshot().files_of("action_sampled", trajectory_ids=[trajectory]):
        table = copy.read_files([file], "action_sampled")
        ids = table["trajectory_id"].to_pylist()
        if trajectory in ids:
            _replace(copy, file, _flipped(table, ids.index(trajectory)))
            return copy, trajectory
    raise ReplayError(f"trajectory {trajectory} of step {step} is in no data file")


def _replace(lake: Lake, file: DataFile, table: pa.Table) -> None:
    """Put ``table`` in the place of a data file, as a compaction would."""

    def write() -> Actions:
        added = lake.write_files({"action_sampled": table})
        return Actions(operation="TAMPER", added=added, removed=[file], data_change=False)

    lake.commit(write, lambda _: None)


def _trained_trajectory(lake: Lake, run_id: str, step: int) -> str:
    batch_id = RunHistory.read(lake, run_id).step(step)["batch_id"]
    for row in lake.read("batch_formed", run_id=run_id)["batch_formed"].to_pylist():
        if row["batch_id"] == batch_id:
            members: list[dict[str, Any]] = row["members"]
            return str(members[len(members) // 2]["trajectory_id"])
    raise ReplayError(f"run {run_id} has no batch {batch_id}")


def _flipped(table: pa.Table, row: int) -> pa.Table:
    rows = table["rollout_log_probs"].to_pylist()
    values = np.asarray(rows[row], np.float32)
    values.view(np.uint32)[0] ^= 1
    rows[row] = values
    type_ = arrow_schema("action_sampled").field("rollout_log_probs").type
    index = table.column_names.index("rollout_log_probs")
    return table.set_column(index, table.schema.field(index), pa.array(rows, type_))
