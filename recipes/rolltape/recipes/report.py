"""The figures of all trials as a document."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean

from rolltape.recipes.catalogue import Recipe
from rolltape.recipes.figures import Figures
from rolltape.recipes.trials import RECIPE, Trial, beats_its_control

_BARS = "▁▂▃▄▅▆▇█"

_HEAD = """# What the recipes learn

This page is made by one command, `make recipes` (`rolltape recipes --write docs/recipes.md`): it trains every recipe,
its control and its contrasts from random weights, each run through its own processes and its own lake, and reads the
figures from the tapes.

*before* and *after* are shares of held-out problems that version 0 and the last version answer exactly right, at
temperature 0: mean over seeds {seeds}, and each seed in brackets. The control is the same run for as many steps, with
the rewards of each batch (or the teachers' scores) in another order. *seconds* are a whole run's, starts of its
processes included, on {num_cpus} CPU cores; *trusted* is the share of the trained action tokens that passed the
method's gate; *learning* the share of exact answers among the training rollouts, from the first step to the last,
▁ none to █ all (mean over the seeds).
"""


def report(trials: Sequence[Trial], seeds: Sequence[int]) -> str:
    """Markdown: a line for each recipe, then all runs of each."""
    text = _HEAD.format(seeds=", ".join(map(str, seeds)), num_cpus=os.cpu_count() or 1)
    by_recipe = [(recipe, list(found)) for recipe, found in groupby(trials, key=lambda trial: trial.recipe)]
    text += "\n" + _table(
        ("recipe", "method", "before", "after", "control after", "steps", "seconds", "trusted", "beats its control"),
        (_summary(recipe, found) for recipe, found in by_recipe),
    )
    for recipe, found in by_recipe:
        text += f"\n## {recipe.name}\n\n{recipe.method}. {recipe.task}\n\n" + _table(
            ("run", "domain", "before", "after", "learning", "steps", "seconds", "trusted"), _runs(found)
        )
    return text


def _summary(recipe: Recipe, trials: Sequence[Trial]) -> tuple[str, ...]:
    trained = [trial.figures for trial in trials if trial.label == RECIPE]
    control = [trial.figures for trial in trials if trial.label.startswith("control")]
    return (
        f"[{recipe.name}](#{recipe.name})",
        recipe.method,
        _share(fmean(figures.mean_before() for figures in trained)),
        _seeds([figures.mean_after() for figures in trained]),
        _seeds([figures.mean_after() for figures in control]),
        *_costs(trained),
        "on every seed" if beats_its_control(trials, recipe) else "**no**",
    )


def _runs(trials: Sequence[Trial]) -> Iterable[tuple[str, ...]]:
    """A row for each run and domain, runs in the order in which they were trained."""
    labels = list(dict.fromkeys(trial.label for trial in trials))
    for label in labels:
        found = [trial.figures for trial in trials if trial.label == label]
        for number, domain in enumerate(found[0].after):
            yield (
                label if number == 0 else "",
                domain,
                _seeds([figures.before[domain] for figures in found]),
                _seeds([figures.after[domain] for figures in found]),
                *((_bars([figures.curve for figures in found]), *_costs(found)) if number == 0 else ("", "", "", "")),
            )


def _bars(curves: Sequence[Sequence[float]]) -> str:
    """Mean of the curves, a bar a point."""
    means = (fmean(values) for values in zip(*curves, strict=False))
    return "".join(_BARS[min(int(mean * len(_BARS)), len(_BARS) - 1)] for mean in means)


def _costs(found: Sequence[Figures]) -> tuple[str, str, str]:
    trusted = [figures.trusted_share for figures in found if figures.trusted_share is not None]
    return (
        f"{fmean(figures.num_steps for figures in found):.0f}",
        f"{fmean(figures.seconds for figures in found):.0f}",
        f"{fmean(trusted):.4f}" if trusted else "none",
    )


def _seeds(values: Sequence[float]) -> str:
    return f"{_share(fmean(values))} ({', '.join(map(_share, values))})"


def _share(value: float) -> str:
    return f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
