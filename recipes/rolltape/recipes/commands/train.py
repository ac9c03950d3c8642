"""``rolltape train``: start or resume a run from a recipe file."""

from __future__ import annotations

import argparse

from rolltape.recipes.commands._common import add_lake, add_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("recipe", metavar="RECIPE.toml", help="recipe file; see recipes/README.md")
    add_lake(parser)
    add_log(parser)
    parser.add_argument("--max-restarts", type=int, default=3, help="how often a process may die (default: 3)")


def run(options: argparse.Namespace) -> int:
    """Run to the end, printing a line a step."""
    from rolltape.recipes.config import RunConfig
    from rolltape.recipes.output import say
    from rolltape.recipes.progress import StepPrinter
    from rolltape.recipes.runs import run as run_to_end

    config = RunConfig.from_toml(options.recipe)
    with StepPrinter(config.trainer.max_steps) as printer:
        supervisor = run_to_end(
            options.lake, config, log_url=options.log, on_step=printer.step, max_restarts=options.max_restarts
        )
    say(f"run {config.run_id} ended", restarts=dict(supervisor.restarts))
    return 0
