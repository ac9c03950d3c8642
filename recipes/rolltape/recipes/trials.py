"""Training every recipe, its control and its contrasts for several seeds; what is complete is not trained again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rolltape.recipes.catalogue import Make, Recipe, control_of, shortened
from rolltape.recipes.config import RunConfig
from rolltape.recipes.figures import Figures, figures_of, is_complete
from rolltape.recipes.runs import StepSeen, open_or_create
from rolltape.recipes.runs import run as run_to_end
from rolltape.schema.errors import ConfigError

RECIPE: Final = "the recipe"
CONTROLS: Final = {True: "control: teachers' scores shuffled", False: "control: rewards shuffled"}
"""By whether the algorithm learns from teachers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A finished run: which recipe's, what it is to it, and its figures."""

    recipe: Recipe
    label: str
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who is told of the progress."""

    begins: Callable[[str, RunConfig], None] = lambda _label, _config: None
    step: Callable[[StepSeen], None] = lambda _seen: None
    ends: Callable[[Trial], None] = lambda _trial: None


def run_trials(
    recipes: Sequence[Recipe], seeds: Sequence[int], folder: Path, *, max_steps: int = 0, watcher: Watcher | None = None
) -> list[Trial]:
    """Train everything, one run after the other, each through its own processes in a lake of its own.

    Args:
        recipes: what to train.
        seeds: of each.
        folder: where the lakes are made, as ``recipe/seed/run``. A run that is complete there is only read, one that
            was broken off goes on.
        max_steps: shortens every run; 0: as the recipes say.
        watcher: told of the progress.

    Raises:
        ChildFailedError: a process of a run died too often.
    """
    trials: list[Trial] = []
    for recipe in recipes:
        for seed in seeds:
            plan = _Plan(recipe, seed, folder / recipe.name / str(seed), max_steps, watcher or Watcher())
            trials += plan.run()
    return trials


class _Plan:
    """The runs of one recipe and seed."""

    def __init__(self, recipe: Recipe, seed: int, lakes: Path, max_steps: int, watcher: Watcher) -> None:
        self._recipe = recipe
        self._seed = seed
        self._lakes = lakes
        self._max_steps = max_steps
        self._watcher = watcher

    def run(self) -> list[Trial]:
        """What it builds on, the recipe, the control for as many steps, the contrasts."""
        trials = [self._made(label, make) for label, make in self._recipe.builds_on.items()]
        config = shortened(self._recipe.config(self._seed, self._lakes), self._max_steps)
        trained = self._trial(RECIPE, config)
        control = control_of(config, num_steps=trained.figures.num_steps)
        trials += [trained, self._trial(CONTROLS[config.trainer.is_distillation], control)]
        return trials + [self._made(label, make) for label, make in self._recipe.contrasts.items()]

    def _made(self, label: str, make: Make) -> Trial:
        return self._trial(label, shortened(make(self._seed, self._lakes), self._max_steps))

    def _trial(self, label: str, config: RunConfig) -> Trial:
        url = str(self._lakes / config.run_id)
        self._watcher.begins(f"{self._recipe.name}, {label}", config)
        lake = open_or_create(url)
        if not is_complete(lake, config.run_id):
            run_to_end(url, config, on_step=self._watcher.step)
            lake = open_or_create(url)
        trial = Trial(recipe=self._recipe, label=label, figures=figures_of(lake, config.run_id))
        self._watcher.ends(trial)
        return trial


def beats_its_control(trials: Sequence[Trial], recipe: Recipe) -> bool:
    """Whether the recipe's last version answers more held-out problems than the control's, for every seed."""
    after: dict[str, dict[int, float]] = {RECIPE: {}, "control": {}}
    for trial in trials:
        if trial.recipe.name == recipe.name and trial.label in {RECIPE, *CONTROLS.values()}:
            kind = RECIPE if trial.label == RECIPE else "control"
            after[kind][trial.figures.seed] = trial.figures.mean_after()
    if not after[RECIPE] or after[RECIPE].keys() != after["control"].keys():
        raise ConfigError(f"recipe {recipe.name}: expected a control for every seed, got seeds {sorted(after[RECIPE])}")
    return all(value > after["control"][seed] for seed, value in after[RECIPE].items())
