"""The vendor's client behind our own names: the only package that imports ``kafka``.

Topics are ours here (``rollout``), with the prefix added on the way to the brokers. Errors of the vendor become errors
of :mod:`rolltape.schema.errors` that say what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rolltape.ingest.kafka.client.admin import BrokerAdmin
from rolltape.ingest.kafka.client.consumer import BrokerConsumer
from rolltape.ingest.kafka.client.messages import Headers, Message, Pending, TopicInfo, record_bytes
from rolltape.ingest.kafka.client.producer import BrokerProducer
from rolltape.ingest.kafka.config import KafkaConfig

__all__ = [
    "BrokerAdmin",
    "BrokerConsumer",
    "BrokerProducer",
    "Headers",
    "KafkaClient",
    "Message",
    "Pending",
    "TopicInfo",
    "connect",
    "record_bytes",
]


@dataclass(frozen=True, slots=True)
class KafkaClient:
    """What is opened on one cluster. Each call opens an object of its own, which its caller closes."""

    config: KafkaConfig

    def producer(
        self, *, max_record_bytes: int = 16 << 20, on_done: Callable[[], None] | None = None
    ) -> BrokerProducer:
        """A producer of records of at most ``max_record_bytes`` (see :func:`record_bytes`)."""
        return BrokerProducer(self.config, max_record_bytes=max_record_bytes, on_done=on_done)

    def consumer(self, group: str | None = None) -> BrokerConsumer:
        """A consumer, as a member of ``group`` where one is named."""
        return BrokerConsumer(self.config, group=group)

    def admin(self) -> BrokerAdmin:
        """A look at the topics."""
        return BrokerAdmin(self.config)


def connect(config: KafkaConfig) -> KafkaClient:
    """A client of the cluster that ``config`` names, once a broker has answered.

    Raises:
        LogUnreachableError: unknown host, closed port, or no answer in time.
        LogAuthenticationError: wrong user, password or certificate.
    """
    client = KafkaClient(config)
    client.admin().close()
    return client
