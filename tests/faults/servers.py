"""The servers that a row may strike, and how they are put right again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.s3_server import S3Server
from tests.servers.toxiproxy import Toxiproxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Three brokers, and what the row needs beside them."""

    cluster: KafkaCluster
    toxiproxy: Toxiproxy | None = None
    s3: S3Server | None = None

    @property
    def proxies(self) -> Toxiproxy:
        """The server of proxies, which the row said that it needs."""
        assert self.toxiproxy is not None
        return self.toxiproxy

    @property
    def objects(self) -> S3Server:
        """The S3 server, which the row said that it needs."""
        assert self.s3 is not None
        return self.s3


@contextmanager
def mended(cluster: KafkaCluster, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Whatever happens inside: afterwards all nodes run, and every partition has all of its replicas in sync."""
    try:
        yield
    finally:
        for node in cluster.nodes.values():
            if node.process.is_alive:
                node.process.resume()
        cluster.start_all()
        deadline = time.monotonic() + timeout_s
        while num_behind(cluster):
            if time.monotonic() > deadline:
                raise AssertionError(f"replicas are not in sync {timeout_s} s after all brokers came back")
            time.sleep(0.1)


def num_behind(cluster: KafkaCluster) -> int:
    """Partitions that lack a leader or a replica in sync."""
    try:
        topics = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 2}).list_topics(timeout=5).topics
    except KafkaException:
        return 1
    partitions = [part for topic in topics.values() for part in topic.partitions.values()]
    return sum(part.leader < 0 or len(part.isrs) < len(part.replicas) for part in partitions)
