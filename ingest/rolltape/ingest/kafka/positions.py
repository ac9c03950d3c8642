"""Whether a log and a lake belong together, and where to go on: positions as the lake stores them (design §6).

The lake keeps, in the commits that archive the log, which cluster and which topic its rows came from
(``kafka/<cluster>/<topic>/<topic id>`` = generation) and the last offset of each partition (``log/<topic>/<p>``). A
recreated cluster or topic, a log that lost what was not archived, and one that lost its end are told apart by name. The
ways out are an operator's decisions: :func:`adopt` takes another topic as the next generation, whose offsets go on
where the lake stands (``base/<topic>/<p>/<topic id>`` is added to the brokers'); :func:`skip_lost` passes what is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from rolltape.ingest.kafka.client import KafkaClient, TopicInfo
from rolltape.ingest.kafka.topics import existing_topics
from rolltape.ingest.lanes import LOG_PREFIX, NOTHING, log_app_id
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    ConfigError,
    LakeAheadError,
    LogMismatchError,
    OffsetLostError,
    OtherClusterError,
    TopicRecreatedError,
)
from rolltape.schema.kinds import TOPICS
from rolltape.store.lake import Lake
from rolltape.store.snapshot import KAFKA_TRANSACTION

KAFKA_PREFIX: Final = f"{KAFKA_TRANSACTION}/"
BASE_PREFIX: Final = "base/"


def generation_app_id(cluster_id: str, topic: str, topic_id: str) -> str:
    """Name of the transaction that says which generation of a topic one of a cluster is."""
    return f"{KAFKA_PREFIX}{cluster_id}/{topic}/{topic_id}"


def base_app_id(partition: Partition, topic_id: str) -> str:
    """Name of the transaction that holds what is added to a partition's offsets to get the lake's."""
    return f"{BASE_PREFIX}{partition.topic}/{partition.partition}/{topic_id}"


def log_bases(transactions: Mapping[str, int], topic_ids: Mapping[str, str]) -> dict[Partition, int]:
    """What is added to the brokers' offsets of each partition to get the lake's; absent: 0."""
    bases = {}
    for app_id, version in transactions.items():
        if app_id.startswith(BASE_PREFIX):
            topic, number, topic_id = app_id.removeprefix(BASE_PREFIX).split("/", 2)
            if topic_ids.get(topic) == topic_id:
                bases[Partition(topic, int(number))] = version
    return bases


def is_kafka_lake(transactions: Mapping[str, int]) -> bool:
    """Whether a Kafka log is archived in the lake."""
    return any(app_id.startswith(KAFKA_PREFIX) for app_id in transactions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    number: int
    cluster_id: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Which log it is: the cluster and its topics, as the brokers say now.

    Attributes:
        url: of the log, for messages.
        cluster_id: what names the cluster.
        topics: what the brokers say of each topic, by our name.
    """

    url: str
    cluster_id: str
    topics: Mapping[str, TopicInfo]

    @property
    def topic_ids(self) -> dict[str, str]:
        """Identity of each topic."""
        return {name: info.topic_id for name, info in self.topics.items()}

    def partitions(self) -> list[Partition]:
        """All partitions of all topics."""
        return [Partition(name, number) for name, info in self.topics.items() for number in range(info.num_partitions)]

    def generation(self, transactions: Mapping[str, int], topic: str) -> tuple[str, int]:
        """Application transaction and number of the generation that a topic is for this lake.

        Raises:
            LogMismatchError: an embedded log feeds the lake.
            OtherClusterError: the lake was fed from another cluster.
            TopicRecreatedError: it was fed from another topic of this name.
        """
        topic_id = self.topics[topic].topic_id
        app_id = generation_app_id(self.cluster_id, topic, topic_id)
        known = _newest(transactions, topic)
        if known is None:
            if not is_kafka_lake(transactions) and any(name.startswith(LOG_PREFIX) for name in transactions):
                raise LogMismatchError(
                    "expected a lake that is empty or fed from Kafka, got one that an embedded log's committer fed: "
                    f"it cannot take {self.url} too; name another lake"
                )
            return app_id, 1
        if (known.cluster_id, known.topic_id) == (self.cluster_id, topic_id):
            return app_id, known.number
        at_stake = _archived(transactions, topic)
        way_out = (
            f"if the new one is meant, `rolltape sink --log {self.url} --lake LAKE --adopt {topic}` takes it as the "
            "next generation: what is archived stays, what the old one held beyond that is lost, and lanes that miss "
            "records stand until an operator accepts the loss"
        )
        if known.cluster_id != self.cluster_id:
            raise OtherClusterError(
                f"topic {topic}: expected cluster {known.cluster_id}, from which the lake was fed, got "
                f"{self.cluster_id} at {self.url}; archived so far: {at_stake}. Is the address right? Else {way_out}"
            )
        raise TopicRecreatedError(
            f"topic {topic}: expected the topic {known.topic_id}, from which the lake was fed, got another of the same "
            f"name, {topic_id}, at {self.url}: it was deleted and created anew; archived so far: {at_stake}; {way_out}"
        )

    def base(self, transactions: Mapping[str, int], partition: Partition) -> int:
        """What is added to the brokers' offsets of a partition to get the lake's."""
        return transactions.get(base_app_id(partition, self.topics[partition.topic].topic_id), 0)

    def position(self, transactions: Mapping[str, int], partition: Partition) -> int:
        """The broker's offset of the first record of a partition that is not archived."""
        return transactions.get(log_app_id(partition), NOTHING) + 1 - self.base(transactions, partition)

    def start(self, transactions: Mapping[str, int], partition: Partition, begin: int, end: int) -> int:
        """The broker's offset at which to go on reading a partition that holds ``begin`` to ``end`` - 1.

        Raises:
            OffsetLostError: records after the last archived one are gone.
            LakeAheadError: the lake holds offsets that the log does not have.
        """
        position = self.position(transactions, partition)
        if begin > position:
            raise OffsetLostError(
                f"{partition}: expected the log to hold offset {position}, the first that is not archived, got {begin} "
                f"to {end - 1}: {begin - position} offsets ({position} to {begin - 1}) were deleted by retention or "
                f"truncation before a sink archived them. They are lost; `rolltape sink --log {self.url} --lake LAKE "
                f"--skip-lost {partition}` goes on at {begin}, and lanes that miss records stand until an operator "
                "accepts the loss"
            )
        if position > end:
            raise LakeAheadError(
                f"{partition}: expected the log to reach offset {position - 1}, which the lake holds, got its end at "
                f"{end}: the log lost its last {position - end} offsets (a restored or truncated log), or is another "
                f"one. What is archived stays; `rolltape sink --log {self.url} --lake LAKE --adopt {partition.topic}` "
                "reads the log as it is again, for the next generation, whose offsets go on after the lake's"
            )
        return position


