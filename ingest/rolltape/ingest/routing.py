"""Which partition a record goes to: by its key, so that a trajectory keeps its order and a group meets one consumer."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def partition_of(key: str, num_partitions: int) -> int:
    """The partition of a key: the same on every machine and in every release.

    >>> partition_of("group-7", 1)
    0
    """
    return zlib.crc32(key.encode()) % num_partitions


def rows_by_partition(batch: pa.RecordBatch, topic: str, num_partitions: int) -> dict[int, npt.NDArray[np.int64]]:
    """Row numbers of each partition that the rows' keys name: the group, else the trajectory, else the run."""
    names = ("group_id", "trajectory_id", "run_id") if topic == "rollout" else ("run_id",)
    keys = pc.coalesce(*(batch.column(name) for name in names)).to_pylist()
    numbers = np.array([partition_of(key or "", num_partitions) for key in keys])
    return {int(number): np.flatnonzero(numbers == number) for number in np.unique(numbers)}
