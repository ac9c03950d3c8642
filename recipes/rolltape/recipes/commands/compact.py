"""``rolltape compact``: maintenance of a lake by hand. It is safe beside a running committer."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument("--clean-log", action="store_true", help="also drop log entries that a checkpoint covers")


def run(options: argparse.Namespace) -> int:
    """Compact, checkpoint, clean."""
    from dataclasses import asdict

    from rolltape.recipes.output import print_rows
    from rolltape.store import maintenance

    lake = open_lake(options.lake, read_only=False)
    report = maintenance.compact(lake)
    maintenance.checkpoint(lake)
    if options.clean_log:
        maintenance.clean_logs(lake)
    print_rows([asdict(report)], title="compaction")
    return 0
