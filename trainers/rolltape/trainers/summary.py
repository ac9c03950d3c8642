"""Metrics of a step (algorithms.md §2.6), from its batch, its plan and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rolltape.trainers.advantages import group_statistics
from rolltape.trainers.algorithms.rollouts import known_rewards
from rolltape.trainers.assembly import BatchPlan
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.method_metrics import method_metrics
from rolltape.trainers.metrics import Array, policy_metrics
from rolltape.trainers.staleness import lag_histogram, trajectory_lags
from rolltape.trainers.step import StepOutcome


def step_metrics(
    batch: PackedBatch,
    plan: BatchPlan,
    outcome: StepOutcome,
    config: TrainerConfig,
    *,
    newest_version: int,
    component_metrics: Mapping[str, float],
    updates_at: Mapping[int, int] = MappingProxyType({}),
) -> dict[str, float]:
    """All metrics of a step by name; names say what they are, as ``dropped/stale`` or ``reward_component/exact``.

    ``updates_at``: optimizer updates that had made each published version, by its number (D26).
    """
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
            verdicts=outcome.verdicts.at(action),
            is_clamp=config.correction == "tis",
        )
    )
    metrics["loss"] = outcome.loss
    metrics["grad_norm"] = outcome.grad_norm
    metrics["skip_step"] = float(outcome.skipped)
    metrics["actor_steps"] = float(outcome.actor_updates)
    metrics |= _reward_metrics(batch)
    metrics |= _advantage_metrics(batch, outcome) if config.uses_groups else {}
    metrics |= _version_metrics(batch, newest_version, updates_at)
    metrics |= method_metrics(batch, outcome, config)
    return {**metrics, **_group_metrics(batch, plan, action), **component_metrics}


def _group_metrics(batch: PackedBatch, plan: BatchPlan, action: torch.Tensor) -> dict[str, float]:
    """Who was left out, who fills groups up and with how many of the tokens, who was cut off."""
    metrics = {f"dropped/{reason}": float(count) for reason, count in plan.dropped_by_reason.items()}
    kept = {member.group_id for member in plan.members}
    padded = {member.group_id for member in plan.members if member.is_padding}
    metrics["dropped_groups"] = float(len({item.group_id for item in plan.dropped} - kept))
    metrics["padded_groups"] = float(len(padded))
    metrics["padded_members"] = float(sum(member.is_padding for member in plan.members))
    if batch.num_members:
        metrics["overlong_frac"] = float(batch.is_truncated.double().mean())
    if bool(action.any()):
        is_copy = batch.is_padding[batch.row_member][batch.row_of_token()[action]]
        metrics["padded_token_frac"] = float(is_copy.double().mean())
    return metrics


def _reward_metrics(batch: PackedBatch) -> dict[str, float]:
    rewards = known_rewards(batch).numpy()
    has_reward = np.isfinite(rewards)
    if not has_reward.any():
        return {"num_members": float(len(rewards))}
    rewards = rewards[has_reward]
    return {
        "num_members": float(batch.num_members),
        "num_groups": float(len(np.unique(batch.groups.numpy()[has_reward]))),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
    }


def _advantage_metrics(batch: PackedBatch, outcome: StepOutcome) -> dict[str, float]:
    """Of members within their groups; those of tokens are logged whatever the method."""
    advantages = outcome.member_advantages
    if not advantages.numel():
        return {}
    statistics = group_statistics(batch.rewards, batch.groups)
    return {
        "zero_std_groups": float((statistics.zero_std & (statistics.count > 0)).sum()),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
        "advantage_max": float(advantages.max()),
    }


def _version_metrics(
    batch: PackedBatch, newest: int, updates_at: Mapping[int, int] = MappingProxyType({})
) -> dict[str, float]:
    """Staleness per token and per trajectory (its oldest token), and versions per trajectory.

    Lags count published versions, and beside them the optimizer's updates that lie between (D26).
    """
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
    found, tokens = torch.unique(versions, return_counts=True)
    if {newest, *found.tolist()} <= updates_at.keys():
        behind = updates_at[newest] - torch.tensor([updates_at[version] for version in found.tolist()])
        metrics["optimizer_lag_max"] = float(behind.max())
        metrics["optimizer_lag_mean"] = float((behind * tokens).sum()) / len(versions)
    metrics |= {f"token_lag/{lag}": float(count) for lag, count in lag_histogram(token_lag).items()}
    return metrics | {f"trajectory_lag/{lag}": float(count) for lag, count in lag_histogram(trajectory_lag).items()}


def component_metrics(rewards: pa.Table) -> dict[str, float]:
    """Of ``reward_assigned`` rows in any order: each component's mean and spread, and how any two go together (§4.13).

    From those scored (status ok). ``reward_component_corr/a~b`` is left out where one of the two does not vary over
    the rollouts that have both: two judges that part company are a sign of a reward that is gamed.
    """
    scores = _component_scores(rewards)
    metrics = {f"reward_component/{name}": float(values.mean()) for name, (_, values) in scores.items()}
    metrics |= {f"reward_component_std/{name}": float(values.std()) for name, (_, values) in scores.items()}
    for one, other in combinations(sorted(scores), 2):
        (first, x), (second, y) = scores[one], scores[other]
        _, at, beside = np.intersect1d(first, second, return_indices=True)
        x, y = x[at], y[beside]
        if not len(x) or not np.ptp(x) or not np.ptp(y):
            continue
        # In an order of their own: rows come in that of the log's partitions, which must not show in the last bit.
        order = np.lexsort((x, y))
        x, y = x[order], y[order]
        x, y = x - x.mean(), y - y.mean()
        metrics[f"reward_component_corr/{one}~{other}"] = float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    return metrics


def _component_scores(rewards: pa.Table) -> dict[str, tuple[Array, Array]]:
    """By component: rows that have a score, ascending by score, and the scores."""
    if not rewards.num_rows:
        return {}
    lists = pc.struct_field(rewards["reward_assigned"].combine_chunks(), "components")
    flat = pc.list_flatten(lists)
    table = pa.table({name: pc.struct_field(flat, name) for name in ("name", "value", "status")})
    table = table.append_column("row", pc.list_parent_indices(lists))
    scored = table.filter(pc.and_(pc.equal(table["status"], "ok"), pc.is_valid(table["value"])))
    names = np.asarray(scored["name"].to_pylist(), np.object_)
    values, rows = scored["value"].to_numpy(), scored["row"].to_numpy()
    found = {}
    for name in dict.fromkeys(names.tolist()):
        own = names == name
        order = np.argsort(values[own], kind="stable")
        found[name] = (rows[own][order], values[own][order])
    return found
