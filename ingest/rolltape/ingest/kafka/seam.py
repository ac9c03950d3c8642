"""Where log and lake meet: the record before the position at which a log is read on must be one that the lake has.

A log that lost its end and grew again beyond the lake's position (after an unclean leader election, or on a disk that
was restored) looks whole by its offsets. Other records lie where archived ones lay, and reading on would pass them
without a word. So whoever goes on at a position reads the one record before it again. What lies before a position is
accounted for by marks of the same commit: a record of ours by its lane's, any other message by that of foreign ones.
A record that they do not account for was never archived. Where retention took it, nothing can be said.

Leader epochs (KIP-320) say where logs part, not what lies there, and start again where the brokers' own metadata were
restored with the disk. The vendor's consumer compares them while it runs; what it finds comes to be judged here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Final

from rolltape.ingest.kafka.client import KafkaClient, Message
from rolltape.ingest.kafka.positions import LogIdentity
from rolltape.ingest.kafka.wire import headers_of
from rolltape.ingest.lanes import NOTHING, Lane, foreign_app_id
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import LakeAheadError, LogUnreachableError

_PEEK_S: Final = 30.0
_POLL_S: Final = 1.0


class Seam:
    """The positions at which partitions are read on, and whether what lies right before each is archived."""

    def __init__(self, identity: LogIdentity, transactions: Mapping[str, int]) -> None:
        """Judge by what a version of the lake says, of which the positions are too."""
        self._identity = identity
        self._transactions = transactions
        self._open: dict[Partition, tuple[int, int]] = {}

    def read_from(self, partition: Partition, begin: int, start: int) -> int:
        """The broker's offset to read from, so that the record before ``start`` comes too if the log still holds it."""
        self._open.pop(partition, None)
        if start <= begin:
            return start
        self._open[partition] = begin, start
        return start - 1

    def passed(self, partition: Partition, messages: Sequence[Message]) -> Sequence[Message]:
        """Those of a partition's next messages that are to be archived.

        Raises:
            LakeAheadError: what lies before them is not what the lake has from there.
        """
        if partition not in self._open or not messages:
            return messages
        begin, start = self._open.pop(partition)
        if messages[0].offset >= start:
            # Nothing lies right before the position (a mark of a transaction, say): there is nothing to compare.
            return messages
        self._check(messages[0], begin, start)
        return messages[1:]

    def _check(self, message: Message, begin: int, start: int) -> None:
        found = self._stranger(message)
        if found is None:
            return
        partition, url = message.partition, self._identity.url
        raise LakeAheadError(
            f"{partition}: expected offset {start - 1}, the last before the lake's position, to hold what is archived "
            f"of it, got {found}: the log lost its end (an unclean leader, a restored disk) and grew again beyond that "
            f"position. Of offsets {begin} to {start - 1} those that were written since are not archived and would be "
            f"passed unread. What is archived stays; `rolltape sink --log {url} --lake LAKE --adopt {partition.topic}` "
            "reads the log as it is again, for the next generation, whose offsets go on after the lake's"
        )

    def _stranger(self, message: Message) -> str | None:
        """What a message is that lies before the position and was never archived; None for one that was."""
        partition, headers = message.partition, headers_of(message)
        offset = message.offset + self._identity.base(self._transactions, partition)
        foreign = self._transactions.get(foreign_app_id(partition), NOTHING)
        if headers is None:
            return "a message that is no record of ours and no dead letter" if foreign < offset else None
        lane = Lane(headers.producer_id, headers.producer_epoch, *partition)
        mark = self._transactions.get(lane.app_id, NOTHING)
        # An earlier release may have archived as foreign what it could not read the headers of.
        if headers.last_lane_seq <= mark or foreign == offset:
            return None
        range_ = f"lane_seq {headers.first_lane_seq} to {headers.last_lane_seq}"
        return f"{range_} of lane {lane}, of which the lake has {'nothing' if mark == NOTHING else f'up to {mark}'}"


def regrown(client: KafkaClient, identity: LogIdentity, transactions: Mapping[str, int], topic: str) -> set[Partition]:
    """The partitions of a topic that hold other records right before the lake's position than the lake has.

    Raises:
        LogUnreachableError: the brokers did not show them in time.
    """
    places = [place for place in identity.partitions() if place.topic == topic]
    starts = {place: identity.position(transactions, place) for place in places}
    with contextlib.closing(client.consumer()) as consumer:
        begins, ends = consumer.begin_offsets(places), consumer.end_offsets(places)
        looked_at = {place: start for place, start in starts.items() if begins[place] < start <= ends[place]}
        seam, found = Seam(identity, transactions), set()
        consumer.assign(looked_at)
        for place, start in looked_at.items():
            consumer.seek(place, seam.read_from(place, begins[place], start))
        deadline = time.monotonic() + _PEEK_S
        while any(consumer.position(place) < start for place, start in looked_at.items()):
            if time.monotonic() > deadline:
                raise LogUnreachableError(f"expected to see what {topic} holds within {_PEEK_S:g} s; run it again")
            for place, messages in consumer.poll(_POLL_S).items():
                try:
                    seam.passed(place, messages)
                except LakeAheadError:
                    found.add(place)
        return found
