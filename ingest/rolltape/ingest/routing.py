"""Which partition a record goes to: by its key, so that a trajectory keeps its order and a group meets one consumer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.event_index import as_list

_TEXTS: Final = frozenset((str, type(None)))


def partition_of(key: str, num_partitions: int) -> int:
    """The partition of a key: the same on every machine and in every release.

    >>> partition_of("group-7", 1)
    0
    """
    return zlib.crc32(key.encode()) % num_partitions


class Spread(NamedTuple):
    """Where the rows of a batch go: ``num_rows`` of each partition, partitions ascending.

    ``order`` (int64 ``[rows]``) sorts the rows by partition, those of one partition in their order; None where they lie
    so already.
    """

    num_rows: dict[int, int]
    order: npt.NDArray[np.int64] | None


def spread(columns: Mapping[str, Any], run_id: str, topic: str, num_partitions: int, num_rows: int) -> Spread | None:
    """Where rows of a caller's columns go; None where some key is no text, which is for validation to say.

    The key is the group, else the trajectory, else the run. A worker's batch is often one group.

    >>> spread({"group_id": ["h", "g"]}, "run", "rollout", 4, 2)
    Spread(num_rows={2: 1, 3: 1}, order=array([1, 0]))
    """
    if num_partitions == 1:
        return Spread({0: num_rows}, None)
    keys = _keys(columns, num_rows) if topic == "rollout" else None
    if keys is None:
        return None if topic == "rollout" else Spread({partition_of(run_id, num_partitions): num_rows}, None)
    try:
        of_key = {key: partition_of(run_id if key is None else key, num_partitions) for key in set(keys)}
    except UnicodeEncodeError:
        return None
    if len(set(of_key.values())) == 1:
        return Spread({next(iter(of_key.values())): num_rows}, None)
    numbers = np.fromiter(map(of_key.__getitem__, keys), np.int64, num_rows)
    counts = np.bincount(numbers)
    order = None if (numbers[1:] >= numbers[:-1]).all() else np.argsort(numbers, kind="stable")
    return Spread({number: int(counts[number]) for number in sorted(set(of_key.values()))}, order)


def _keys(columns: Mapping[str, Any], num_rows: int) -> list[str | None] | None:
    """The key of each row, None where only the run is left; no list where a value is neither text nor null."""
    keys = as_list(columns.get("group_id"), num_rows)
    if None in keys:
        others = as_list(columns.get("trajectory_id"), num_rows)
        keys = [other if key is None else key for key, other in zip(keys, others, strict=False)]
    return keys if len(keys) == num_rows and _TEXTS.issuperset(map(type, keys)) else None


def rows_by_partition(batch: pa.RecordBatch, topic: str, num_partitions: int) -> dict[int, pa.RecordBatch]:
    """The rows of each partition that the rows' keys name: the group, else the trajectory, else the run.

    Rows keep their order. Rows that lie together are not copied. For batches whose keys :func:`spread` cannot tell, or
    of which rows were refused.
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
