"""The same-checkpoint probe: sampled against recomputed log-probs of the same tokens under the same weights (§4.15)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.safe_math import trusted_log_probs
from rolltape.trainers.step import StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchProbe:
    """What the probe measured over action tokens with a log-prob on both sides; deltas in nat.

    ``control_max_abs_delta`` is the same with the recomputed log-probs moved by one action token: a probe that cannot
    tell that from the truth shows nothing.
    """

    num_tokens: int
    mean_abs_delta: float | None
    max_abs_delta: float | None
    outside_share: float | None
    control_max_abs_delta: float | None

    def fields(self) -> dict[str, Any]:
        """As columns of ``mismatch_probed``."""
        return asdict(self)


def probe(batch: PackedBatch, outcome: StepOutcome, *, beta: float) -> MismatchProbe:
    """Compare old (recomputed under θ_old) with rollout log-probs of the batch's action tokens."""
    action = batch.action_mask
    sampled, recomputed = batch.rollout_log_probs[action].double(), outcome.old_log_probs[action].double()
    finite = trusted_log_probs(sampled) & torch.isfinite(recomputed)
    delta = (recomputed - sampled)[finite]
    if not delta.numel():
        return MismatchProbe(
            num_tokens=0, mean_abs_delta=None, max_abs_delta=None, outside_share=None, control_max_abs_delta=None
        )
    ratio = delta.exp()
    control = (recomputed.roll(1) - sampled)[finite & finite.roll(1)]
    return MismatchProbe(
        num_tokens=delta.numel(),
        mean_abs_delta=float(delta.abs().mean()),
        max_abs_delta=float(delta.abs().max()),
        outside_share=float(((ratio < 1 / beta) | (ratio > beta)).double().mean()),
        control_max_abs_delta=float(control.abs().max()) if control.numel() else None,
    )
