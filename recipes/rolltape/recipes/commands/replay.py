"""``rolltape replay``: run a recorded step again and compare every bit, or give its batch to another method."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rolltape.recipes.commands._common import add_lake, add_run, open_lake, the_run

if TYPE_CHECKING:
    from rolltape.store.lake import Lake

_TOKENS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    add_run(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--step",
        type=int,
        help="step to run again, to the bit; with --algorithm or --set: whose batch to give to others",
    )
    what.add_argument("--batch", help="id of a recorded batch, to be given to other algorithms or options")
    parser.add_argument(
        "--algorithm",
        default="",
        help="algorithms to try, each once, as grpo,dis,opd,sao,compaction; default: the run's",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[ALGORITHM.]FIELD=VALUE",
        help="a field of [trainer] that enters a step, for all algorithms tried or for one of them",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=_TOKENS,
        help="of several algorithms: tokens to show, those that differ most first",
    )


def run(options: argparse.Namespace) -> int:
    """Print what was compared; exit 1 if a bit differs, or if an algorithm refuses the batch."""
    lake = open_lake(options.lake)
    run_id = the_run(lake, options.run)
    if options.batch is not None:
        return _counterfactual(lake, run_id, options.batch, options)
    if options.algorithm or options.set:
        return _counterfactual(lake, run_id, _batch_of(lake, run_id, options.step), options)
    return _replay(lake, run_id, options.step)


def _batch_of(lake: Lake, run_id: str, step: int) -> str:
    """Id of the batch that a step trained."""
    from rolltape.trainers.history import RunHistory

    return str(RunHistory.read(lake, run_id).step(step)["batch_id"])


def _replay(lake: Lake, run_id: str, step: int) -> int:
    from rolltape.recipes.output import print_rows, say
    from rolltape.recipes.runs import config_of, trainer_job
    from rolltape.recipes.teachers import scorers_of
    from rolltape.trainers.replay import replay_step

    config = config_of(lake, run_id)
    report = replay_step(
        lake,
        trainer_job(config),
        step,
        on_step=lambda step: say(f"step {step} ran again", step=step),
        scorers=scorers_of(config, lake),
    )
    print_rows(report.rows(), title=f"step {report.step}, from the checkpoint of step {report.from_checkpoint}")
    for difference in report.environment_differences:
        say(f"not the recorded environment: {difference}", environment=difference)
    for difference in report.comparison.differences:
        say(f"differs: {difference}", difference=difference)
    return 0 if report.equal else 1


def _counterfactual(lake: Lake, run_id: str, batch_id: str, options: argparse.Namespace) -> int:
    from dataclasses import replace

    from rolltape.recipes.config import trainer_options
    from rolltape.recipes.output import print_rows, say
    from rolltape.recipes.runs import config_of, trainer_job
    from rolltape.recipes.teachers import scorers_of
    from rolltape.trainers.counterfactual import try_variants, variants_of

    config = config_of(lake, run_id)
    algorithms = [name.strip() for name in options.algorithm.split(",")] if options.algorithm else []
    variants = variants_of(config.trainer, algorithms, trainer_options(options.set))
    found = try_variants(
        lake,
        trainer_job(config),
        batch_id,
        variants,
        scorers_of=lambda trainer: scorers_of(replace(config, trainer=trainer), lake) if _needs(trainer) else None,
    )
    weights = "initial weights" if found.from_step is None else f"the checkpoint of step {found.from_step}"
    print_rows(found.rows(), title=f"batch {found.batch_id} of step {found.step}, from {weights}")
    if options.tokens > 0:
        print_rows(found.token_rows(options.tokens), title="gate weight times advantage, where it differs most")
    for difference in found.differences:
        say(f"not as recorded: {difference}", difference=difference)
    return 1 if found.refused else 0


def _needs(trainer: Any) -> bool:
    return bool(trainer.is_distillation and trainer.opd_form == "full")
