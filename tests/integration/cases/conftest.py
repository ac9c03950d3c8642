"""A log over the most real broker that there is here, and its lake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest import open_log
from rolltape.ingest.kafka.client import connect
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.store.lake import Lake


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Topics of their own and a lake of its own."""

    address: str
    lake: Lake
    spool: Path

    @property
    def config(self) -> KafkaConfig:
        """How to reach the topics."""
        return KafkaConfig.from_url(self.address, {})

    def open(self, *, with_lake: bool = True) -> KafkaLog:
        """The log."""
        url = f"{self.address}?lake={self.lake.location.path}" if with_lake else self.address
        log = open_log(url, spool=self.spool)
        assert isinstance(log, KafkaLog)
        return log


@pytest.fixture
def make_place(kafka_broker: Any, topic_prefix: str, tmp_path: Path) -> Any:
    """Make the topics and the lake of a test; numbers of the topics may be given."""

    def make(name: str = "one", **numbers: Any) -> Place:
        address = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}-{name}"
        admin = connect(KafkaConfig.from_url(address, {})).admin()
        ensure_topics(admin, TopicPlan.of(**numbers), create=True)
        admin.close()
        return Place(address=address, lake=Lake.create(tmp_path / name / "lake"), spool=tmp_path / name)

    return make


@pytest.fixture
def place(make_place: Any) -> Place:
    """Topics with two partitions of rollouts, and a lake."""
    made: Place = make_place(partitions={"rollout": 2})
    return made
