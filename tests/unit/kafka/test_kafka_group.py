"""A group shares its partitions out, and each rejoin ends, where the vendor's client alone would stand still."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rolltape.ingest.kafka.client import BrokerConsumer
from rolltape.ingest.kafka.client.vendor import Assignor


@dataclass
class Cluster:
    """What the vendor's client last heard of topics."""

    known: dict[str, set[int]]

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self.known.get(topic)


def shares(assignor: Assignor, cluster: Cluster, *members: str) -> dict[str, list[tuple[str, list[int]]]]:
    joined = [
        SimpleNamespace(member_id=name, group_instance_id=None, metadata=SimpleNamespace(topics=["a", "b"]))
        for name in members
    ]
    found = assignor.assign(cluster, joined)
    return {
        name: [(topic, list(partitions)) for topic, partitions in share.assigned_partitions]
        for name, share in found.items()
    }


def test_topics_that_the_broker_has_not_heard_of_are_shared_out_as_they_were_known() -> None:
    assignor = Assignor()
    assignor.known = {"a": {0, 1, 2, 3}, "b": {0}}
    found = shares(assignor, Cluster({}), "x", "y")
    assert found == {"x": [("a", [0, 1]), ("b", [0])], "y": [("a", [2, 3]), ("b", [])]}


def test_what_the_broker_says_counts_where_it_says_something() -> None:
    assignor = Assignor()
    assignor.known = {"a": {0}, "b": {0}}
    assert shares(assignor, Cluster({"a": {0, 1}}), "x") == {"x": [("a", [0, 1]), ("b", [0])]}


@dataclass
class Coordinator:
    """The vendor's member of a group: ``rejoining`` from the start of a rejoin until its answer was taken."""

    rejoining: bool
    rejoin_needed: bool = False

    def need_rejoin(self) -> bool:
        return self.rejoin_needed

    def request_rejoin(self) -> None:
        self.rejoin_needed = True


@pytest.mark.parametrize("rejoining", [True, False])
def test_a_rejoin_whose_answer_came_between_two_polls_is_asked_for_again(rejoining: bool) -> None:
    consumer = BrokerConsumer.__new__(BrokerConsumer)
    coordinator = Coordinator(rejoining)
    consumer.__dict__.update(_consumer=SimpleNamespace(_coordinator=coordinator), _rebalances=object())
    consumer._see_rejoin_through()
    assert coordinator.rejoin_needed is rejoining
