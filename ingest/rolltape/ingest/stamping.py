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


class Place(NamedTuple):
    """Where the rows of one record lie: all share the offset."""

    num_rows: int
    partition: Partition
    offset: int


def stamp(table: pa.Table, places: Sequence[Place]) -> pa.Table:
    """The table of the rows of all ``places``, in their order, with the log's own columns filled."""
    lengths = [item.num_rows for item in places]
    topics = [item.partition.topic for item in places]
    codes = {topic: code for code, topic in enumerate(sorted(set(topics)))}
    topic = _repeated(list(codes), [codes[name] for name in topics], lengths)
    number = np.repeat(np.array([item.partition.partition for item in places], np.int32), lengths)
    offset = np.repeat(np.array([item.offset for item in places], np.int64), lengths)
    columns = {"log_topic": topic, "log_partition": pa.array(number), "log_offset": pa.array(offset)}
    for name, column in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), column)
    return table


def by_partition(
    batches: Sequence[pa.RecordBatch], places: Sequence[Place]
) -> tuple[list[pa.RecordBatch], list[Place]]:
    """The rows of each partition in one piece and in their order, without a copy: files of them merge in one pass."""
    partitions = [item.partition for item in places]
    if partitions == sorted(partitions):
        return list(batches), list(places)
    order = sorted(range(len(places)), key=partitions.__getitem__)
    ends = np.cumsum([item.num_rows for item in places])
    batch_ends = np.cumsum([batch.num_rows for batch in batches])
    batch_of: list[int] = np.searchsorted(batch_ends, ends).tolist()
    found = []
    for run in _consecutive(order, batch_of):
        batch = batches[batch_of[run[0]]]
        start = int(ends[run[0]] - batch_ends[batch_of[run[0]]]) - places[run[0]].num_rows + batch.num_rows
        found.append(batch.slice(start, sum(places[number].num_rows for number in run)))
    return found, [places[number] for number in order]


def _consecutive(order: Sequence[int], batch_of: Sequence[int]) -> list[list[int]]:
    """The numbers in their order, as runs that lie one after the other in one batch."""
    runs: list[list[int]] = []
    for number in order:
        if runs and runs[-1][-1] == number - 1 and batch_of[number - 1] == batch_of[number]:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _repeated(texts: Sequence[str], codes: Sequence[int], lengths: Sequence[int]) -> pa.Array:
    """A text column: for each record the text of its code, as often as it has rows."""
    indices = pa.array(np.repeat(np.array(codes, np.int32), lengths))
    return pa.DictionaryArray.from_arrays(indices, pa.array(texts, pa.string())).dictionary_decode()


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
    """Rows must be what the headers say, or a poisoned record could move another producer's lane.

    Raises:
        HeaderMismatchError: they are not.
    """
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


def are_of_their_lanes(batch: pa.RecordBatch, records: Sequence[Record], num_rows: Sequence[int]) -> bool:
    """Whether :func:`check_lane` holds for each of several records, whose rows lie one after the other in ``batch``."""
    headers = [record.headers for record in records]
    if any(item.last_lane_seq - item.first_lane_seq + 1 != rows for item, rows in zip(headers, num_rows, strict=True)):
        return False
    producers = {name: code for code, name in enumerate(dict.fromkeys(item.producer_id for item in headers))}
    lane_seqs, epochs = batch.column("lane_seq"), batch.column("producer_epoch")
    names = batch.column("producer_id")
    if lane_seqs.null_count or epochs.null_count or names.null_count:
        return False
    numbers = np.concatenate([np.arange(item.first_lane_seq, item.last_lane_seq + 1) for item in headers])
    expected = _repeated(list(producers), [producers[item.producer_id] for item in headers], num_rows)
    return bool(
        np.array_equal(lane_seqs.to_numpy(), numbers)
        and np.array_equal(epochs.to_numpy(), np.repeat([item.producer_epoch for item in headers], num_rows))
        and names.equals(expected)
    )
