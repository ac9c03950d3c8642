"""The topics of a log: how they should be, how they are, and making the ones that are missing."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rolltape.ingest.kafka.client import BrokerAdmin, TopicInfo
from rolltape.schema.errors import ConfigError, TopicError
from rolltape.schema.kinds import TOPICS

POLICY_VERSIONS: Final = "policy-versions"
"""The compacted topic of one partition that keeps the newest version of each policy."""

PRODUCERS: Final = "producers"
"""The compacted topic of one partition that keeps the newest epoch of each producer."""

COMPACTED: Final = (POLICY_VERSIONS, PRODUCERS)
ALL_TOPICS: Final = (*TOPICS, *COMPACTED)
MAX_MESSAGE_BYTES: Final = 16 << 20
DEFAULT_RETENTION_HOURS: Final = 7 * 24

_HOUR_MS: Final = 3_600_000
_KNOWN_S: Final = 15.0
_KNOWN_POLL_S: Final = 0.1
_PARTITIONS: Final = {"rollout": 4, "teacher": 1, "training": 1, "weights": 1, "control": 1}
_REPLICATION: Final = 3
_SETTING_OF: Final = {
    "retention_hours": "retention.ms",
    "max_message_bytes": "max.message.bytes",
    "min_insync_replicas": "min.insync.replicas",
    "replication": "replication",
}
_ANY: Final = frozenset({"partitions", "retention.ms"})
_AT_LEAST: Final = frozenset({"replication", "max.message.bytes", "min.insync.replicas"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """How one topic should be.

    Attributes:
        name: our name of it, without prefix.
        num_partitions: partitions; a topic of a log that is in use never gets others.
        replication: copies of each partition; as many as there are brokers, at most three, where it is 0.
        retention_hours: after which records are deleted, -1 for never; nothing where the topic is compacted.
        max_message_bytes: largest record batch that the brokers take.
        min_insync_replicas: copies that must have a record before it is acknowledged.
        cleanup_policy: ``delete`` or ``compact``.
        exact: settings that a topic must have as they are here. Of the others, partitions and retention may be any,
            copies and sizes may be more.
    """

    name: str
    num_partitions: int = 1
    replication: int = 0
    retention_hours: float = DEFAULT_RETENTION_HOURS
    max_message_bytes: int = MAX_MESSAGE_BYTES
    min_insync_replicas: int = 0
    cleanup_policy: str = "delete"
    exact: frozenset[str] = frozenset()

    def settled(self, num_brokers: int) -> TopicConfig:
        """With the numbers that depend on the size of the cluster.

        Raises:
            ConfigError: more copies are to acknowledge a record than there are.
        """
        replication = self.replication or min(_REPLICATION, max(1, num_brokers))
        in_sync = self.min_insync_replicas or max(1, replication - 1)
        if in_sync > replication:
            raise ConfigError(
                f"min_insync_replicas: expected at most the {replication} copies of topic {self.name}, got {in_sync}: "
                "no record would ever be acknowledged; ask for fewer, or for more copies"
            )
        return replace(self, replication=replication, min_insync_replicas=in_sync)

    def settings(self) -> dict[str, str]:
        """The brokers' names of the settings that we rely on, with our values."""
        found = {
            "cleanup.policy": self.cleanup_policy,
            "max.message.bytes": str(self.max_message_bytes),
            "min.insync.replicas": str(self.min_insync_replicas),
            # Retention and age go by the brokers' clocks. By a producer's, one that is days behind has what was
            # acknowledged deleted at once, and one that is an hour ahead is refused.
            "message.timestamp.type": "LogAppendTime",
        }
        if self.cleanup_policy == "delete":
            hours = self.retention_hours
            found["retention.ms"] = "-1" if hours < 0 else str(int(hours * _HOUR_MS))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """How all topics of a log should be."""

    topics: tuple[TopicConfig, ...] = field(
        default_factory=lambda: tuple(
            TopicConfig(
                name=name,
                num_partitions=_PARTITIONS.get(name, 1),
                cleanup_policy="compact" if name in COMPACTED else "delete",
            )
            for name in ALL_TOPICS
        )
    )

    @classmethod
    def of(
        cls,
        *,
        partitions: Mapping[str, int] | None = None,
        retention_hours: float | None = None,
        max_message_bytes: int | None = None,
        min_insync_replicas: int | None = None,
        replication: int | None = None,
    ) -> TopicPlan:
        """The default plan with other numbers; of partitions only those named.

        Raises:
            ConfigError: an unknown topic, or a number outside its range.
        """
        partitions = partitions or {}
        unknown = partitions.keys() - set(ALL_TOPICS)
        if unknown:
            raise ConfigError(
                f"partitions: expected topics of {', '.join(ALL_TOPICS)}, got {', '.join(sorted(unknown))}"
            )
        if any(number < 1 for number in partitions.values()):
            raise ConfigError(f"partitions: expected 1 or more of each topic, got {dict(partitions)}")
        for name in COMPACTED:
            if partitions.get(name, 1) != 1:
                raise ConfigError(f"partitions: expected 1 of {name}, got {partitions[name]}")
        chosen: dict[str, Any] = {
            "retention_hours": retention_hours,
            "max_message_bytes": max_message_bytes,
            "min_insync_replicas": min_insync_replicas,
            "replication": replication,
        }
        common = {name: value for name, value in chosen.items() if value is not None}
        if not common.get("retention_hours", 1) or not math.isfinite(common.get("retention_hours", 1)):
            raise ConfigError(
                f"retention_hours: expected hours above 0, or -1 for ever, got {retention_hours}: records would go "
                "before a sink reads them"
            )
        for name in ("max_message_bytes", "min_insync_replicas", "replication"):
            if common.get(name, 1) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {common[name]}")
        asked = frozenset(_SETTING_OF[name] for name in common)
        return cls(
            topics=tuple(
                replace(
                    topic,
                    num_partitions=partitions.get(topic.name, topic.num_partitions),
                    exact=asked | ({"partitions"} if topic.name in partitions else set()),
                    **common,
                )
                for topic in cls().topics
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCheck:
    """One topic, and what of it is not as planned.

    Attributes:
        config: the plan, with numbers that suit the cluster.
        info: what the brokers say; None where the topic does not exist.
        created: whether it was made just now.
        differences: setting, planned value, found value.
    """

    config: TopicConfig
    info: TopicInfo | None
    created: bool = False
    differences: tuple[tuple[str, str, str], ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether the topic is there as planned."""
        return self.info is not None and not self.differences


def ensure_topics(admin: BrokerAdmin, plan: TopicPlan, *, create: bool) -> list[TopicCheck]:
    """Compare every topic with the plan; with ``create``, first make those that are missing.

    Existing topics are never changed: partitions that are added later would break the order of keys.
    """
    names = [topic.name for topic in plan.topics]
    num_brokers = admin.num_brokers()
    found = admin.describe(names)
    created = set()
    for topic in (topic.settled(num_brokers) for topic in plan.topics):
        if found[topic.name] is None and create:
            admin.create(topic.name, topic.num_partitions, topic.replication, topic.settings())
            created.add(topic.name)
    if created:
        found |= _once_known(admin, sorted(created))
    return [_check(topic.settled(num_brokers), found[topic.name], topic.name in created) for topic in plan.topics]


def _once_known(admin: BrokerAdmin, names: Sequence[str]) -> dict[str, TopicInfo | None]:
    """New topics, as soon as the broker that is asked has heard of them from the controller."""
    deadline = time.monotonic() + _KNOWN_S
    while True:
        found = admin.describe(names)
        if None not in found.values() or time.monotonic() > deadline:
            return found
        time.sleep(_KNOWN_POLL_S)


def _check(config: TopicConfig, info: TopicInfo | None, created: bool) -> TopicCheck:
    if info is None:
        return TopicCheck(config=config, info=None)
    planned = {"partitions": str(config.num_partitions), "replication": str(config.replication)} | config.settings()
    actual = {"partitions": str(info.num_partitions), "replication": str(info.replication), **info.configs}
    differences = tuple(
        (name, value, actual.get(name, "none"))
        for name, value in planned.items()
        if not _suits(name, value, actual.get(name), exact=name in config.exact)
    )
    return TopicCheck(config=config, info=info, created=created, differences=differences)


def _suits(name: str, planned: str, actual: str | None, *, exact: bool) -> bool:
    if actual is None or actual == planned or exact:
        return actual == planned
    return name in _ANY or (name in _AT_LEAST and int(actual) >= int(planned))


def existing_topics(admin: BrokerAdmin, names: Sequence[str], url: str) -> dict[str, TopicInfo]:
    """What the brokers say of topics that must be there.

    Raises:
        TopicError: one is missing; names the command that makes it.
    """
    found = admin.describe(names)
    missing = [name for name, info in found.items() if info is None]
    if missing:
        raise TopicError(
            f"expected the topics of {url}, got none for {', '.join(missing)}; create them: rolltape topics --log "
            f"{url} --create"
        )
    return {name: info for name, info in found.items() if info is not None}
