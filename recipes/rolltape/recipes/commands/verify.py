"""``rolltape verify``: the numeric contracts, checked over a tape."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)


def run(options: argparse.Namespace) -> int:
    """Print what was checked and what broke; exit 1 if anything broke."""
    from rolltape.recipes.output import print_rows
    from rolltape.store.verify import verify

    report = verify(open_lake(options.lake))
    print_rows(report.to_rows(), title="contracts")
    return 0 if report.ok else 1
