"""What a configuration makes of recorded rollouts: who may be trained, with which reward, in which rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.groups import PadRule

TeacherUse: TypeAlias = Literal["none", "scores", "routes"]
"""What is read of teachers: nothing, their scores on the tape, or only who they are (full distributions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How rollouts become a batch; the defaults are GRPO's.

    Attributes:
        uses_groups: members are compared within their groups; otherwise groups only say what is gathered together,
            and a rollout that may not be trained is dropped alone.
        pad_rule: which incomplete groups are filled up.
        drops_zero_std: groups whose rewards are all equal are left out.
        needs_ratio: the loss compares the trainer's log-probs with the rollout's.
        needs_reward: a rollout without a reward of the whole attempt is refused.
        takes_token_rewards: rewards of single tokens alone make a rollout a judged one.
        truncated: what becomes of rollouts cut off by length: kept, without tokens to train, or with reward 0.
        truncation_penalty: is subtracted from their reward.
        train_summary: accepted summaries are trained.
        train_rejected_summaries: so are summaries that were not accepted.
        sentinels: log-probs that are none; packed as NaN, like a null.
        teacher: what is read of teachers.
        top_k: likeliest tokens that each position's score must have; 0: the sampled token's score is enough.
    """

    uses_groups: bool = True
    pad_rule: PadRule = "gt_half"
    drops_zero_std: bool = False
    needs_ratio: bool = True
    needs_reward: bool = True
    takes_token_rewards: bool = False
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    truncation_penalty: float = 0.0
    train_summary: bool = True
    train_rejected_summaries: bool = False
    sentinels: tuple[float, ...] = ()
    teacher: TeacherUse = "none"
    top_k: int = 0

    @classmethod
    def of(cls, config: TrainerConfig) -> BatchRules:
        """The rules of a configuration."""
        teacher: TeacherUse = "routes" if config.is_distillation else "none"
        return cls(
            uses_groups=config.uses_groups,
            pad_rule=config.pad_rule,
            # A distilled token teaches whatever its group's rewards are.
            drops_zero_std=config.zero_std_groups == "drop" and config.uses_groups and not config.is_distillation,
            needs_ratio=config.uses_ratio,
            needs_reward=config.uses_rewards,
            takes_token_rewards=config.uses_token_rewards,
            truncated=config.truncated,
            truncation_penalty=config.truncation_penalty,
            train_summary=config.train_summary,
            train_rejected_summaries=config.train_rejected_summaries,
            sentinels=config.sentinels,
            teacher="scores" if config.uses_teacher_scores else teacher,
            top_k=config.top_k if config.is_distillation and config.opd_form == "top_k" else 0,
        )

    @property
    def uses_teacher(self) -> bool:
        """Whether anything is read of teachers."""
        return self.teacher != "none"

    def final_reward(self, reward: float | None, *, is_truncated: bool) -> float:
        """The reward that a rollout is trained with; NaN: the whole attempt has none."""
        if not is_truncated:
            return float("nan") if reward is None else reward
        if self.truncated == "zero_reward" or (reward is None and self.truncation_penalty):
            reward = 0.0
        return float("nan") if reward is None else reward - self.truncation_penalty
