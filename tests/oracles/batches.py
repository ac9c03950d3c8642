"""Seeded random batches, once padded as the peers take them and once flat as ours are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rolltape.trainers.aggregation import Mode, aggregation_weights

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """``B`` rows of at most ``T`` response tokens, of them some observations; float64, so that only definitions differ.

    Log-ratios reach far enough that gates reject and clips clip on either side; one row has a single action token.
    """

    mask: Tensor  # float64 [B, T], 1 at action tokens
    current: Tensor  # [B, T]
    old: Tensor  # [B, T]
    rollout: Tensor  # [B, T]
    advantage: Tensor  # [B, T]
    values: Tensor  # [B, T]

    @property
    def actions(self) -> Tensor:
        """``[B, T]`` bool."""
        return self.mask.bool()

    @property
    def rows(self) -> Tensor:
        """``[N]`` int64, row of each action token."""
        return self.actions.nonzero()[:, 0]

    def flat(self, padded: Tensor) -> Tensor:
        """``[N]``, the action tokens of a padded tensor, row by row."""
        return padded[self.actions]

    def weights(self, mode: Mode, max_length: int | None = None) -> Tensor:
        """Aggregation weights ``[N]``."""
        return aggregation_weights(self.rows, mode=mode, num_rows=len(self.mask), max_length=max_length)


def random_batch(seed: int, *, num_rows: int = 6, width: int = 17) -> Batch:
    """The batch of a seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(num_rows, width, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(2, width + 1, (num_rows,), generator=generator)
    lengths[0] = 1
    inside = torch.arange(width)[None] < lengths[:, None]
    observed = torch.rand(num_rows, width, generator=generator) < 0.25
    observed[:, 0] = False
    old = -torch.rand(num_rows, width, generator=generator, dtype=torch.float64) * 4.0 - 1.6
    return Batch(
        mask=(inside & ~observed).double(),
        current=old + normal(0.35).clamp(-1.5, 1.5),
        old=old,
        rollout=old + normal(0.6).clamp(-1.5, 1.5),
        advantage=normal(1.0),
        values=normal(1.0),
    )


def assert_agree(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-6, absolutely."""
    torch.testing.assert_close(ours.detach().double(), theirs.detach().double(), atol=TOLERANCE, rtol=0.0)
