"""The recipes that `rolltape recipes` trains, each with what it builds on and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from rolltape.recipes import running_max_compaction, sort_digits, sort_digits_sao, tool_digits_dis, two_teachers_opd
from rolltape.recipes.config import RunConfig
from rolltape.schema.errors import ConfigError

Make = Callable[[int, Path], RunConfig]
"""Seed, and folder with the lakes of the runs that it builds on → the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe and the runs beside it. Every run has a lake of its own, named as the run."""

    name: str
    method: str
    task: str
    """One sentence for the report."""
    config: Make
    builds_on: Mapping[str, Make] = field(default_factory=dict)
    """Runs that it needs, by what the report calls them; they come first."""
    contrasts: Mapping[str, Make] = field(default_factory=dict)
    """Other runs to compare with, likewise; they come last."""


def control_of(config: RunConfig, *, num_steps: int) -> RunConfig:
    """The same run for ``num_steps`` steps, whose rewards (or teachers' scores) say nothing about what was sampled."""
    trainer = replace(config.trainer, max_steps=num_steps, stop_metric="")
    run_id = f"{config.run_id}-control"
    if config.trainer.is_distillation:
        return replace(config, run_id=run_id, trainer=trainer, teachers=replace(config.teachers, shuffle_scores=True))
    return replace(config, run_id=run_id, trainer=trainer, rollout=replace(config.rollout, shuffle_rewards=True))


def shortened(config: RunConfig, max_steps: int) -> RunConfig:
    """The same run for ``max_steps`` steps at most; 0: as it is."""
    if not 0 < max_steps < config.trainer.max_steps:
        return config
    return replace(config, trainer=replace(config.trainer, max_steps=max_steps))


def recipes_of(names: list[str]) -> list[Recipe]:
    """Recipes by name, in the catalogue's order; no names: all.

    Raises:
        ConfigError: there is no recipe of a name.
    """
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise ConfigError(f"recipes: expected {', '.join(RECIPES)}, got {unknown[0]!r}")
    return [recipe for name, recipe in RECIPES.items() if not names or name in names]


def _grpo(seed: int, lakes: Path) -> RunConfig:
    del lakes
    config = sort_digits.config(seed=seed)
    return replace(config, rollout=replace(config.rollout, evaluate_initial=True))


def _alone(make: Callable[..., RunConfig]) -> Make:
    """A run that builds on none."""
    return lambda seed, _lakes: make(seed=seed)


def _with_teachers(make: Callable[..., RunConfig]) -> Make:
    return lambda seed, lakes: make(seed=seed, lakes=lakes)


_LISTED: Final = (
    Recipe(
        name="sort_digits",
        method="GRPO with IcePop",
        task="Sort three digits, one turn; 16 problems x 16 rollouts a step, ends at 95 % exact answers.",
        config=_grpo,
    ),
    Recipe(
        name="tool_digits_dis",
        method="DIS, asynchronous",
        task="Ask a tool for the digit in a slot, then answer with slot and digit in order; up to three turns.",
        config=_alone(tool_digits_dis.config),
    ),
    Recipe(
        name="two_teachers_opd",
        method="MOPD",
        task="A student that begins as the ascending sorter learns both orders from two teachers' scores, no reward.",
        config=_with_teachers(two_teachers_opd.config),
        builds_on={
            "teacher, ascending": _alone(partial(two_teachers_opd.teacher, two_teachers_opd.FIRST)),
            "teacher, descending": _alone(partial(two_teachers_opd.teacher, two_teachers_opd.SECOND)),
        },
        contrasts={"the second skill by GRPO alone": _with_teachers(two_teachers_opd.second_skill_alone)},
    ),
    Recipe(
        name="sort_digits_sao",
        method="SAO",
        task="Sort two digits from single rollouts, without groups; a critic is the baseline.",
        config=_alone(sort_digits_sao.config),
    ),
    Recipe(
        name="running_max_compaction",
        method="CompactionRL",
        task="Name the largest digit so far over six rounds of 24 tokens in a context of 18, through own summaries.",
        config=_alone(running_max_compaction.config),
        contrasts={"the same budget without summaries": _alone(running_max_compaction.without_summaries)},
    ),
)

RECIPES: Final[Mapping[str, Recipe]] = {recipe.name: recipe for recipe in _LISTED}
