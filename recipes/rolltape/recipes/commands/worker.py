"""``rolltape worker``: one rollout worker of a run."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, add_log, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    add_log(parser)
    parser.add_argument("--run", required=True, metavar="ID", help="run id")
    parser.add_argument("--index", required=True, type=int, help="this worker's number, from 0")


def run(options: argparse.Namespace) -> int:
    """Sample rollouts until the run's last step."""
    from rolltape.recipes.runs import config_of, worker_config
    from rolltape.rollout.worker import run_worker

    lake = open_lake(options.lake, read_only=False)
    config = config_of(lake, options.run)
    return run_worker(worker_config(config, lake.location.url, options.index, log_url=options.log))
