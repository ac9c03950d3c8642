"""What one trainer process is to do."""

from __future__ import annotations

from dataclasses import dataclass

from rolltape.trainers.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """What one trainer process is to do."""

    run_id: str
    seed: int
    model_name: str
    groups_per_step: int
    group_size: int
    num_workers: int
    trainer: TrainerConfig
    max_lead_steps: int = 0  # how far workers run ahead; 0: lock step
    trainer_id: str = "trainer"

    @property
    def num_members(self) -> int:
        """Rollouts of one step."""
        return self.groups_per_step * self.group_size
