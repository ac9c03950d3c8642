"""Records and rows as a log places them: offsets on rows, rows against headers, partitions in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.ingest.lanes import LOG_PREFIX
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import HeaderMismatchError
from rolltape.schema.render import arrow_schema


def stamp(batch: pa.RecordBatch, partition: Partition, offset: int) -> pa.RecordBatch:
    """The batch with the log's own columns filled: all rows of a record share them."""
    names, num_rows = batch.schema.names, batch.num_rows
    columns = list(batch.columns)
    columns[names.index("log_topic")] = pa.repeat(pa.scalar(partition.topic), num_rows)
    columns[names.index("log_partition")] = pa.repeat(pa.scalar(partition.partition, pa.int32()), num_rows)
    columns[names.index("log_offset")] = pa.repeat(pa.scalar(offset, pa.int64()), num_rows)
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def place(partition: Partition, offset: int) -> dict[str, Any]:
    """The same as columns of one row."""
    return {"log_topic": partition.topic, "log_partition": partition.partition, "log_offset": offset}


def joined(kind: str, table: pa.Table | None, batches: list[pa.RecordBatch]) -> pa.Table:
    """Rows of several partitions of one kind, each partition's in one piece and in the order of its offsets."""
    whole = pa.Table.from_batches(
        [*(table.to_batches() if table is not None else ()), *batches], schema=arrow_schema(kind)
    )
    order = [("log_topic", "ascending"), ("log_partition", "ascending"), ("log_offset", "ascending")]
    return whole.sort_by(order) if whole.num_rows > 1 else whole


def partition_of_app(app_id: str) -> Partition | None:
    """The partition whose last offset an application transaction holds; None for other transactions."""
    if not app_id.startswith(LOG_PREFIX):
        return None
    topic, partition = app_id.removeprefix(LOG_PREFIX).rsplit("/", 1)
    return Partition(topic, int(partition))


def check_lane(batch: pa.RecordBatch, record: Record) -> None:
    """Rows must be what the headers say, or a poisoned record could move another producer's lane."""
    headers = record.headers
    expected = np.arange(headers.first_lane_seq, headers.last_lane_seq + 1)
    lane_seqs = batch.column("lane_seq").to_numpy(zero_copy_only=False)
    if not np.array_equal(lane_seqs, expected):
        raise HeaderMismatchError(
            f"expected rows with lane_seq {headers.first_lane_seq} to {headers.last_lane_seq} as in the headers, got "
            f"{batch.num_rows} rows from {lane_seqs[0] if len(lane_seqs) else None}"
        )
    for name, value in (("producer_id", headers.producer_id), ("producer_epoch", headers.producer_epoch)):
        came = batch.column(name).unique().to_pylist()
        if came != [value]:
            raise HeaderMismatchError(f"expected {name} {value!r} in every row as in the headers, got {came[:3]}")
