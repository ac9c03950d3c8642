"""Topics as planned and as they are, and the command that compares them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rolltape.ingest.kafka.client import BrokerAdmin, TopicInfo
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.topics import ALL_TOPICS, TopicConfig, TopicPlan, ensure_topics, existing_topics
from rolltape.recipes.cli import main
from rolltape.schema.errors import ConfigError, TopicError


@pytest.fixture
def config(kafka_broker: Any, topic_prefix: str) -> KafkaConfig:
    """A cluster without our topics."""
    return KafkaConfig(bootstrap=tuple(kafka_broker.bootstrap.split(",")), prefix=topic_prefix)


@pytest.fixture
def admin(config: KafkaConfig) -> Iterator[BrokerAdmin]:
    """A look at it."""
    with contextlib.closing(BrokerAdmin(config)) as opened:
        yield opened


def rows(text: str) -> dict[str, dict[str, Any]]:
    """The command's rows by topic, without prefix."""
    found = [json.loads(line) for line in text.splitlines()]
    return {row["topic"].rpartition(".")[2]: row for row in found}


def test_missing_topics_are_made_as_planned(admin: BrokerAdmin) -> None:
    plan = TopicPlan.of(partitions={"rollout": 3}, retention_hours=2, max_message_bytes=1 << 20)
    assert not any(check.is_sound for check in ensure_topics(admin, plan, create=False))
    checks = {check.config.name: check for check in ensure_topics(admin, plan, create=True)}
    assert tuple(checks) == ALL_TOPICS
    assert all(check.is_sound and check.created for check in checks.values())
    info = checks["rollout"].info
    assert info is not None
    assert info.num_partitions == 3
    assert info.configs["retention.ms"] == "7200000"
    assert info.configs["max.message.bytes"] == str(1 << 20)
    compacted = [name for name in ALL_TOPICS if (found := checks[name].info) and "compact" in str(found.configs)]
    assert {"policy-versions", "producers"} <= set(compacted)
    # What is there is left alone.
    again = ensure_topics(admin, plan, create=True)
    assert not any(check.created for check in again)
    assert all(check.is_sound for check in again)


def test_what_was_asked_for_is_compared_and_the_rest_must_do(admin: BrokerAdmin) -> None:
    ensure_topics(admin, TopicPlan.of(partitions={"rollout": 3}, retention_hours=2), create=True)
    assert all(check.is_sound for check in ensure_topics(admin, TopicPlan(), create=False))
    asked = ensure_topics(admin, TopicPlan.of(partitions={"rollout": 4}, retention_hours=3), create=False)
    found = {check.config.name: {name: (plan, is_) for name, plan, is_ in check.differences} for check in asked}
    assert found["rollout"] == {"partitions": ("4", "3"), "retention.ms": ("10800000", "7200000")}
    assert found["control"] == {"retention.ms": ("10800000", "7200000")}
    assert found["policy-versions"] == {}
    admin.alter_configs("weights", {"max.message.bytes": "1000000", "cleanup.policy": "compact"})
    weights = {check.config.name: check for check in ensure_topics(admin, TopicPlan(), create=False)}["weights"]
    assert {name for name, _, _ in weights.differences} == {"max.message.bytes", "cleanup.policy"}


@pytest.mark.parametrize(("num_brokers", "copies", "in_sync"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (9, 3, 2)])
def test_copies_suit_the_cluster(num_brokers: int, copies: int, in_sync: int) -> None:
    settled = TopicConfig(name="rollout").settled(num_brokers)
    assert (settled.replication, settled.min_insync_replicas) == (copies, in_sync)


def test_more_acknowledgements_than_copies_are_refused_before_a_topic_is_made(admin: BrokerAdmin) -> None:
    with pytest.raises(ConfigError, match="min_insync_replicas: expected at most the 1 copies of topic rollout, got 2"):
        ensure_topics(admin, TopicPlan.of(replication=1, min_insync_replicas=2), create=True)
    assert set(admin.describe(ALL_TOPICS).values()) == {None}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"partitions": {"rollouts": 1}}, "rollouts"),
        ({"partitions": {"rollout": 0}}, "1 or more"),
        ({"partitions": {"policy-versions": 2}}, "1 of policy-versions"),
        ({"retention_hours": 0.0}, "retention_hours: expected hours above 0, or -1"),
        ({"retention_hours": float("nan")}, "retention_hours: expected hours above 0, or -1"),
        ({"max_message_bytes": 0}, "max_message_bytes: expected 1 or more"),
        ({"replication": -1}, "replication: expected 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(asked: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TopicPlan.of(**asked)


def test_a_missing_topic_names_the_command(admin: BrokerAdmin, config: KafkaConfig) -> None:
    with pytest.raises(TopicError, match=f"rolltape topics --log {config.url} --create"):
        existing_topics(admin, ["rollout"], config.url)
    admin.create("rollout", 1, 1, {})
    found = existing_topics(admin, ["rollout"], config.url)["rollout"]
    assert isinstance(found, TopicInfo)
    # Two that make it at once: the second finds it.
    admin.create("rollout", 1, 1, {})


def test_the_command_prints_differences_and_says_so_by_its_status(
    config: KafkaConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topics", "--log", config.url]) == 1
    assert {row["state"] for row in rows(capsys.readouterr().out).values()} == {"missing"}
    assert main(["topics", "--log", config.url, "--create", "--partitions", "rollout=3,teacher=2"]) == 0
    made = rows(capsys.readouterr().out)
    assert {row["state"] for row in made.values()} == {"created"}
    assert [made[name]["partitions"] for name in ("rollout", "teacher", "control")] == [3, 2, 1]
    assert made["policy-versions"]["cleanup.policy"] == "compact"
    assert main(["topics", "--log", config.url]) == 0
    assert {row["state"] for row in rows(capsys.readouterr().out).values()} == {"as planned"}
    assert main(["topics", "--log", config.url, "--partitions", "rollout=5"]) == 1
    differing = rows(capsys.readouterr().out)["rollout"]
    assert differing["state"] == "differs"
    assert differing["differences"] == "partitions: planned 5, is 3"


def test_the_command_refuses_what_it_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", "--log", "kafka://one", "--partitions", "rollout"]) == 1
    assert "TOPIC=N" in capsys.readouterr().err
    assert main(["topics", "--log", "kafka://alice:hush@one"]) == 1
    assert "hush" not in capsys.readouterr().err