def _newest(transactions: Mapping[str, int], topic: str) -> _Generation | None:
    found = []
    for app_id, version in transactions.items():
        if app_id.startswith(KAFKA_PREFIX):
            cluster_id, name, topic_id = app_id.removeprefix(KAFKA_PREFIX).split("/", 2)
            if name == topic:
                found.append(_Generation(number=version, cluster_id=cluster_id, topic_id=topic_id))
    return max(found, key=lambda generation: generation.number, default=None)


def _archived(transactions: Mapping[str, int], topic: str) -> str:
    prefix = f"{LOG_PREFIX}{topic}/"
    found = {
        int(app_id.removeprefix(prefix)): version
        for app_id, version in transactions.items()
        if app_id.startswith(prefix)
    }
    return ", ".join(f"{topic}/{number} up to {version}" for number, version in sorted(found.items())) or "nothing"


def adopt(
    lake: Lake,
    identity: LogIdentity,
    topic: str,
    begins: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    regrown: Collection[Partition] = (),
) -> int:
    """Take a topic as it is now for the next generation; returns its number (unchanged where nothing is amiss).

    ``begins`` and ``ends`` are the brokers' oldest and next offsets; ``regrown`` are the partitions that lost their end
    and grew again beyond the lake's position (see :func:`rolltape.ingest.kafka.seam.regrown`). Lake offsets of a
    partition go on after its last archived one. A topic that was created anew is read from its beginning. So is a
    partition that lost its end, because nobody knows where it was cut before others were written there: lanes say what
    is archived already. (Messages that are no records of ours have no lane; those that it still holds become dead
    letters once more.)

    Raises:
        ConfigError: no such topic.
        CommitterFencedError: another sink committed meanwhile; do it again.
    """
    if topic not in identity.topics:
        raise ConfigError(f"expected a topic of {', '.join(identity.topics)}, got {topic!r}")
    transactions = lake.snapshot().transactions
    known = _newest(transactions, topic)
    if known is None:
        return identity.generation(transactions, topic)[1]
    topic_id = identity.topics[topic].topic_id
    is_same = (known.cluster_id, known.topic_id) == (identity.cluster_id, topic_id)
    bases = {}
    for partition in identity.partitions():
        if partition.topic != topic:
            continue
        app_id = base_app_id(partition, topic_id)
        next_offset, base = transactions.get(log_app_id(partition), NOTHING) + 1, transactions.get(app_id, 0)
        if not is_same and next_offset > base:
            bases[app_id] = next_offset
        elif is_same and (next_offset - base > ends[partition] or partition in regrown):
            bases[app_id] = next_offset - begins[partition]
    if is_same and not bases:
        return known.number
    moved = {generation_app_id(identity.cluster_id, topic, topic_id): known.number + 1, **bases}
    watched = {log_app_id(partition) for partition in identity.partitions() if partition.topic == topic}
    lake.append({}, moved, {app_id: transactions.get(app_id) for app_id in (*moved, *watched)})
    return known.number + 1


