"""Recipe: two specialised teachers into one student: on-policy distillation, each domain's scores from its own teacher.

The first teacher sorts upwards, the second downwards, both by GRPO from random weights. The student begins as the first
teacher and learns from both. The contrast begins the same way and learns the second skill by GRPO alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rolltape.recipes.config import EnvironmentSection, InitialSection, ModelSection, RolloutSection, RunConfig
from rolltape.recipes.teachers import RouteSection, TeachersSection
from rolltape.trainers.config import TrainerConfig

FIRST, SECOND = "sort_digits", "sort_digits_descending"
DOMAINS = {FIRST: "sorting", SECOND: "sorting_descending"}


def teacher(environment: str, *, seed: int = 0, max_steps: int = 300) -> RunConfig:
    """A specialist: trained until 95 % of its answers are exact."""
    base = _learner(environment, seed=seed, max_steps=max_steps)
    return replace(
        base, trainer=replace(base.trainer, stop_metric="reward_component/exact", stop_above=0.95, stop_ema=0.9)
    )


def config(
    *, run_id: str = "two-teachers-opd", seed: int = 0, max_steps: int = 320, lakes: str | Path = "lakes"
) -> RunConfig:
    """The student: 256 rollouts a step of single problems, half of each domain; no reward is read.

    Args:
        run_id: name of the run.
        seed: of the run.
        max_steps: steps at most.
        lakes: folder with the teachers' lakes, each named as its run.
    """
    first, second = (teacher(environment).run_id for environment in (FIRST, SECOND))
    base = _learner(FIRST, seed=seed, max_steps=max_steps)
    return replace(
        base,
        run_id=run_id,
        model=replace(base.model, initial=InitialSection(lake=f"{lakes}/{first}", run=first)),
        environment=_orders(**{FIRST: 1.0, SECOND: 1.0}),
        rollout=replace(base.rollout, groups_per_step=256, group_size=1),
        trainer=base.trainer.with_algorithm("mopd", warmup_steps=5, entropy_coef=0.0),
        teachers=TeachersSection(
            routes=tuple(
                RouteSection(domain=DOMAINS[environment], lake=f"{lakes}/{run}", run=run)
                for environment, run in ((FIRST, first), (SECOND, second))
            )
        ),
    )


def second_skill_alone(
    *, run_id: str = "second-skill-alone", seed: int = 0, max_steps: int = 320, lakes: str | Path = "lakes"
) -> RunConfig:
    """The contrast: from the first teacher's weights, the second skill by its reward alone."""
    base = _learner(SECOND, seed=seed, max_steps=max_steps)
    first = teacher(FIRST).run_id
    return replace(
        base, run_id=run_id, model=replace(base.model, initial=InitialSection(lake=f"{lakes}/{first}", run=first))
    )


def _learner(environment: str, *, seed: int, max_steps: int) -> RunConfig:
    """16 problems x 16 rollouts a step of one order, GRPO with IcePop."""
    return RunConfig(
        run_id=f"teacher-{environment.replace('_', '-')}",
        seed=seed,
        model=ModelSection(name="char-64x2"),
        environment=_orders(**{environment: 1.0}),
        rollout=RolloutSection(
            groups_per_step=16,
            group_size=16,
            temperature=1.0,
            max_tokens=4,
            evaluate_heldout=True,
            evaluate_initial=True,
        ),
        trainer=TrainerConfig(
            max_steps=max_steps,
            lr=2e-3,
            warmup_steps=10,
            decay_steps=max_steps,
            final_lr_fraction=0.1,
            beta2=0.95,
            entropy_coef=0.01,
            checkpoint_every=40,
            probe_every=40,
        ),
    )


def _orders(**weights: float) -> EnvironmentSection:
    """Both orders of three digits, 0 to 5; without a weight an order is held out only."""
    parts: list[dict[str, Any]] = [
        {
            "name": name,
            "options": {"num_digits": 3, "num_symbols": 6, "num_heldout": 40},
            "weight": weights.get(name, 0.0),
        }
        for name in DOMAINS
    ]
    return EnvironmentSection(name="mixture", options={"parts": parts})
