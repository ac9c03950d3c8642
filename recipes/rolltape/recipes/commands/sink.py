"""``rolltape sink``: archives a Kafka log in a lake, exactly once; run as many as there is work for."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from rolltape.recipes.commands._common import add_lake

if TYPE_CHECKING:
    from rolltape.ingest.kafka.config import KafkaConfig
    from rolltape.ingest.kafka.sink import Sink
    from rolltape.store.lake import Lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--log", required=True, metavar="URL", help="the log: kafka://host1:9092,host2:9092/PREFIX")
    add_lake(parser)
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="answer Prometheus there (0: any free port; default: nowhere)"
    )
    parser.add_argument("--once", action="store_true", help="archive what the log holds now, and end")
    parser.add_argument(
        "--adopt",
        action="append",
        default=[],
        metavar="TOPIC",
        help="take a topic that was created anew, or lost its end, for the lake's next generation of it; then go on",
    )
    parser.add_argument(
        "--skip-lost",
        action="append",
        default=[],
        metavar="TOPIC/P",
        help="pass the records of a partition that were deleted before they were archived; then go on",
    )
    parser.add_argument(
        "--max-commit-bytes", type=int, metavar="N", help="rows held in memory for one commit (default: 32 MiB)"
    )


def run(options: argparse.Namespace) -> int:
    """Archive until told to stop (SIGTERM commits what was read first); the lake is made where there is none."""
    # Before Arrow is imported: what its C++ side allocates for itself (Parquet above all) follows this alone.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from rolltape.ingest.kafka.config import KafkaConfig
    from rolltape.ingest.kafka.footprint import limit_arenas
    from rolltape.ingest.kafka.sink import Sink, SinkOptions
    from rolltape.store.lake import Lake

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.WARNING)
    limit_arenas()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = KafkaConfig.from_url(options.log)
    _check_lake(config, options.lake)
    lake = Lake.create(options.lake)
    _take_ways_out(options, config, lake)
    chosen = {} if options.max_commit_bytes is None else {"max_commit_bytes": options.max_commit_bytes}
    settings = SinkOptions(metrics_port=options.metrics_port, **chosen)
    with contextlib.closing(Sink(config, lake, options=settings, alone=options.once)) as sink:
        _say(sink, options)
        if options.once:
            sink.drain()
        else:
            sink.run(stop)
    return 0


def _check_lake(config: KafkaConfig, url: str) -> None:
    """Refuse a log whose producers keep large payloads beside another lake: none of them would be found.

    Raises:
        ConfigError: the log's option, variable or file names another lake than ``--lake``.
    """
    from rolltape.schema.errors import ConfigError
    from rolltape.store.location import Location

    if config.lake and Location.parse(config.lake) != Location.parse(url):
        raise ConfigError(
            f"--lake: expected the lake that the log names, {config.lake}, got {url}: large payloads lie beside the "
            "lake, and sinks must look where producers put them; name the same"
        )


def _take_ways_out(options: argparse.Namespace, config: KafkaConfig, lake: Lake) -> None:
    """Do what an operator decided about a log that the lake does not agree with."""
    if not options.adopt and not options.skip_lost:
        return
    from rolltape.ingest.kafka.client import connect
    from rolltape.ingest.kafka.positions import adopt, look_at, parse_partition, skip_lost
    from rolltape.ingest.kafka.seam import regrown

    client = connect(config)
    identity, begins, ends = look_at(client)
    for topic in options.adopt:
        others = regrown(client, identity, lake.snapshot().transactions, topic)
        _print({"adopted": topic, "generation": adopt(lake, identity, topic, begins, ends, others)})
    for partition in map(parse_partition, options.skip_lost):
        num_lost = skip_lost(lake, identity, partition, begins)
        _print({"skipped": str(partition), "num_offsets": num_lost})


def _say(sink: Sink, options: argparse.Namespace) -> None:
    _print({"sink": "running", "log": options.log, "lake": options.lake, "metrics_port": sink.metrics_port})


def _print(row: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