def skip_lost(lake: Lake, identity: LogIdentity, partition: Partition, begins: Mapping[Partition, int]) -> int:
    """Go on at the oldest offset that the log still holds, as ``begins`` says; returns how many offsets are passed.

    Raises:
        ConfigError: no such partition.
        CommitterFencedError: a sink archived it meanwhile; look again.
    """
    if partition not in identity.partitions():
        raise ConfigError(f"expected a partition such as rollout/0 of {', '.join(identity.topics)}, got {partition}")
    transactions, begin = lake.snapshot().transactions, begins[partition]
    app_id, number = identity.generation(transactions, partition.topic)
    position = identity.position(transactions, partition)
    if begin <= position:
        return 0
    moved = {log_app_id(partition): begin + identity.base(transactions, partition) - 1}
    if transactions.get(app_id) != number:
        moved[app_id] = number
    lake.append({}, moved, {name: transactions.get(name) for name in moved})
    return begin - position


def identify(client: KafkaClient) -> LogIdentity:
    """Which log a client reaches.

    Raises:
        TopicError: a topic is missing; names the command that makes it.
        LogUnreachableError: no broker answers.
    """
    admin = client.admin()
    try:
        topics = existing_topics(admin, TOPICS, client.config.url)
        return LogIdentity(client.config.url, admin.cluster_id(), topics)
    finally:
        admin.close()


def look_at(client: KafkaClient) -> tuple[LogIdentity, dict[Partition, int], dict[Partition, int]]:
    """Which log a client reaches, and the oldest and the next offset of each partition."""
    identity = identify(client)
    consumer = client.consumer()
    try:
        partitions = identity.partitions()
        return identity, consumer.begin_offsets(partitions), consumer.end_offsets(partitions)
    finally:
        consumer.close()


def parse_partition(text: str) -> Partition:
    """A partition as the command line names it.

    Raises:
        ConfigError: not of the form ``topic/number``.

    >>> parse_partition("rollout/3")
    Partition(topic='rollout', partition=3)
    """
    topic, slash, number = text.rpartition("/")
    if not (slash and topic and number.isascii() and number.isdigit()):
        raise ConfigError(f"expected a partition as in rollout/0, got {text!r}")
    return Partition(topic, int(number))


def check_topics(identity: LogIdentity, transactions: Mapping[str, int], topics: Collection[str]) -> dict[str, int]:
    """The generations of topics, by application transaction, once each was found to belong to the lake."""
    return dict(identity.generation(transactions, topic) for topic in topics)
