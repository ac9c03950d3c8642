"""Looking at topics and making them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from rolltape.ingest.kafka.client.connection import Connection
from rolltape.ingest.kafka.client.messages import TopicInfo
from rolltape.ingest.kafka.client.vendor import ConfigResource, ConfigResourceType, kafka, vendor
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.schema.errors import LogUnreachableError

_NO_TOPIC_ID: Final = "-"
_TOPIC_POLL_S: Final = 0.1


class BrokerAdmin:
    """Looks at topics and makes them."""

    def __init__(self, config: KafkaConfig) -> None:
        """Connect.

        Raises:
            LogUnreachableError, LogAuthenticationError: no broker answers, or they do not accept us.
        """
        self._connection = Connection(config)
        self._config = config
        with self._connection.opening("connecting"):
            self._admin: Any = kafka.KafkaAdminClient(**self._connection.settings())

    def cluster_id(self) -> str:
        """What names the cluster: another one, or one that was set up anew, has another."""
        return str(self._connection.cluster.cluster_id)

    def num_brokers(self) -> int:
        """Brokers that were there at the last look."""
        return len(self._connection.cluster.brokers())

    def describe(self, topics: Collection[str]) -> dict[str, TopicInfo | None]:
        """Each topic by our name; None for one that does not exist.

        A broker that just went away is waited for: the others, or it, will answer.

        Raises:
            LogAuthorizationError: not allowed to look.
            LogUnreachableError: no broker answered in time.
        """
        deadline = time.monotonic() + self._config.bootstrap_timeout_s
        while True:
            try:
                return self._describe(topics)
            except LogUnreachableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TOPIC_POLL_S)

    def _describe(self, topics: Collection[str]) -> dict[str, TopicInfo | None]:
        names = {self._config.broker_topic(topic): topic for topic in topics}
        with self._connection.errors("describing topics"):
            described = {found["name"]: found for found in self._admin.describe_topics(list(names))}
            there = [name for name in names if name in described and not described[name]["error_code"]]
            for name in names:
                code = described[name]["error_code"] if name in described else 0
                if code and code != vendor.UnknownTopicOrPartitionError.errno:
                    raise vendor.for_code(code)(name)
            configs = self._configs(there) if there else {}
        return {
            topic: _topic_info(topic, described[name], configs.get(name, {})) if name in there else None
            for name, topic in names.items()
        }

    def _configs(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        found = self._admin.describe_configs(resources, config_filter="all")["topic"]
        return {
            name: {key: str(entry["value"]) for key, entry in entries.items() if entry["value"] is not None}
            for name, entries in found.items()
        }

    def create(self, topic: str, num_partitions: int, replication: int, configs: Mapping[str, str]) -> None:
        """Make a topic and wait until its partitions have leaders. One that exists already is left alone."""
        name = self._config.broker_topic(topic)
        wanted = {
            "num_partitions": num_partitions,
            "replication_factor": replication,
            "configs": dict(configs),
        }
        with self._connection.errors(f"creating topic {name}"), contextlib.suppress(vendor.TopicAlreadyExistsError):
            self._admin.create_topics({name: wanted})
        with self._connection.errors(f"waiting for topic {name}"):
            self._admin.wait_for_topics([name], timeout_ms=int(self._config.request_timeout_s * 1000))

    def alter_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        """Set some settings of a topic; the others stay."""
        name = self._config.broker_topic(topic)
        with self._connection.errors(f"changing topic {name}"):
            self._admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, dict(configs))])

    def delete(self, topics: Collection[str]) -> None:
        """Delete topics and everything in them."""
        names = [self._config.broker_topic(topic) for topic in topics]
        with self._connection.errors(f"deleting topics {', '.join(names)}"):
            self._admin.delete_topics(names)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with contextlib.suppress(vendor.KafkaError):
            self._admin.close()


def _topic_info(topic: str, found: Mapping[str, Any], configs: Mapping[str, str]) -> TopicInfo:
    partitions = found["partitions"]
    return TopicInfo(
        name=topic,
        # Brokers that do not name topics by an identity (before Kafka 2.8, noida-db) leave it out.
        topic_id=str(found.get("topic_id") or _NO_TOPIC_ID),
        num_partitions=len(partitions),
        replication=min((len(partition["replica_nodes"]) for partition in partitions), default=0),
        configs=MappingProxyType(dict(configs)),
    )
