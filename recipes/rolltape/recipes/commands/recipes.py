"""``rolltape recipes``: train every recipe and its control, and write down what they learned."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rolltape.recipes.catalogue import Recipe
    from rolltape.recipes.config import RunConfig
    from rolltape.recipes.runs import StepSeen
    from rolltape.recipes.trials import Trial

_STEPS_A_LINE: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes to train (default: all)")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,N", help="seeds of each recipe (default: 0,1,2)")
    parser.add_argument("--write", default="", metavar="FILE.md", help="write the figures to this document")
    parser.add_argument(
        "--folder",
        default="",
        metavar="DIR",
        help="keep the lakes here; what is complete there is not trained again (default: a temporary folder)",
    )
    parser.add_argument("--max-steps", type=int, default=0, metavar="N", help="shorten every run, to try the command")


def run(options: argparse.Namespace) -> int:
    """Train, print a line for each run; exit 1 unless every recipe beats its control on every seed."""
    from rolltape.recipes.catalogue import recipes_of
    from rolltape.schema.errors import ConfigError

    recipes = recipes_of(options.names)
    seeds = seeds_of(options.seeds)
    if options.max_steps < 0:
        raise ConfigError(f"--max-steps: expected 0 (as the recipes say) or more, got {options.max_steps}")
    if options.write and (options.names or options.max_steps):
        raise ConfigError(
            "--write: expected all recipes at their full lengths, got some of them or --max-steps; the document "
            "holds one measurement of everything"
        )
    if options.folder:
        return _run(recipes, seeds, Path(options.folder), options)
    with tempfile.TemporaryDirectory(prefix="rolltape-recipes-") as folder:
        return _run(recipes, seeds, Path(folder), options)


def seeds_of(text: str) -> list[int]:
    """Seeds as the command line gives them.

    Raises:
        ConfigError: something else than different whole numbers from 0.

    >>> seeds_of("0, 2")
    [0, 2]
    """
    from rolltape.schema.errors import ConfigError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(map(int, words))) < len(words):
        raise ConfigError(f"--seeds: expected different whole numbers from 0, as 0,1,2, got {text!r}")
    return [int(word) for word in words]


def _run(recipes: Sequence[Recipe], seeds: Sequence[int], folder: Path, options: argparse.Namespace) -> int:
    from rolltape.recipes.output import say
    from rolltape.recipes.report import report
    from rolltape.recipes.trials import Watcher, beats_its_control, run_trials

    watcher = Watcher(begins=_begins, step=_step, ends=_ends)
    trials = run_trials(recipes, seeds, folder, max_steps=options.max_steps, watcher=watcher)
    text = report(trials, seeds)
    if options.write:
        Path(options.write).write_text(text, encoding="utf-8")
        say(f"wrote {options.write}", written=options.write)
    verdicts = {recipe.name: beats_its_control(trials, recipe) for recipe in recipes}
    for name, ok in verdicts.items():
        say(f"{name}: {'beats its control on every seed' if ok else 'does NOT beat its control'}", recipe=name, ok=ok)
    return 0 if all(verdicts.values()) else 1


def _begins(label: str, config: RunConfig) -> None:
    from rolltape.recipes.output import say

    say(f"{label}, seed {config.seed}: up to {config.trainer.max_steps} steps", run=config.run_id, seed=config.seed)


def _step(seen: StepSeen) -> None:
    from rolltape.recipes.output import say
    from rolltape.recipes.progress import shown_metrics

    if seen.step % _STEPS_A_LINE == 0:
        shown = shown_metrics(seen)
        say(f"  step {seen.step}: " + ", ".join(f"{key} {value:g}" for key, value in shown.items()), **shown)


def _ends(trial: Trial) -> None:
    from rolltape.recipes.output import say

    figures = trial.figures
    facts = {
        "before": dict(figures.before),
        "after": dict(figures.after),
        "steps": figures.num_steps,
        "seconds": round(figures.seconds, 1),
        "trusted": figures.trusted_share,
    }
    say(
        f"{trial.recipe.name}, {trial.label}, seed {figures.seed}: "
        + ", ".join(f"{name} {value}" for name, value in facts.items()),
        recipe=trial.recipe.name,
        run=figures.run_id,
        seed=figures.seed,
        **facts,
    )
