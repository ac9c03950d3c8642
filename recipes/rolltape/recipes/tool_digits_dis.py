"""Recipe: a tool task of several turns, learned asynchronously with direct importance sampling."""

from __future__ import annotations

from rolltape.recipes.config import EnvironmentSection, ModelSection, RolloutSection, RunConfig
from rolltape.rollout.agent_config import AgentConfig
from rolltape.trainers.config import TrainerConfig

MAX_LEAD_STEPS = 1


def config(*, run_id: str = "tool-digits-dis", seed: int = 0, max_steps: int = 300) -> RunConfig:
    """16 problems x 8 rollouts a step; a rollout calls the tool, reads what it says, and answers.

    The worker runs one step ahead, so most tokens are a version or two old; DIS gates each by its ratio alone.
    """
    return RunConfig(
        run_id=run_id,
        seed=seed,
        model=ModelSection(name="char-64x2"),
        environment=EnvironmentSection(name="tool_digits", options={"num_digits": 4, "num_heldout": 200}),
        rollout=RolloutSection(
            max_lead_steps=MAX_LEAD_STEPS,
            groups_per_step=16,
            group_size=8,
            temperature=1.0,
            max_tokens=3,
            evaluate_heldout=True,
            evaluate_initial=True,
        ),
        agent=AgentConfig(max_turns=3),
        trainer=TrainerConfig(
            algorithm="dis",
            max_steps=max_steps,
            lr=2e-3,
            warmup_steps=10,
            decay_steps=max_steps,
            final_lr_fraction=0.1,
            # A group's reward has small steps: without its deviation the entropy term would outweigh it.
            adv_norm="mean_std",
            epsilon_low=0.8,
            epsilon_high=3.0,
            entropy_coef=0.01,
            staleness_tau=MAX_LEAD_STEPS + 2,
            group_timeout_s=60.0,
            # New weights come with every step here: forgetting the moments each time would leave Adam without any.
            optimizer_reset="off",
            checkpoint_every=40,
            probe_every=40,
        ),
    )
