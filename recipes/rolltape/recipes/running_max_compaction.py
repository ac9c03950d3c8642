"""Recipe: a task that outgrows its context, with CompactionRL: the policy learns to sum its own history up."""

from __future__ import annotations

from dataclasses import replace

from rolltape.recipes.config import EnvironmentSection, ModelSection, RolloutSection, RunConfig
from rolltape.rollout.agent_config import AgentConfig, CompactionConfig
from rolltape.trainers.config import TrainerConfig

NUM_ROUNDS = 6
CONTEXT_BUDGET = 18
"""Tokens. An episode has 24: of each round the digit, its mark, the reply and its end."""


def config(*, run_id: str = "running-max-compaction", seed: int = 0, max_steps: int = 200) -> RunConfig:
    """64 problems x 1 rollout a step; with fewer than six tokens left the history gives way to a summary of two."""
    return RunConfig(
        run_id=run_id,
        seed=seed,
        model=ModelSection(name="char-64x2"),
        environment=EnvironmentSection(name="running_max", options={"num_rounds": NUM_ROUNDS, "num_digits": 4}),
        rollout=RolloutSection(
            groups_per_step=64,
            group_size=1,
            temperature=1.0,
            max_tokens=2,
            evaluate_heldout=True,
            evaluate_initial=True,
        ),
        agent=AgentConfig(
            max_turns=NUM_ROUNDS,
            context_budget=CONTEXT_BUDGET,
            # Nothing but the summary carries the state over: no turn is kept beside it.
            compaction=CompactionConfig(max_compactions=2, threshold=6, max_summary_tokens=2, keep_recent=0),
        ),
        trainer=TrainerConfig(
            algorithm="compaction",
            max_steps=max_steps,
            lr=2e-3,
            warmup_steps=10,
            decay_steps=max_steps,
            final_lr_fraction=0.1,
            entropy_coef=0.01,
            critic_lr=2e-3,
            critic_warmup_steps=10,
            # It begins with weights that know nothing: what reads the digits has to learn, too.
            train_critic=(),
            whiten=True,
            checkpoint_every=40,
            probe_every=40,
        ),
    )


def without_summaries(*, run_id: str = "running-max-overflow", seed: int = 0, max_steps: int = 200) -> RunConfig:
    """The same budget of tokens and no summaries: an episode ends where its context is full."""
    base = config(run_id=run_id, seed=seed, max_steps=max_steps)
    return replace(base, agent=replace(base.agent, compaction=CompactionConfig()))
