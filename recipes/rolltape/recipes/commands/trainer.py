"""``rolltape trainer``: the trainer process of a run."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, add_log, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    add_log(parser)
    parser.add_argument("--run", required=True, metavar="ID", help="run id")


def run(options: argparse.Namespace) -> int:
    """Train until the run's last step."""
    from rolltape.recipes.runs import config_of, open_run_log, trainer_job
    from rolltape.recipes.teachers import scorers_of
    from rolltape.trainers.loop import run_trainer

    lake = open_lake(options.lake, read_only=False)
    config = config_of(lake, options.run)
    with open_run_log(lake, options.log) as log:
        run_trainer(lake, log, trainer_job(config), scorers=scorers_of(config, lake))
    return 0
