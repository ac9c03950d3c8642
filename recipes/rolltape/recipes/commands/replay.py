"""``rolltape replay``: run a recorded step again and compare every bit."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, add_run, open_lake, the_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    add_run(parser)
    parser.add_argument("--step", required=True, type=int, help="step to run again")


def run(options: argparse.Namespace) -> int:
    """Print what was compared; exit 1 if a bit differs."""
    from rolltape.recipes.output import print_rows, say
    from rolltape.recipes.runs import config_of, trainer_job
    from rolltape.recipes.teachers import scorers_of
    from rolltape.trainers.replay import replay_step

    lake = open_lake(options.lake)
    config = config_of(lake, the_run(lake, options.run))
    report = replay_step(
        lake,
        trainer_job(config),
        options.step,
        on_step=lambda step: say(f"step {step} ran again", step=step),
        scorers=scorers_of(config, lake),
    )
    print_rows(report.rows(), title=f"step {report.step}, from the checkpoint of step {report.from_checkpoint}")
    for difference in report.environment_differences:
        say(f"not the recorded environment: {difference}", environment=difference)
    for difference in report.comparison.differences:
        say(f"differs: {difference}", difference=difference)
    return 0 if report.equal else 1
