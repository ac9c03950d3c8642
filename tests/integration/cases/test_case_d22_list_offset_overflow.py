"""Case D22: lists of more than 2³¹ values in all stay in chunks from the log to a reader; nothing is combined.

Reported elsewhere: ``combine_chunks`` over 2³¹ child values fails. One buffer serves all rows: 64 MB.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rolltape.ingest.stamping import Place, stamp
from rolltape.schema.cursor import Partition
from rolltape.schema.render import arrow_schema
from rolltape.store.row_filter import rows_where
from rolltape.store.tail import split_by_partition

NUM_VALUES = 1 << 24
NUM_ROWS = 130


def action(number: int, tokens: pa.Array) -> pa.RecordBatch:
    """One row of the kind with the shared list of ids; all other columns null."""
    schema = arrow_schema("action_sampled")
    columns = {field.name: pa.nulls(1, field.type) for field in schema}
    columns["token_ids"] = tokens
    columns["lane_seq"] = pa.array([number], pa.int64())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def test_case_d22_two_billion_values_are_stamped_split_and_filtered_without_a_copy() -> None:
    type_ = arrow_schema("action_sampled").field("token_ids").type
    values = pa.array(np.zeros(NUM_VALUES, np.int32))
    tokens = pa.ListArray.from_arrays(pa.array([0, NUM_VALUES], pa.int32()), values, type=type_)
    before = pa.total_allocated_bytes()
    places = [Place(1, Partition("rollout", number // 65), number) for number in range(NUM_ROWS)]
    table = stamp(pa.Table.from_batches([action(number, tokens) for number in range(NUM_ROWS)]), places)
    assert sum(len(chunk.flatten()) for chunk in table["token_ids"].chunks[:1]) * NUM_ROWS > 2**31
    parts = dict(split_by_partition(table))
    assert sorted(parts) == [Partition("rollout", 0), Partition("rollout", 1)]
    assert parts[Partition("rollout", 1)]["lane_seq"].to_pylist() == list(range(65, NUM_ROWS))
    kept = rows_where(table, np.arange(NUM_ROWS) != 7)
    assert kept.num_rows == NUM_ROWS - 1
    assert {len(chunk.values) for chunk in kept["token_ids"].chunks} == {NUM_VALUES}
    assert pa.total_allocated_bytes() - before < 8 << 20
