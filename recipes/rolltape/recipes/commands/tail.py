"""``rolltape tail``: follow events as they are committed."""

from __future__ import annotations

import argparse
import time

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument("--topic", action="append", metavar="TOPIC", help="only this topic (may be repeated)")
    parser.add_argument("--kind", action="append", metavar="KIND", help="only this kind (may be repeated)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="CURSOR",
        default="",
        help="start at a cursor (default: now); 'start' for the beginning",
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many seconds (default: never)")
    parser.add_argument("--wide", action="store_true", help="with the kind's own columns")


def run(options: argparse.Namespace) -> int:
    """Print one JSON line (or one short line on a terminal) per event."""
    from rolltape.recipes.output import is_terminal, say, to_json
    from rolltape.schema.cursor import Cursor
    from rolltape.store.tail import Tail

    lake = open_lake(options.lake)
    start = (
        lake.cursor() if not options.start else Cursor() if options.start == "start" else Cursor.parse(options.start)
    )
    tail = Tail(lake, start, topics=options.topic, kinds=options.kind)
    deadline = time.monotonic() + options.seconds if options.seconds else float("inf")
    names = [
        "log_topic",
        "log_partition",
        "log_offset",
        "kind",
        "event_id",
        "run_id",
        "trajectory_id",
        "attempt",
        "event_index",
    ]
    while time.monotonic() < deadline:
        for delivery in tail.poll(min(0.5, max(0.0, deadline - time.monotonic()))):
            table = delivery.table.select([*names, delivery.kind] if options.wide else names)
            for row in table.to_pylist():
                shown = {key: value for key, value in row.items() if value is not None}
                if is_terminal():
                    place = f"{row['log_topic']}/{row['log_partition']}:{row['log_offset']}"
                    say(f"{place}  {row['kind']:<22} {row['trajectory_id'] or row['run_id']}")
                else:
                    print(to_json(shown), flush=True)
    return 0
