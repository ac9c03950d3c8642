"""Choosing rows: slices instead of copies, and lists of more than 2³¹ values (D22)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.schema.cursor import Partition
from rolltape.store.row_filter import MAX_SLICES, rows_at, rows_where
from rolltape.store.tail import split_by_partition

NUM_VALUES = 1 << 24
NUM_CHUNKS = 130


@pytest.fixture(scope="module")
def huge() -> pa.Table:
    """130 chunks of one row each, which share one buffer: 2³¹ + 2²⁵ list values in all, 64 MB of memory."""
    values = pa.array(np.zeros(NUM_VALUES, np.int32))
    row = pa.ListArray.from_arrays(pa.array([0, NUM_VALUES], pa.int32()), values)
    batches = [
        pa.record_batch(
            {
                "log_topic": pa.array(["rollout"]),
                "log_partition": pa.array([0], pa.int32()),
                "log_offset": pa.array([NUM_CHUNKS - number]),
                "token_ids": row,
            }
        )
        for number in range(NUM_CHUNKS)
    ]
    return pa.Table.from_batches(batches)


def test_rows_are_reordered_without_overflow(huge: pa.Table) -> None:
    before = pa.total_allocated_bytes()
    ((place, rows),) = split_by_partition(huge)
    assert place == Partition("rollout", 0)
    assert rows["log_offset"].to_pylist() == list(range(1, NUM_CHUNKS + 1))
    assert sum(len(chunk.values) for chunk in rows["token_ids"].chunks) > 2**31
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_rows_are_picked_without_overflow(huge: pa.Table) -> None:
    mask = np.ones(NUM_CHUNKS, bool)
    mask[5] = False
    assert rows_where(huge, mask).num_rows == NUM_CHUNKS - 1


@given(st.lists(st.booleans(), max_size=200))
def test_rows_where_equals_a_filter(mask: list[bool]) -> None:
    table = pa.table({"row": pa.array(range(len(mask)), pa.int64())})
    assert rows_where(table, np.array(mask, bool))["row"].to_pylist() == [i for i, held in enumerate(mask) if held]


def test_many_runs_are_copied() -> None:
    mask = np.tile([True, False], MAX_SLICES + 1)
    table = pa.table({"row": np.arange(len(mask))})
    assert rows_where(table, mask)["row"].to_pylist() == list(range(0, len(mask), 2))


@given(st.permutations(list(range(12))))
def test_rows_at_equals_a_take(order: list[int]) -> None:
    table = pa.table({"row": np.arange(12), "list": pa.array([[i] * i for i in range(12)])})
    assert rows_at(table, np.array(order))["row"].to_pylist() == order


def test_partitions_are_split_and_sorted() -> None:
    table = pa.table(
        {
            "log_topic": ["a", "b", "a", "a"],
            "log_partition": pa.array([0, 0, 1, 0], pa.int32()),
            "log_offset": [5, 1, 2, 3],
        }
    )
    parts = {place: rows["log_offset"].to_pylist() for place, rows in split_by_partition(table)}
    assert parts == {Partition("a", 0): [3, 5], Partition("a", 1): [2], Partition("b", 0): [1]}
