"""``rolltape sql``: one SELECT over a lake."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument(
        "query", help="a single SELECT; views: trajectories, tokens, rewards, groups, steps, … and every kind"
    )
    parser.add_argument(
        "--as-of", metavar="CURSOR", default="", help="what was known at a cursor, as rollout/0:1234,training/0:55"
    )


def run(options: argparse.Namespace) -> int:
    """Print the result."""
    from rolltape.recipes.output import print_rows
    from rolltape.schema.cursor import Cursor

    lake = open_lake(options.lake)
    result = lake.sql(options.query, as_of=Cursor.parse(options.as_of) if options.as_of else None)
    table = result.arrow()
    print_rows(
        (row for batch in table.to_batches(max_chunksize=10_000) for row in batch.to_pylist()),
        columns=table.column_names,
    )
    return 0
