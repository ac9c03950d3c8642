"""``rolltape topics``: the topics of a Kafka log, how they are and how they should be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rolltape.schema.errors import ConfigError

if TYPE_CHECKING:
    from rolltape.ingest.kafka.topics import TopicCheck


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--log", required=True, metavar="URL", help="the log: kafka://host1:9092,host2:9092/PREFIX")
    parser.add_argument("--create", action="store_true", help="make the topics that are missing; change no other")
    parser.add_argument(
        "--partitions",
        metavar="TOPIC=N,…",
        default="",
        help="partitions, e.g. rollout=12,teacher=4 (default: rollout=4, the others 1)",
    )
    parser.add_argument(
        "--retention-hours", type=float, metavar="H", help="how long records are kept, -1 for ever (default: 168)"
    )
    parser.add_argument(
        "--max-message-bytes", type=int, metavar="N", help="largest record that the brokers take (default: 16 MiB)"
    )
    parser.add_argument(
        "--replication", type=int, metavar="N", help="copies of each partition (default: 3, or as many as brokers)"
    )
    parser.add_argument(
        "--min-insync-replicas",
        type=int,
        metavar="N",
        help="copies that must have a record before it counts (default: one less than the copies)",
    )


def run(options: argparse.Namespace) -> int:
    """Print every topic and what differs; status 1 where a topic is missing or not as planned."""
    from rolltape.ingest.kafka.client import connect
    from rolltape.ingest.kafka.config import KafkaConfig
    from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
    from rolltape.recipes.output import print_rows

    config = KafkaConfig.from_url(options.log)
    plan = TopicPlan.of(
        partitions=parse_partitions(options.partitions),
        retention_hours=options.retention_hours,
        max_message_bytes=options.max_message_bytes,
        replication=options.replication,
        min_insync_replicas=options.min_insync_replicas,
    )
    admin = connect(config).admin()
    try:
        checks = ensure_topics(admin, plan, create=options.create)
    finally:
        admin.close()
    print_rows(
        [_row(config.broker_topic(check.config.name), check) for check in checks], title=f"topics of {config.url}"
    )
    return int(not all(check.is_sound for check in checks))


def parse_partitions(text: str) -> dict[str, int]:
    """Read ``rollout=12,teacher=4``.

    Raises:
        ConfigError: not of this form.
    """
    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if not number.strip().isdecimal():
            raise ConfigError(f"--partitions: expected TOPIC=N,…, such as rollout=12, got {part!r}")
        found[name.strip()] = int(number)
    return found


def _row(name: str, check: TopicCheck) -> dict[str, Any]:
    info = check.info
    configs = {} if info is None else info.configs
    return {
        "topic": name,
        "state": _state(check),
        "partitions": None if info is None else info.num_partitions,
        "replication": None if info is None else info.replication,
        "retention.ms": _number(configs.get("retention.ms")),
        "max.message.bytes": _number(configs.get("max.message.bytes")),
        "min.insync.replicas": _number(configs.get("min.insync.replicas")),
        "cleanup.policy": configs.get("cleanup.policy"),
        "differences": _differences(check.differences),
    }


def _state(check: TopicCheck) -> str:
    if check.info is None:
        return "missing"
    if check.differences:
        return "differs"
    return "created" if check.created else "as planned"


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _differences(found: Sequence[tuple[str, str, str]]) -> str:
    return "; ".join(f"{name}: planned {planned}, is {actual}" for name, planned, actual in found)
