"""Recipe: the sorting policy again, asynchronously: two workers run ahead of the trainer, DIS takes stale rollouts."""

from __future__ import annotations

from dataclasses import replace

from rolltape.recipes import sort_digits
from rolltape.recipes.config import RunConfig

MAX_LEAD_STEPS = 2


def config(*, run_id: str = "sort-digits-async", seed: int = 0, max_steps: int = 400) -> RunConfig:
    """As :func:`rolltape.recipes.sort_digits.config`, with rollouts up to two steps' worth of groups ahead.

    A rollout is consumed at most ``MAX_LEAD_STEPS`` steps after it was dispatched; its engine may then have been two
    versions behind: one that was published and not yet in effect, and one that it took up after the batch.
    """
    base = sort_digits.config(run_id=run_id, seed=seed, max_steps=max_steps)
    return replace(
        base,
        rollout=replace(base.rollout, num_workers=2, max_lead_steps=MAX_LEAD_STEPS),
        trainer=base.trainer.with_algorithm(
            "dis",
            lr=1e-3,
            decay_steps=380,
            epsilon_low=0.8,
            epsilon_high=3.0,
            adv_norm="mean_std",
            staleness_tau=MAX_LEAD_STEPS + 2,
            group_timeout_s=60.0,
        ),
    )
