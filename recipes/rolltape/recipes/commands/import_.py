"""``rolltape import``: recorded rollouts of other systems onto the tape. Importing twice adds nothing."""

from __future__ import annotations

import argparse
import contextlib

from rolltape.recipes.commands._common import add_lake, add_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    add_log(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="files to import")
    parser.add_argument("--format", default=None, help="format (default: found out from the file)")


def run(options: argparse.Namespace) -> int:
    """Import each file and print what came of it."""
    from dataclasses import asdict

    from rolltape.ingest.importers import import_file
    from rolltape.recipes.output import print_rows
    from rolltape.recipes.runs import open_or_create, open_run_log

    lake = open_or_create(options.lake)
    with contextlib.ExitStack() as stack:
        # A lake takes turns: its embedded log is opened anew for each file.
        target = stack.enter_context(open_run_log(lake, options.log)) if options.log else lake
        reports = [import_file(target, path, format=options.format) for path in options.files]
    print_rows([asdict(report) for report in reports], title="imported")
    return 0
