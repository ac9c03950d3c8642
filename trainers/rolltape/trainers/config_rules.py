"""What values the fields of a trainer's configuration may have. Every refusal names the field and the range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from rolltape.schema.errors import ConfigError

if TYPE_CHECKING:
    from rolltape.trainers.config import TrainerConfig

_CHOICES: Final = {
    "pop_value": ("ratio", "binary"),
    "overdue_groups": ("drop", "train"),
    "aggregation": ("seq_mean", "token_mean", "seq_sum", "const", "rollout_mean"),
    "adv_norm": ("mean_std", "mean"),
    "pad_rule": ("gt_half", "ge_half"),
    "stats": ("padded", "valid_only"),
    "zero_std_groups": ("keep", "drop"),
    "truncated": ("keep", "mask", "zero_reward"),
    "optimizer_reset": ("auto", "on", "off"),
    "opd_form": ("eq1", "score", "full", "top_k"),
    "opd_gap": ("current", "old"),
    "advantage_values": ("pre_update", "post_update"),
    "boundary_value": ("zero", "bootstrap"),
    "critic_target": ("global", "local"),
    "compute_dtype": ("float32", "bfloat16"),
}

_Rule = tuple[str, Callable[[float], bool], tuple[str, ...]]

# The words, the range and the fields that have it. A comparison with NaN is false, so NaN is in no range.
_RANGES: Final[tuple[_Rule, ...]] = (
    (
        "1 or more",
        lambda value: value >= 1,
        (
            "max_steps",
            "updates_per_batch",
            "token_budget",
            "checkpoint_every",
            "num_threads",
            "icepop_beta",
            "top_k",
            "critic_updates",
        ),
    ),
    (
        "0 or more",
        lambda value: value >= 0,
        (
            "weight_decay",
            "epsilon_high",
            "entropy_coef",
            "tis_low",
            "staleness_tau",
            "probe_every",
            "warmup_steps",
            "decay_steps",
            "truncation_penalty",
            "task_coef",
            "opd_coef",
            "score_low",
            "score_high",
            "critic_warmup_steps",
            "const_length",
        ),
    ),
    (
        "more than 0",
        lambda value: value > 0,
        (
            "lr",
            "max_grad_norm",
            "adam_eps",
            "tis_high",
            "engine_timeout_s",
            "group_timeout_s",
            "archive_timeout_s",
            "max_gap",
            "lambda_alpha",
            "critic_lr",
            "value_clip",
            "alarm_entropy_below",
            "alarm_mismatch_above",
            "alarm_domain_kl_above",
        ),
    ),
    ("0 <= {name} < 1", lambda value: 0 <= value < 1, ("beta1", "beta2", "epsilon_low", "stop_ema", "alarm_ema")),
    ("0 <= {name} <= 1", lambda value: 0 <= value <= 1, ("gamma", "critic_lambda")),
    (
        "more than 0, at most 1",
        lambda value: 0 < value <= 1,
        ("final_lr_fraction", "value_norm_rate", "alarm_trusted_below"),
    ),
    ("more than 1", lambda value: value > 1, ("dual_clip",)),
    ("a log-prob below 0", lambda value: value < 0, ("teacher_floor",)),
)


def check_ranges(config: TrainerConfig) -> None:
    """Refuse values outside their range, and values that contradict each other.

    Raises:
        ConfigError: names the field, what it may be and what came.
    """
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise _refused(name, f"one of {', '.join(choices)}", repr(getattr(config, name)))
    for words, allows, names in _RANGES:
        for name in names:
            value: Any = getattr(config, name)
            if value is not None and not allows(value):
                raise _refused(name, words.format(name=name), value)
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise _refused(field.name, "a finite number", value)
    _check_together(config)


def _check_together(config: TrainerConfig) -> None:
    if config.aggregation == "const" and config.const_length < 1:
        raise _refused("const_length", "1 or more with aggregation const", config.const_length)
    if config.tis_low > config.tis_high:
        raise _refused("tis_low", f"at most tis_high, {config.tis_high}", config.tis_low)
    if config.is_dis and config.epsilon_low == config.epsilon_high == 0:
        raise _refused(
            "epsilon_low, trainer.epsilon_high", "not both 0 with DIS, whose open interval accepts nothing then", "0, 0"
        )
    if config.dual_clip is not None and config.algorithm != "grpo":
        raise _refused("dual_clip", f"none with algorithm {config.algorithm}: it bounds GRPO's loss", config.dual_clip)
    if config.is_distillation:
        _check_distillation(config)
    if config.algorithm == "compaction" and config.critic_target == "global" and config.critic_lambda != 1.0:
        raise _refused(
            "critic_lambda",
            "1 with algorithm compaction and trainer.critic_target global, whose targets are the discounted reward; "
            "set critic_target local to mix values into them",
            config.critic_lambda,
        )
    if any(not isinstance(value, float) or not -math.inf < value < 0 for value in config.sentinels):
        raise _refused("sentinels", "finite values below 0 with a decimal point", config.sentinels)
    for name in ("train_critic", "freeze_critic"):
        parts = getattr(config, name)
        if any(not isinstance(part, str) or not part for part in parts):
            raise _refused(name, "parts of module names, none of them empty", parts)


def _check_distillation(config: TrainerConfig) -> None:
    if config.task_coef == config.opd_coef == 0:
        raise _refused("task_coef, trainer.opd_coef", "one above 0", "0, 0")
    low, high = config.score_low, config.score_high
    if (low is None) != (high is None) or (low is not None and high is not None and low > high):
        raise _refused("score_low, trainer.score_high", "both with score_low <= score_high, or none", f"{low}, {high}")
    if config.task_coef > 0 and config.opd_form in {"full", "top_k"}:
        raise _refused(
            "task_coef", f"0 with opd_form {config.opd_form}, which has no advantage to mix it into", config.task_coef
        )


def _refused(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"trainer.{name}: expected {expected}, got {got}")
