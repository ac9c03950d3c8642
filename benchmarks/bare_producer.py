"""A kafka-python producer without Rolltape, in a process of its own: what ``bench_kafka.py producer`` compares with.

``python bare_producer.py BOOTSTRAP TOPIC FILE``: FILE holds the messages (an Arrow IPC stream of key, value, partition
and headers). Each line of standard input names a side; a round of it sends all messages and looks at every future, and
prints a JSON line with its wall and CPU seconds.

* ``default``: the producer as the package comes.
* ``tuned``: batches of 1 MiB and requests of 16 MiB, which is the best of what was tried for records of this size.
* ``floor``: as ``tuned``, and one thread encodes each record from its columns (Arrow IPC, LZ4) before it is sent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import kafka
import pyarrow as pa
from pyarrow import ipc

from rolltape.schema.stream import encode_pruned

TUNED: Final = {"batch_size": 1 << 20, "max_request_size": 16 << 20}
SIDES: Final = {"default": {}, "tuned": TUNED, "floor": TUNED}


class Sent(NamedTuple):
    """One message."""

    partition: int
    key: bytes
    value: Any
    headers: list[tuple[str, bytes]]


def write_messages(path: Path, messages: Iterable[Sent]) -> None:
    """Write FILE."""
    rows = [(*message[:3], *map(list, zip(*message.headers, strict=True))) for message in messages]
    names = ["partition", "key", "value", "names", "values"]
    types = [pa.int32(), pa.binary(), pa.large_binary(), pa.list_(pa.string()), pa.list_(pa.binary())]
    columns = zip(types, zip(*rows, strict=True), strict=True)
    table = pa.table([pa.array(list(column), type_) for type_, column in columns], names)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def read_messages(path: Path) -> list[Sent]:
    """Read FILE."""
    return [
        Sent(row["partition"], row["key"], row["value"], list(zip(row["names"], row["values"], strict=True)))
        for row in ipc.open_file(path).read_all().to_pylist()
    ]


def loaded(value: bytes) -> pa.RecordBatch:
    """The columns of a record in memory of their own, not compressed."""
    sink = pa.BufferOutputStream()
    with ipc.open_stream(value) as reader, ipc.new_stream(sink, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    (batch,) = ipc.open_stream(sink.getvalue())
    return batch


def encoded(messages: Iterable[Sent], columns: Iterable[pa.RecordBatch]) -> Iterator[Sent]:
    """The messages with values that are encoded while they are asked for."""
    for message, batch in zip(messages, columns, strict=True):
        yield message._replace(value=memoryview(encode_pruned(batch)).cast("B"))


def send(producer: Any, topic: str, messages: Iterable[Sent]) -> None:
    """Send them, and look at every future."""
    futures = [
        producer.send(topic, value=message.value, key=message.key, headers=message.headers, partition=message.partition)
        for message in messages
    ]
    for future in futures:
        future.get(60)


def main(bootstrap: str, topic: str, file: str) -> None:
    """Answer one line with a round."""
    messages = read_messages(Path(file))
    columns = [loaded(message.value) for message in messages]
    producers = {side: kafka.KafkaProducer(bootstrap_servers=bootstrap.split(","), **SIDES[side]) for side in SIDES}
    for line in sys.stdin:
        side = line.strip()
        wall, cpu = time.perf_counter(), time.process_time()
        send(producers[side], topic, encoded(messages, columns) if side == "floor" else messages)
        turn = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        sys.stdout.write(json.dumps(turn) + "\n")
        sys.stdout.flush()
    for producer in producers.values():
        producer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
