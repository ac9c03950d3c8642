"""The trainer's configuration. Names and defaults follow algorithms.md §2 to §4; importing it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rolltape.schema.errors import ConfigError

Mode = Literal["seq_mean", "token_mean", "seq_sum", "const", "rollout_mean"]

_CHOICES: Final = {
    "algorithm": ("grpo",),
    "pop_value": ("ratio", "binary"),
    "correction": ("icepop", "tis", "dis", "none"),
    "overdue_groups": ("drop", "train"),
    "aggregation": ("seq_mean", "token_mean", "seq_sum", "const", "rollout_mean"),
    "adv_norm": ("mean_std", "mean"),
    "pad_rule": ("gt_half", "ge_half"),
    "stats": ("padded", "valid_only"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How a policy learns.

    Attributes of note: ``icepop_beta`` keeps ratios in [1/beta, beta]; ``stop_metric`` ends the run once the moving
    average (weight ``stop_ema`` on the past) of that step metric reaches ``stop_above``; ``entropy_coef`` is c of D33.
    ``correction`` icepop takes tokens of the version alone that the step starts from; tis clamps and dis gates the
    ratio to whatever version sampled, dis inside (1 - dis_low, 1 + dis_high), which no source states and so has no
    default. Asynchronous runs only: rollouts more than ``staleness_tau`` published versions old are dropped, and
    ``overdue_groups`` says what becomes of groups that are not complete ``group_timeout_s`` after they were first seen.
    The learning rate rises over ``warmup_steps`` and then falls in a line to ``final_lr_fraction`` of itself at
    ``decay_steps`` (0: constant).
    """

    algorithm: Literal["grpo"] = "grpo"
    max_steps: int = 300
    lr: float = 1e-3
    warmup_steps: int = 0
    decay_steps: int = 0
    final_lr_fraction: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates_per_batch: int = 1
    eps_low: float = 0.2
    eps_high: float = 0.28
    icepop_beta: float = 2.0
    tis_low: float = 0.0
    tis_high: float = 2.0
    pop_value: Literal["ratio", "binary"] = "ratio"
    correction: Literal["icepop", "tis", "dis", "none"] = "icepop"
    dis_low: float = 0.0
    dis_high: float = 0.0
    aggregation: Mode = "seq_mean"
    const_length: int = 0
    adv_norm: Literal["mean_std", "mean"] = "mean_std"
    entropy_coef: float = 0.0
    staleness_tau: int = 0
    group_timeout_s: float = 300.0
    overdue_groups: Literal["drop", "train"] = "drop"
    pad_rule: Literal["gt_half", "ge_half"] = "gt_half"
    stats: Literal["padded", "valid_only"] = "padded"
    token_budget: int = 4096
    checkpoint_every: int = 20
    probe_every: int = 50
    stop_metric: str = ""
    stop_above: float = 2.0
    stop_ema: float = 0.9
    num_threads: int = 1
    engine_timeout_s: float = 120.0
    archive_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"trainer.{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("max_steps", "updates_per_batch", "token_budget", "checkpoint_every", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}: expected 1 or more, got {getattr(self, name)}")
        for name in (
            "weight_decay",
            "eps_high",
            "entropy_coef",
            "tis_low",
            "staleness_tau",
            "probe_every",
            "warmup_steps",
            "decay_steps",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"trainer.{name}: expected 0 or more, got {getattr(self, name)}")
        for name in (
            "lr",
            "max_grad_norm",
            "adam_eps",
            "tis_high",
            "engine_timeout_s",
            "group_timeout_s",
            "archive_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"trainer.{name}: expected more than 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "eps_low", "stop_ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}: expected 0 <= {name} < 1, got {getattr(self, name)}")
        if not 0 < self.final_lr_fraction <= 1:
            raise ConfigError(
                f"trainer.final_lr_fraction: expected more than 0, at most 1, got {self.final_lr_fraction}"
            )
        if self.aggregation == "const" and self.const_length < 1:
            raise ConfigError(
                f"trainer.const_length: expected 1 or more with aggregation const, got {self.const_length}"
            )
        if self.correction == "dis" and not (
            0 <= self.dis_low < 1 and self.dis_low + self.dis_high > 0 <= self.dis_high
        ):
            raise ConfigError(
                "trainer.dis_low, trainer.dis_high: expected 0 <= dis_low < 1 and dis_high >= 0, not both 0, with "
                f"correction dis, got {self.dis_low}, {self.dis_high}"
            )
        if not self.icepop_beta >= 1:
            raise ConfigError(f"trainer.icepop_beta: expected 1 or more, got {self.icepop_beta}")

    def lr_at(self, step: int) -> float:
        """Learning rate of ``step`` (from 1): a function of the step alone, so a replay needs no scheduler state."""
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if not self.decay_steps:
            return self.lr * warm
        left = 1.0 - min(1.0, step / self.decay_steps)
        return self.lr * warm * (self.final_lr_fraction + (1.0 - self.final_lr_fraction) * left)
