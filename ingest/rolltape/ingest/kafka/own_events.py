"""Events that a sink itself sends into the log it archives: alarms, and what retention deleted.

Each has a lane of its own, named by what it says: whoever sends it again adds nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from rolltape.ingest.kafka.client import KafkaClient, TopicInfo
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.routing import partition_of
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition

_TIMEOUT_S = 10.0


def send_events(client: KafkaClient, topics: Mapping[str, TopicInfo], records: Collection[Record]) -> None:
    """Send records, each to the partition of its key, and return once the brokers have them.

    Raises:
        LogError: one was not taken; sending all again is harmless.
    """
    with contextlib.closing(client.producer()) as producer:
        pending = []
        for record in records:
            number = partition_of(record.key, topics[record.topic].num_partitions)
            pending.append(producer.send(Partition(record.topic, number), *to_message(record)))
        producer.flush(_TIMEOUT_S)
        for sent in pending:
            error = sent.error()
            if error is not None:
                raise error
