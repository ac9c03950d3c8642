"""Metrics of a step (algorithms.md §2.6), from its batch, its plan and its outcome."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rolltape.trainers.algorithms.rollouts import known_rewards
from rolltape.trainers.assembly import BatchPlan
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.method_metrics import method_metrics
from rolltape.trainers.metrics import policy_metrics
from rolltape.trainers.staleness import lag_histogram, trajectory_lags
from rolltape.trainers.step import StepOutcome


def step_metrics(
    batch: PackedBatch,
    plan: BatchPlan,
    outcome: StepOutcome,
    config: TrainerConfig,
    *,
    newest_version: int,
    component_means: Mapping[str, float],
) -> dict[str, float]:
    """All metrics of a step by name; names say what they are, as ``dropped/stale`` or ``reward_component/exact``."""
    action = outcome.trained if outcome.trained is not None else batch.action_mask
    metrics = dict(
        policy_metrics(
            current_logp=outcome.current_log_probs[action],
            old_logp=outcome.old_log_probs[action],
            rollout_logp=batch.rollout_log_probs[action],
            advantage=outcome.advantages[action],
            entropy=outcome.entropy[action],
            gate_weight=outcome.gate_weights[action],
            trusted=outcome.trusted[action],
            eps_low=config.epsilon_low,
            eps_high=config.epsilon_high,
            beta=config.icepop_beta,
            tis=(config.tis_low, config.tis_high) if config.correction == "tis" else None,
        )
    )
    metrics["loss"] = outcome.loss
    metrics["grad_norm"] = outcome.grad_norm
    metrics["skip_step"] = float(outcome.skipped)
    metrics |= _reward_metrics(batch, outcome)
    metrics |= _version_metrics(batch, newest_version)
    metrics |= method_metrics(batch, outcome, config)
    for reason, count in plan.dropped_by_reason.items():
        metrics[f"dropped/{reason}"] = float(count)
    metrics["padded_members"] = float(sum(member.is_padding for member in plan.members))
    metrics |= {f"reward_component/{name}": value for name, value in component_means.items()}
    return metrics


def _reward_metrics(batch: PackedBatch, outcome: StepOutcome) -> dict[str, float]:
    rewards = known_rewards(batch).numpy()
    has_reward = np.isfinite(rewards)
    if not has_reward.any():
        return {"num_members": float(len(rewards))}
    rewards = rewards[has_reward]
    groups = np.unique(batch.groups.numpy()[has_reward], return_inverse=True)[1]
    count = int(groups.max()) + 1
    high, low = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(high, groups, rewards)
    np.minimum.at(low, groups, rewards)
    scale = np.maximum(1.0, np.abs(np.bincount(groups, rewards) / np.bincount(groups)))
    advantages = outcome.member_advantages
    return {
        "num_members": float(batch.num_members),
        "num_groups": float(count),
        "zero_std_groups": float((high - low <= 1e-6 * scale).sum()),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
        "advantage_max": float(advantages.max()),
    }


def _version_metrics(batch: PackedBatch, newest: int) -> dict[str, float]:
    """Staleness per token and per trajectory (its oldest token), and versions per trajectory (D26: published ones)."""
    versions = batch.policy_versions[batch.action_mask].long()
    if not versions.numel():
        return {}
    members = batch.row_member[batch.row_of_token()[batch.action_mask]]
    token_lag = newest - versions
    trajectory_lag = trajectory_lags(versions, members, len(batch.rewards), newest)[torch.unique(members)]
    pairs = torch.unique(torch.stack([members, versions]), dim=1)
    versions_each = torch.unique(pairs[0], return_counts=True)[1].double()
    metrics = {
        "token_lag_max": float(token_lag.max()),
        "token_lag_mean": float(token_lag.double().mean()),
        "trajectory_lag_max": float(trajectory_lag.max()),
        "versions_per_trajectory_mean": float(versions_each.mean()),
        "versions_per_trajectory_max": float(versions_each.max()),
    }
    metrics |= {f"token_lag/{lag}": float(count) for lag, count in lag_histogram(token_lag).items()}
    return metrics | {f"trajectory_lag/{lag}": float(count) for lag, count in lag_histogram(trajectory_lag).items()}


def component_means(rewards: pa.Table) -> dict[str, float]:
    """Mean of each reward component over ``reward_assigned`` rows in any order, from those scored (status ok)."""
    if not rewards.num_rows:
        return {}
    column = rewards["reward_assigned"]
    lists = pc.struct_field(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column, "components")
    flat = pc.list_flatten(lists)
    table = pa.table({name: pc.struct_field(flat, name) for name in ("name", "value", "status")})
    scored = table.filter(pc.and_(pc.equal(table["status"], "ok"), pc.is_valid(table["value"])))
    names, values = np.asarray(scored["name"].to_pylist(), np.object_), scored["value"].to_numpy()
    # Sorted first: rows come in the order of the log's partitions, which must not show in the last bit.
    return {name: float(np.sort(values[names == name]).mean()) for name in dict.fromkeys(names.tolist())}
