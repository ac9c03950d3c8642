"""What one trainer process is to do."""

from __future__ import annotations

from dataclasses import dataclass

from rolltape.trainers.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """Weights that a run published, for another run to begin with."""

    lake_url: str
    run_id: str
    version: str = "final"  # or a number


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
    initial: InitialWeights | None = None  # None: the model's own, from the seed

    @property
    def num_members(self) -> int:
        """Rollouts of one step."""
        return self.groups_per_step * self.group_size

    @property
    def resets_optimizer(self) -> bool:
        """Whether the policy's optimizer forgets its moments once new weights serve (D25)."""
        wanted = self.trainer.optimizer_reset
        return self.max_lead_steps > 0 if wanted == "auto" else wanted == "on"
