"""What a step logs of its own method: DIS's surrogate, the critic, teachers by domain, segments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from rolltape.trainers.algorithms.base import token_weights
from rolltape.trainers.algorithms.distillation import floored
from rolltape.trainers.algorithms.rollouts import known_rewards
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic_step import CriticOutcome
from rolltape.trainers.dis import dis_surrogate
from rolltape.trainers.distill import opd_gap
from rolltape.trainers.domains import domain_reports
from rolltape.trainers.step import StepOutcome

UNKNOWN: Final = "unknown"


def method_metrics(batch: PackedBatch, outcome: StepOutcome, config: TrainerConfig) -> dict[str, float]:
    """Metrics of the configured method by name; NaN where one is undefined, which the tape holds as null."""
    trained = outcome.trained if outcome.trained is not None else batch.action_mask
    metrics: dict[str, float] = {}
    if config.is_dis and bool(trained.any()):
        metrics["dis_surrogate"] = _surrogate(batch, outcome, config, trained)
    if outcome.critic is not None:
        metrics |= _critic_metrics(outcome.critic)
    if config.is_distillation and batch.teacher is not None:
        metrics |= _teacher_metrics(batch, outcome, config, trained)
    if config.algorithm == "compaction":
        metrics |= _segment_metrics(batch, trained)
    return metrics


def _surrogate(batch: PackedBatch, outcome: StepOutcome, config: TrainerConfig, trained: Tensor) -> float:
    found = dis_surrogate(
        outcome.current_log_probs[trained],
        batch.rollout_log_probs[trained],
        outcome.advantages[trained],
        token_weights(batch, config, trained)[trained],
        eps_low=config.epsilon_low,
        eps_high=config.epsilon_high,
    )
    return float(found)


def _critic_metrics(critic: CriticOutcome) -> dict[str, float]:
    variance = critic.explained_variance
    return {
        "value_loss": critic.losses[0],
        "value_loss_last": critic.losses[-1],
        "explained_variance": math.nan if variance is None else variance,
        "critic_grad_norm": critic.grad_norm,
        "critic_steps": float(critic.num_updates),
        "critic_nonfinite_tokens": float(critic.num_nonfinite),
    }


def _teacher_metrics(
    batch: PackedBatch, outcome: StepOutcome, config: TrainerConfig, trained: Tensor
) -> dict[str, float]:
    """Per domain and over all; gaps against the current θ and the one before the update (D12)."""
    assert batch.teacher is not None
    teacher = floored(batch.teacher.log_probs[trained], config.teacher_floor)
    current, old = outcome.current_log_probs[trained], outcome.old_log_probs[trained]
    student = old if config.opd_gap == "old" else current
    rows = batch.row_of_token()[trained]
    domains = [batch.domains[member] or UNKNOWN for member in batch.row_member.tolist()]
    used = opd_gap(teacher, student, max_gap=config.max_gap)
    metrics: dict[str, float] = {}
    for name, report in domain_reports(domains, rows, opd_gap(teacher, student), used).items():
        metrics |= {
            f"domain/{name}/kl": _number(report.kl),
            f"domain/{name}/gap_abs": _number(report.gap_abs),
            f"domain/{name}/clip_share": _number(report.clip_share),
            f"domain/{name}/tokens": float(report.tokens),
            f"domain/{name}/nonfinite_tokens": float(report.nonfinite_tokens),
        }
    metrics["teacher_kl_current"] = _number(opd_gap(teacher, current).reverse_kl)
    metrics["teacher_kl_old"] = _number(opd_gap(teacher, old).reverse_kl)
    return metrics | _part_metrics(batch, outcome.parts, domains, trained)


def _part_metrics(
    batch: PackedBatch, parts: Mapping[str, Tensor], domains: list[str], trained: Tensor
) -> dict[str, float]:
    """Mean size of each part that is logged apart, and the divergence by domain."""
    metrics = {f"{name}_abs_mean": _mean(values[trained].abs()) for name, values in parts.items()}
    if "divergence" in parts:
        row_of_token = batch.row_of_token()
        for domain in sorted(set(domains)):
            own = torch.tensor([name == domain for name in domains])[row_of_token] & trained
            metrics[f"domain/{domain}/divergence"] = _mean(parts["divergence"][own])
    return metrics


def _segment_metrics(batch: PackedBatch, trained: Tensor) -> dict[str, float]:
    """Compactions, summaries, and how rollouts of one window fare beside compacted ones (§4.12)."""
    members = batch.num_members
    if not members:
        return {}
    lengths = torch.bincount(batch.row_of_token()[batch.action_mask], minlength=batch.num_rows)
    trainable = torch.bincount(batch.row_of_token()[trained], minlength=batch.num_rows)
    compactions = torch.bincount(batch.row_member[batch.is_summary], minlength=members)
    is_compacted = compactions > 0
    rewards = known_rewards(batch)
    return {
        "compactions_mean": float(compactions.double().mean()),
        "compacted_frac": float(is_compacted.double().mean()),
        "summary_tokens_mean": _mean(lengths[batch.is_summary]),
        "trainable_tokens/execution": float(trainable[~batch.is_summary].sum()),
        "trainable_tokens/summary": float(trainable[batch.is_summary].sum()),
        "reward_mean/single_window": _mean(rewards[~is_compacted]),
        "reward_mean/compacted": _mean(rewards[is_compacted]),
    }


def _mean(values: Tensor) -> float:
    finite = values.double()[torch.isfinite(values)]
    return float(finite.mean()) if finite.numel() else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value
