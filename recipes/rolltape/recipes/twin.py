"""The same run twice, on two logs: what must be equal to the bit, and the first thing that is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rolltape.recipes.config import RunConfig
from rolltape.store.lake import Lake
from rolltape.trainers.history import RunHistory
from rolltape.trainers.records import metric_values

StepBits = Mapping[str, Any]
"""What a step computed, by name: digests, the loss' bits, every metric."""

_DIGESTS = ("batch_digest", "loss_bits", "gradient_digest", "weights_digest", "version_in", "version_out", "skipped")


def bits_of(lake: Lake, run_id: str) -> dict[int, StepBits]:
    """What each completed step of a run computed; not whether it was the run's last, nor how long it took."""
    found: dict[int, StepBits] = {}
    for step, row in RunHistory.read(lake, run_id).steps.items():
        metrics = {f"metric {name}": value for name, value in metric_values(row).items() if name != "final"}
        found[step] = {**{name: row[name] for name in _DIGESTS}, **metrics}
    return found


def first_difference(one: Mapping[int, StepBits], other: Mapping[int, StepBits]) -> str | None:
    """The first thing in which the steps that both runs made differ; None where all are equal."""
    for step in sorted(one.keys() & other.keys()):
        for name in sorted(one[step].keys() | other[step].keys()):
            was, now = one[step].get(name), other[step].get(name)
            if was != now:
                return f"step {step}: {name} is {was!r} and {now!r}"
    return None


def shortened(config: RunConfig, num_steps: int) -> RunConfig:
    """The same run, up to ``num_steps``; its steps compute the same."""
    return replace(
        config,
        rollout=replace(config.rollout, evaluate_heldout=False),
        trainer=replace(config.trainer, max_steps=num_steps),
    )
