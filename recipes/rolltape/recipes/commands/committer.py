"""``rolltape committer``: the one writer of an embedded lake."""

from __future__ import annotations

import argparse
import signal
import threading

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)


def run(options: argparse.Namespace) -> int:
    """Commit what is spooled until told to stop (SIGTERM drains first)."""
    from rolltape.ingest.committer import Committer

    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    Committer(open_lake(options.lake, read_only=False)).run(stop)
    return 0
