"""Recipe: sorting from single rollouts, without groups: SAO, where a critic says what was to be expected."""

from __future__ import annotations

from rolltape.recipes.config import EnvironmentSection, ModelSection, RolloutSection, RunConfig
from rolltape.trainers.config import TrainerConfig


def config(*, run_id: str = "sort-digits-sao", seed: int = 0, max_steps: int = 200) -> RunConfig:
    """128 problems x 1 rollout a step; the first ten steps train the critic alone, then two steps of it to one."""
    return RunConfig(
        run_id=run_id,
        seed=seed,
        model=ModelSection(name="char-64x2"),
        environment=EnvironmentSection(
            name="sort_digits", options={"num_digits": 2, "num_symbols": 7, "num_heldout": 12}
        ),
        rollout=RolloutSection(
            groups_per_step=128,
            group_size=1,
            temperature=1.0,
            max_tokens=3,
            evaluate_heldout=True,
            evaluate_initial=True,
        ),
        trainer=TrainerConfig(
            algorithm="sao",
            max_steps=max_steps,
            lr=2e-3,
            warmup_steps=10,
            decay_steps=max_steps,
            final_lr_fraction=0.1,
            epsilon_low=0.8,
            epsilon_high=3.0,
            entropy_coef=0.01,
            critic_lr=2e-3,
            critic_warmup_steps=10,
            # It begins with weights that know nothing: what reads the digits has to learn, too.
            train_critic=(),
            # Against the entropy term, as the deviation of a group would be.
            whiten=True,
            checkpoint_every=40,
            probe_every=40,
        ),
    )
