"""Records and rows as a log places them: offsets on rows, rows against headers, partitions in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rolltape.ingest.lanes import LOG_PREFIX
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import HeaderMismatchError
from rolltape.schema.render import arrow_schema


class Placed(NamedTuple):
    """Rows of one record, and where they lie: all share the offset."""

    batch: pa.RecordBatch
    partition: Partition
    offset: int


def stamp(table: pa.Table, placed: Sequence[Placed]) -> pa.Table:
    """The table of all ``placed`` rows, in their order, with the log's own columns filled."""
    lengths = [item.batch.num_rows for item in placed]
    topics = [item.partition.topic for item in placed]
    codes = {topic: code for code, topic in enumerate(sorted(set(topics)))}
    topic = pa.DictionaryArray.from_arrays(
        pa.array(np.repeat([codes[name] for name in topics], lengths), pa.int32()), pa.array(list(codes), pa.string())
    ).dictionary_decode()
    number = np.repeat(np.array([item.partition.partition for item in placed], np.int32), lengths)
    offset = np.repeat(np.array([item.offset for item in placed], np.int64), lengths)
    columns = {"log_topic": topic, "log_partition": pa.array(number), "log_offset": pa.array(offset)}
    for name, column in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), column)
    return table


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
    first, last = headers.first_lane_seq, headers.last_lane_seq
    lane_seqs = batch.column("lane_seq").to_numpy(zero_copy_only=False)
    is_whole = len(lane_seqs) == last - first + 1 and lane_seqs[0] == first
    if not is_whole or (len(lane_seqs) > 1 and not bool((lane_seqs[1:] - lane_seqs[:-1] == 1).all())):
        raise HeaderMismatchError(
            f"expected rows with lane_seq {first} to {last} as in the headers, got {batch.num_rows} rows from "
            f"{lane_seqs[0] if len(lane_seqs) else None}"
        )
    for name, value in (("producer_id", headers.producer_id), ("producer_epoch", headers.producer_epoch)):
        came = batch.column(name).unique().to_pylist()
        if came != [value]:
            raise HeaderMismatchError(f"expected {name} {value!r} in every row as in the headers, got {came[:3]}")
