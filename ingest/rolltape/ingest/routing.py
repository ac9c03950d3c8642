"""Which partition a record goes to: by its key, so that a trajectory keeps its order and a group meets one consumer."""

from __future__ import annotations

import zlib
from typing import Any

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


def only_key(column: Any) -> str | None:
    """The key that stands for all rows of a caller's column; None where there are several, or it has to be looked at.

    >>> only_key(["g", "g"])
    'g'
    """
    if isinstance(column, (list, tuple)) and column and column.count(column[0]) == len(column):
        column = column[0]
    return column if type(column) is str else None


def rows_by_partition(batch: pa.RecordBatch, topic: str, num_partitions: int) -> dict[int, pa.RecordBatch]:
    """The rows of each partition that the rows' keys name: the group, else the trajectory, else the run.

    Rows keep their order. Rows that lie together are not copied: a worker's batch is one group, and so one partition.
    """
    names = ("group_id", "trajectory_id", "run_id") if topic == "rollout" else ("run_id",)
    if not batch.num_rows:
        return {}
    keys = pc.coalesce(*(batch.column(name) for name in names), "").dictionary_encode()
    of_key = np.array([partition_of(key, num_partitions) for key in keys.dictionary.to_pylist()], dtype=np.int64)
    if (of_key == of_key[0]).all():
        return {int(of_key[0]): batch}
    numbers = of_key[keys.indices.to_numpy()]
    return {int(number): _rows(batch, np.flatnonzero(numbers == number)) for number in np.unique(numbers)}


def _rows(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return batch.slice(first, len(rows))
    return batch.take(pa.array(rows))
