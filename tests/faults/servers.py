"""The servers that a row may strike, and how they are put right again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError
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
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap, bootstrap_timeout_ms=5000)
    try:
        partitions = [part for topic in admin.describe_topics() for part in topic["partitions"]]
    except KafkaError:
        return 1
    finally:
        admin.close()
    return sum(part["leader_id"] < 0 or len(part["isr_nodes"]) < len(part["replica_nodes"]) for part in partitions)
