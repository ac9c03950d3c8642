"""``rolltape import``: recorded rollouts of other systems onto the tape. Importing twice adds nothing."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="files to import")
    parser.add_argument("--format", default=None, help="format (default: found out from the file)")


def run(options: argparse.Namespace) -> int:
    """Import each file and print what came of it."""
    from dataclasses import asdict

    from rolltape.ingest.importers import import_file
    from rolltape.recipes.output import print_rows
    from rolltape.recipes.runs import open_or_create

    lake = open_or_create(options.lake)
    print_rows([asdict(import_file(lake, path, format=options.format)) for path in options.files], title="imported")
    return 0
