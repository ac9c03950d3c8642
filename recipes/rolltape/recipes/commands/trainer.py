"""``rolltape trainer``: the trainer process of a run."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument("--run", required=True, metavar="ID", help="run id")


def run(options: argparse.Namespace) -> int:
    """Train until the run's last step."""
    from rolltape.ingest.embedded import EmbeddedLog
    from rolltape.recipes.runs import config_of
    from rolltape.trainers.loop import TrainerJob, run_trainer

    lake = open_lake(options.lake, read_only=False)
    config = config_of(lake, options.run)
    job = TrainerJob(
        run_id=config.run_id,
        seed=config.seed,
        model_name=config.model.name,
        groups_per_step=config.rollout.groups_per_step,
        group_size=config.rollout.group_size,
        num_workers=config.rollout.num_workers,
        trainer=config.trainer,
    )
    with EmbeddedLog(lake, committer="external") as log:
        run_trainer(lake, log, job)
    return 0
