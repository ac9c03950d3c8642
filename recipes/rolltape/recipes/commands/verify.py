"""``rolltape verify``: the numeric contracts, checked over a tape."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument(
        "--since",
        metavar="CURSOR",
        default="",
        help="check what came at or after a cursor alone: the one that an earlier verification printed",
    )


def run(options: argparse.Namespace) -> int:
    """Print what was checked and what broke; exit 1 if anything broke."""
    from rolltape.recipes.output import print_rows, say
    from rolltape.schema.cursor import Cursor
    from rolltape.store.verify import verify

    since = Cursor.parse(options.since) if options.since else None
    report = verify(open_lake(options.lake), since)
    print_rows(report.to_rows(), title="contracts")
    say(f"verified up to {report.cursor}", cursor=str(report.cursor), ok=report.ok)
    return 0 if report.ok else 1
