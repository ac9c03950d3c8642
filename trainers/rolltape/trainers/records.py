"""The training events: what a step writes on the tape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from rolltape.schema.columns import BOOL as BOOL_TYPE
from rolltape.schema.columns import FLOAT32, INT32, STRING, list_of
from rolltape.schema.cursor import Cursor
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.members import Dropped, Member
from rolltape.trainers.step import StepOutcome


def one_list(values: pa.Array) -> pa.ListArray:
    """A one-row list column that holds all of ``values``."""
    offsets = pa.array([0, len(values)], pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=list_of(values.type))


def batch_formed_columns(
    *,
    batch_id: str,
    trainer_id: str,
    algorithm: str,
    step: int,
    members: pa.StructArray,
    dropped: Sequence[Dropped],
    staleness_version: int,
    staleness_run_epoch: int,
    cursors: tuple[Cursor, Cursor],
    batch_digest: str,
) -> dict[str, Any]:
    """Columns of one ``batch_formed`` event (one row)."""
    return {
        "batch_id": [batch_id],
        "trainer_id": [trainer_id],
        "algorithm": [algorithm],
        "step": [step],
        "members": one_list(members),
        "dropped": [
            [
                {"trajectory_id": d.trajectory_id, "attempt": d.attempt, "group_id": d.group_id, "reason": d.reason}
                for d in dropped
            ]
        ],
        "staleness_version": [staleness_version],
        "staleness_run_epoch": [staleness_run_epoch],
        "cursor_before": [cursors[0].to_rows()],
        "cursor_after": [cursors[1].to_rows()],
        "batch_digest": [batch_digest],
    }


def tokens_trained_columns(
    batch: PackedBatch, members: Sequence[Member], outcome: StepOutcome, *, batch_id: str, step: int
) -> dict[str, Any]:
    """Columns of the ``tokens_trained`` events, one row a group; tokens are the response tokens of each row.

    What only some methods have is left out by the others.
    """
    keep = _response_tokens(batch)
    row_of_token = batch.row_of_token()[keep]
    member_of_token = batch.row_member[row_of_token].numpy()
    tokens_of_member = np.bincount(member_of_token, minlength=len(members))
    group_of_member = batch.groups.numpy()
    # Members of a group stand together, because the plan is ordered by group.
    starts = np.flatnonzero(np.diff(group_of_member, prepend=-1))
    member_offsets = pa.array(np.append(starts, len(members)).astype(np.int32))
    token_offsets_of_member = np.concatenate(([0], np.cumsum(tokens_of_member)))
    token_offsets = pa.array(token_offsets_of_member[np.append(starts, len(members))].astype(np.int32))
    count = len(starts)

    def by_group(values: torch.Tensor, type_: pa.DataType) -> pa.ListArray:
        flat = pa.array(values[keep].numpy(), type_)
        return pa.ListArray.from_arrays(token_offsets, flat, type=list_of(type_))

    return {
        "group_id": [members[int(start)].group_id for start in starts],
        "batch_id": [batch_id] * count,
        "step": [step] * count,
        "trajectory_ids": pa.ListArray.from_arrays(
            member_offsets, pa.array([m.trajectory_id for m in members], STRING), type=list_of(STRING)
        ),
        "num_tokens": pa.ListArray.from_arrays(
            member_offsets, pa.array(tokens_of_member.astype(np.int32)), type=list_of(INT32)
        ),
        "old_log_probs": by_group(outcome.old_log_probs, FLOAT32),
        "current_log_probs": by_group(outcome.current_log_probs, FLOAT32),
        "advantages": by_group(outcome.advantages, FLOAT32),
        "gate_weights": by_group(outcome.gate_weights, FLOAT32),
        "trusted": by_group(outcome.trusted, BOOL_TYPE),
        **{name: by_group(values, FLOAT32) for name, values in _apart(outcome).items()},
    }


_PARTS: Final = {"task_advantage": "task_advantages", "teacher_gap": "teacher_gaps", "divergence": "divergences"}


def _apart(outcome: StepOutcome) -> dict[str, torch.Tensor]:
    """Tensors [N] by column: the parts of an advantage, and what the critic said."""
    found = {_PARTS[name]: values for name, values in outcome.parts.items()}
    if outcome.critic is not None:
        found |= {"values": outcome.critic.values, "value_targets": outcome.critic.targets}
    return found


def _response_tokens(batch: PackedBatch) -> torch.Tensor:
    """Bool [N]: tokens after each row's context."""
    starts = torch.repeat_interleave(batch.cu_seqlens[:-1] + batch.context_lengths, batch.cu_seqlens.diff())
    return torch.arange(batch.num_tokens) >= starts


def step_completed_fields(
    outcome: StepOutcome,
    *,
    trainer_id: str,
    policy_id: str,
    step: int,
    batch_id: str,
    batch_digest: str,
    version_in: int,
    version_out: int,
    checkpoint_digest: str | None,
    metrics: Mapping[str, float],
    duration_s: float,
) -> dict[str, Any]:
    """Fields of one ``train_step_completed`` event. Numbers that are not finite are null beside their bit patterns."""
    return {
        "trainer_id": trainer_id,
        "step": step,
        "batch_id": batch_id,
        "skipped": outcome.skipped,
        "checkpoint_digest": checkpoint_digest,
        "policy_id": policy_id,
        "version_in": version_in,
        "version_out": version_out,
        "micro_batches": list(outcome.micro_batches),
        "rng_state_digest": outcome.rng_state_digest,
        "batch_digest": batch_digest,
        "loss_bits": outcome.loss_bits,
        "loss": _finite(outcome.loss),
        "grad_norm": _finite(outcome.grad_norm),
        "gradient_digest": outcome.gradient_digest,
        "weights_digest": outcome.weights_digest,
        "gradient_digests": _named(outcome.gradient_digests),
        "weight_digests": _named(outcome.weight_digests),
        "metrics": [{"name": name, "value": _finite(value)} for name, value in sorted(metrics.items())],
        "duration_s": duration_s,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _named(digests: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "digest": digest} for name, digest in digests.items()]


def metric_values(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a ``train_step_completed`` or ``evaluation_completed`` row, by name."""
    return {entry["name"]: entry["value"] for entry in row["metrics"] or () if entry["value"] is not None}
