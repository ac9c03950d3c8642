"""The compacted topics: the newest policy versions for engines that start late, and the newest epoch of each producer.

The newest record of each key stays for ever, so both are read whole in a moment however long the log is. Policy
versions are keyed by run, policy, run epoch, version and kind; what is older than the newest committed version of its
policy is deleted by whoever records the commit. A producer writes its epoch before its first record, so that another
machine that takes over its id starts above it, even where no sink archived a thing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa

from rolltape.ingest.kafka.client import Headers, KafkaClient, Message
from rolltape.ingest.kafka.topics import POLICY_VERSIONS, PRODUCERS
from rolltape.ingest.log import Delivery
from rolltape.schema.build import with_columns
from rolltape.schema.codec import Record, decode, encode, make_headers
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import CodecError, LogUnreachableError, ValidationError

VERSION_KINDS: Final = ("weights_published", "weights_committed", "weights_aborted")
VERSIONS_PARTITION: Final = Partition(POLICY_VERSIONS, 0)
PRODUCERS_PARTITION: Final = Partition(PRODUCERS, 0)

_EPOCH: Final = re.compile(rb"[0-9]{1,9}")
_LOG: Final = logging.getLogger(__name__)
_READ_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.5


class Keyed(NamedTuple):
    """A message of a compacted topic; a value of None deletes what its key had."""

    key: bytes
    value: memoryview | None
    headers: Headers


class _Version(NamedTuple):
    """What a key of the policy versions says."""

    run_id: str
    policy_id: str
    run_epoch: int
    number: int
    kind: str

    @property
    def key(self) -> bytes:
        # Ids may hold any character, a slash among them.
        return "/".join(quote(str(part), safe="") for part in self).encode()

    @classmethod
    def parse(cls, key: bytes) -> _Version | None:
        try:
            run_id, policy_id, run_epoch, number, kind = (unquote(part) for part in key.decode().split("/"))
            return cls(run_id, policy_id, int(run_epoch), int(number), kind)
        except ValueError:
            return None


class VersionKeys:
    """What a producer adds to the compacted topic for the weights records that it sends. For one thread."""

    def __init__(self, client: KafkaClient) -> None:
        """Nothing is read before the first weights record."""
        self._client = client
        self._known: set[_Version] | None = None

    def messages(self, record: Record) -> list[Keyed]:
        """The messages that go with ``record``: one a row of a version, and the deletions of what is older.

        Raises:
            LogUnreachableError: the topic could not be read.
        """
        if record.headers.kind not in VERSION_KINDS:
            return []
        try:
            batch = decode(record.value, kind=record.headers.kind)
        except (CodecError, ValidationError):
            # The record itself goes on and becomes a dead letter.
            return []
        if self._known is None:
            messages = read_whole(self._client, VERSIONS_PARTITION)
            self._known = {found for message in messages if (found := _Version.parse(message.key or b"")) is not None}
        return [keyed for row in range(batch.num_rows) for keyed in self._of_row(batch.slice(row, 1))]

    def _of_row(self, row: pa.RecordBatch) -> Iterator[Keyed]:
        kind, values = kind_of_row(row)
        version = _Version(values["run_id"], values["policy_id"], values["policy_run_epoch"], values["version"], kind)
        assert self._known is not None
        yield Keyed(version.key, memoryview(encode(row)).cast("B"), make_headers(row).to_pairs())
        self._known.add(version)
        if kind == "weights_committed":
            for older in sorted(known for known in self._known if _is_older(known, version)):
                yield Keyed(older.key, None, [])
                self._known.discard(older)


def kind_of_row(row: pa.RecordBatch) -> tuple[str, dict[str, Any]]:
    """Kind and flat values of a batch of one row."""
    values = row.to_pylist()[0]
    kind = str(values["kind"])
    return kind, {**values, **(values.get(kind) or {})}


def _is_older(one: _Version, other: _Version) -> bool:
    return one[:2] == other[:2] and (one.run_epoch, one.number) < (other.run_epoch, other.number)


def read_whole(client: KafkaClient, partition: Partition, timeout_s: float = _READ_TIMEOUT_S) -> list[Message]:
    """The newest message of each key of a compacted partition, in offset order, without deleted ones.

    Raises:
        LogUnreachableError: not read to its end in time.
    """
    consumer = client.consumer()
    deadline = time.monotonic() + timeout_s
    newest: dict[bytes, Message] = {}
    try:
        consumer.assign([partition])
        begin, end = consumer.begin_offsets([partition])[partition], consumer.end_offsets([partition])[partition]
        consumer.seek(partition, begin)
        while consumer.position(partition) < end:
            if time.monotonic() >= deadline:
                raise LogUnreachableError(
                    f"expected to read {partition} to offset {end} within {timeout_s} s, got to "
                    f"{consumer.position(partition)}; are its brokers up?"
                )
            for message in consumer.poll(_POLL_S).get(partition, []):
                newest.pop(message.key or b"", None)
                newest[message.key or b""] = message
    finally:
        consumer.close()
    return [message for message in newest.values() if message.value is not None]


def newest_versions(client: KafkaClient) -> list[Delivery]:
    """Rows of the policy versions that still matter, as deliveries of one row each, in the order of their recording.

    What cannot be read (a kind of newer software, somebody else's message) stands in nobody's way: it is logged.

    Raises:
        LogUnreachableError: the topic could not be read.
    """
    deliveries = []
    for message in read_whole(client, VERSIONS_PARTITION):
        version = _Version.parse(message.key or b"")
        if version is None or version.kind not in VERSION_KINDS:
            _LOG.warning("%s holds a key of no policy version, it is passed over: %r", VERSIONS_PARTITION, message.key)
            continue
        try:
            batch = decode(pa.py_buffer(message.value), kind=version.kind)
        except (CodecError, ValidationError) as error:
            _LOG.warning("%s of %s cannot be read, it is passed over: %s", message.key, VERSIONS_PARTITION, error)
            continue
        place = {"log_topic": POLICY_VERSIONS, "log_partition": 0, "log_offset": message.offset}
        deliveries.append(
            Delivery(
                kind=version.kind,
                table=pa.Table.from_batches([with_columns(batch, {name: [value] for name, value in place.items()})]),
                partition=VERSIONS_PARTITION,
                first_offset=message.offset,
                last_offset=message.offset,
                lake_version=-1,
            )
        )
    return deliveries


def newest_registered_epoch(client: KafkaClient, producer_id: str) -> int:
    """Newest epoch under which a producer started anywhere; 0 when it never did.

    Raises:
        LogUnreachableError: the topic could not be read.
    """
    for message in read_whole(client, PRODUCERS_PARTITION):
        if message.key == producer_id.encode() and message.value is not None:
            text = bytes(message.value)
            return int(text) if _EPOCH.fullmatch(text) else 0
    return 0


def epoch_message(producer_id: str, epoch: int) -> Keyed:
    """The message by which a producer says under which epoch it starts."""
    return Keyed(producer_id.encode(), memoryview(b"%d" % epoch), [])
