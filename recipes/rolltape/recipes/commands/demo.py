"""``rolltape demo``: the whole loop on this machine, every claim checked."""

from __future__ import annotations

import argparse
import time

from rolltape.recipes.commands._common import add_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser, default="")
    parser.add_argument(
        "--model", choices=("sort", "smollm2"), default="sort", help="tiny sorter (default) or SmolLM2-135M"
    )
    parser.add_argument("--seed", type=int, default=0, help="run seed")
    parser.add_argument("--max-steps", type=int, default=0, help="other than the recipe's")


def run(options: argparse.Namespace) -> int:
    """Train, ask, replay, tamper; exit 1 unless everything held."""
    from pathlib import Path

    from rolltape.recipes import demo, smollm2_gsm8k, sort_digits
    from rolltape.recipes.output import say
    from rolltape.recipes.progress import StepPrinter
    from rolltape.recipes.runs import run as run_to_end

    sorting = options.model == "sort"
    recipe = sort_digits if sorting else smollm2_gsm8k
    config = recipe.config(seed=options.seed, **({"max_steps": options.max_steps} if options.max_steps else {}))
    url = options.lake or str(Path("lakes") / f"{config.run_id}-{time.strftime('%Y%m%d-%H%M%S')}")
    say(f"lake {url}, run {config.run_id}, seed {config.seed}", lake=url, run=config.run_id, seed=config.seed)
    started = time.monotonic()
    with StepPrinter(config.trainer.max_steps, every=10 if sorting else 1) as printer:
        run_to_end(url, config, on_step=printer.step)
    say(f"trained in {time.monotonic() - started:.0f} s", seconds=round(time.monotonic() - started, 1))

    from rolltape.store.lake import Lake
    from rolltape.store.location import Location

    lake = Lake.open(Location.parse(url), read_only=True)
    checks = demo.Checks()
    if sorting:
        demo.check_sort_digits(lake, config, checks)
    else:
        demo.check_smollm2(lake, checks)
    demo.check_versions(lake, checks)
    demo.check_proof(lake, checks)
    demo.check_probe(lake, checks)
    demo.ask(lake)
    step = demo.check_replay(lake, config, checks, late=sorting)
    if sorting:
        demo.check_tampering(lake, config, step, Path(f"{lake.location.local_path()}-tampered"), checks)
    status = demo.report(checks)
    say(f"{time.monotonic() - started:.0f} s in all", seconds=round(time.monotonic() - started, 1))
    return status
