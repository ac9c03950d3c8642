"""``rolltape teacher``: the scoring service of a run."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, add_log, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    add_log(parser)
    parser.add_argument("--run", required=True, metavar="ID", help="run id")


def run(options: argparse.Namespace) -> int:
    """Score rollouts until the run's last step."""
    from rolltape.recipes.runs import config_of
    from rolltape.recipes.teachers import teacher_config
    from rolltape.rollout.teachers import run_teachers

    lake = open_lake(options.lake, read_only=False)
    config = config_of(lake, options.run)
    return run_teachers(teacher_config(config, lake.location.url, log_url=options.log))
