"""``rolltape demo``: the whole loop on this machine, every claim checked."""

from __future__ import annotations

import argparse
import time
from urllib.parse import urlsplit

from rolltape.recipes.commands._common import add_lake, add_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser, default="")
    add_log(parser)
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
    from rolltape.recipes.runs import make_topics
    from rolltape.recipes.runs import run as run_to_end

    sorting = options.model == "sort"
    recipe = sort_digits if sorting else smollm2_gsm8k
    config = recipe.config(seed=options.seed, **({"max_steps": options.max_steps} if options.max_steps else {}))
    url = options.lake or str(Path("lakes") / f"{config.run_id}-{time.strftime('%Y%m%d-%H%M%S')}")
    log_url = demo_log(options.log, config.run_id)
    if log_url:
        make_topics(log_url)
        say(f"log {log_url}", log=log_url)
    say(f"lake {url}, run {config.run_id}, seed {config.seed}", lake=url, run=config.run_id, seed=config.seed)
    started = time.monotonic()
    with StepPrinter(config.trainer.max_steps, every=10 if sorting else 1) as printer:
        run_to_end(url, config, log_url=log_url, on_step=printer.step)
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
        demo.check_tampering(lake, config, step, checks)
    if log_url:
        demo.check_same_as_embedded(lake, config, checks)
    status = demo.report(checks)
    say(f"{time.monotonic() - started:.0f} s in all", seconds=round(time.monotonic() - started, 1))
    return status


def demo_log(url: str, run_id: str) -> str:
    """The log of this demonstration: topics of its own, unless the URL names a prefix.

    >>> demo_log("kafka://localhost:9092/mine", "sort-digits")
    'kafka://localhost:9092/mine'
    """
    address, _, options = url.partition("?")
    if not url or urlsplit(address).path.strip("/"):
        return url
    return f"{address.rstrip('/')}/{run_id}-{time.strftime('%Y%m%d-%H%M%S')}{'?' if options else ''}{options}"
