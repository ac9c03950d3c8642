"""Recipe: a tiny policy learns to sort three digits from random weights, on-policy GRPO with IcePop."""

from __future__ import annotations

from rolltape.recipes.config import EnvironmentSection, ModelSection, RolloutSection, RunConfig
from rolltape.trainers.config import TrainerConfig


def config(*, run_id: str = "sort-digits", seed: int = 0, max_steps: int = 300) -> RunConfig:
    """16 problems x 16 rollouts a step until the moving average of exact answers reaches 0.95."""
    return RunConfig(
        run_id=run_id,
        seed=seed,
        model=ModelSection(name="char-64x2"),
        environment=EnvironmentSection(name="sort_digits", options={"num_digits": 3, "num_heldout": 200}),
        rollout=RolloutSection(groups_per_step=16, group_size=16, temperature=1.0, max_tokens=4, evaluate_heldout=True),
        trainer=TrainerConfig(
            max_steps=max_steps,
            lr=2e-3,
            warmup_steps=10,
            decay_steps=280,
            final_lr_fraction=0.1,
            beta2=0.95,
            entropy_coef=0.01,
            checkpoint_every=20,
            probe_every=25,
            stop_metric="reward_component/exact",
            stop_above=0.95,
            stop_ema=0.9,
        ),
    )
