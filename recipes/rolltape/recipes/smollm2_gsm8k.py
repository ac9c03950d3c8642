"""Recipe: SmolLM2-135M-Instruct on GSM8K, eight problems x four rollouts, one GRPO step."""

from __future__ import annotations

from rolltape.recipes.config import EnvironmentSection, ModelSection, RolloutSection, RunConfig
from rolltape.trainers.config import TrainerConfig


def config(*, run_id: str = "smollm2-gsm8k", seed: int = 0, max_steps: int = 1) -> RunConfig:
    """A step that a CPU finishes in minutes; the weights change, and the step replays to the bit."""
    return RunConfig(
        run_id=run_id,
        seed=seed,
        model=ModelSection(name="smollm2-135m"),
        environment=EnvironmentSection(name="gsm8k"),
        rollout=RolloutSection(
            groups_per_step=8, group_size=4, temperature=1.0, max_tokens=64, num_threads=2, evaluate_heldout=False
        ),
        trainer=TrainerConfig(
            max_steps=max_steps,
            lr=1e-6,
            checkpoint_every=1000,
            probe_every=1,
            token_budget=1024,
            num_threads=2,
            engine_timeout_s=600.0,
        ),
    )
