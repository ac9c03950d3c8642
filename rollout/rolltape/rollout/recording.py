"""Columns of the events that a rollout worker writes, built for a whole batch at once (design §4).

The columns go to :meth:`rolltape.ingest.recorder.Recorder.record_batch` as they are. A value that is the same for every
row is given once; what differs is a NumPy or Arrow array, never a list of dicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.rollout.engine import EngineInfo, GenerationBatch, Int32, SamplingConfig
from rolltape.schema.columns import FLOAT32, INT32, list_of
from rolltape.schema.kinds import KINDS
from rolltape.schema.kinds.rollout import SAMPLING_TYPE, VERSION_RUNS_TYPE
from rolltape.schema.reward import SCALARISER_VERSION, RewardComponent, scalarise

Columns = dict[str, Any]
Rows = npt.NDArray[np.int64]

ENDS: Final = {
    "stop": ("completed", "stop_token"),
    "length": ("truncated", "max_tokens"),
    "abort": ("aborted", "interrupted"),
}
"""Status and cause of a rollout of one action, by the action's finish reason."""
_COMPONENTS_TYPE: Final = KINDS["reward_assigned"].struct_type.field("components").type


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Who the ``B`` rollouts of a batch are: one entry each, in the order in which they are generated."""

    purpose: str  # train or evaluate
    step: int | None  # training step that they are meant for; None: for none
    group_size: int
    trajectory_ids: Sequence[str]
    attempts: Sequence[int]
    group_ids: Sequence[str]
    problem_ids: Sequence[str]
    group_ordinals: Sequence[int]
    members: Sequence[int]
    seeds: Sequence[int]

    def __len__(self) -> int:
        return len(self.trajectory_ids)

    def select(self, rows: Rows) -> RolloutBatch:
        """Some of the rollouts, by index."""
        chosen = rows.tolist()
        return dataclasses.replace(
            self,
            trajectory_ids=[self.trajectory_ids[row] for row in chosen],
            attempts=[self.attempts[row] for row in chosen],
            group_ids=[self.group_ids[row] for row in chosen],
            problem_ids=[self.problem_ids[row] for row in chosen],
            group_ordinals=[self.group_ordinals[row] for row in chosen],
            members=[self.members[row] for row in chosen],
            seeds=[self.seeds[row] for row in chosen],
        )

    @property
    def identity(self) -> Columns:
        """The envelope columns that every event of these rollouts carries."""
        ids = pa.array(self.trajectory_ids, pa.string())
        return {
            "trajectory_id": ids,
            "attempt": pa.array(self.attempts, pa.int32()),
            "group_id": pa.array(self.group_ids, pa.string()),
            "problem_id": pa.array(self.problem_ids, pa.string()),
            "root_rollout_id": ids,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a call of the engine was for, within the rollouts of a batch."""

    segment_indexes: int | Rows  # of each rollout
    seeds: Sequence[int]  # [B], of this call
    turn_index: int = 0
    action_kind: str = "execution"
    tool_calls: pa.Array | None = None  # parsed from the actions, for reading


def abandoned(batch: RolloutBatch, reason: str, detail: str) -> Columns:
    """``attempt_abandoned`` for each rollout of ``batch``."""
    return {**batch.identity, "reason": reason, "detail": detail}


def dispatched(batch: RolloutBatch, *, worker_id: str, lease_s: float) -> Columns:
    """``rollout_dispatched``: written before anything is sampled."""
    return {
        **batch.identity,
        "purpose": batch.purpose,
        "training_step": batch.step,
        "group_ordinal": pa.array(batch.group_ordinals, pa.int32()),
        "member": pa.array(batch.members, pa.int32()),
        "group_size": batch.group_size,
        "worker_id": worker_id,
        "lease_s": lease_s,
        "sampling_seed": pa.array(batch.seeds, pa.int64()),
    }


def started(
    batch: RolloutBatch,
    *,
    environment: str,
    environment_version: str,
    prompts: Sequence[tuple[Int32, str]],
    stage: str = "reasoning",
    harness: str = "rolltape.rollout",
) -> Columns:
    """``rollout_started``: the exact context, as ids and for reading."""
    ids = [token_ids for token_ids, _ in prompts]
    return {
        **batch.identity,
        "stage": stage,
        "harness": harness,
        "environment": environment,
        "environment_version": environment_version,
        "prompt_token_ids": int32_lists(ids),
        "prompt_text": pa.array([text for _, text in prompts], pa.string()),
    }


def sampled(
    batch: RolloutBatch,
    generations: GenerationBatch,
    sampling: SamplingConfig,
    *,
    engine_id: str,
    engine: EngineInfo,
    texts: Sequence[str],
    call: Call | None = None,
) -> Columns:
    """``action_sampled``: one whole action of each rollout (default: its only one)."""
    call = call or Call(segment_indexes=0, seeds=batch.seeds)
    offsets = pa.array(generations.offsets)
    finish_reasons = pa.array(generations.finish_reasons, pa.string())
    columns: Columns = {
        **batch.identity,
        "segment_index": call.segment_indexes,
        "turn_index": call.turn_index,
        "token_ids": pa.ListArray.from_arrays(offsets, pa.array(generations.token_ids), type=list_of(INT32)),
        "rollout_log_probs": pa.ListArray.from_arrays(offsets, pa.array(generations.log_probs), type=list_of(FLOAT32)),
        "action_kind": call.action_kind,
        "version_runs": _version_runs(generations),
        "sampling": _sampling(sampling, call.seeds),
        "finish_reason": finish_reasons,
        "truncated": _is_truncated(generations),
        "prefix_length": generations.prefix_lengths,
        "prefix_digest": pa.array(generations.prefix_digests, pa.string()),
        "prefix_source": "engine",
        "engine": {"id": engine_id, "name": engine.name, "version": engine.version, "dtype": engine.dtype},
        "cached_tokens": 0,
        "prefill_s": generations.prefill_s,
        "decode_s": generations.decode_s,
        "text": pa.array(texts, pa.string()),
    }
    if call.tool_calls is not None:
        columns["tool_calls"] = call.tool_calls
    if generations.support_token_ids is not None:
        columns |= _support(generations)
    return columns


def ended(batch: RolloutBatch, generations: GenerationBatch) -> Columns:
    """``rollout_ended``; the recorder fills in the last event index, its own."""
    ends = [ENDS[reason] for reason in generations.finish_reasons]
    return {
        **batch.identity,
        "status": pa.array([status for status, _ in ends], pa.string()),
        "cause": pa.array([cause for _, cause in ends], pa.string()),
        "num_action_tokens": np.diff(generations.offsets),
        "num_observation_tokens": 0,
    }


def rewarded(batch: RolloutBatch, components: Sequence[Sequence[RewardComponent]]) -> Columns:
    """``reward_assigned`` to each whole attempt, with the scalar that the components give (algorithms.md §4.13)."""
    scalars = [scalarise(of_row) for of_row in components]
    return {
        **batch.identity,
        "components": _components(components),
        "scalariser_version": SCALARISER_VERSION,
        "scalar": pa.array([scalar.scalar for scalar in scalars], pa.float64()),
        "state": pa.array([scalar.state for scalar in scalars], pa.string()),
    }


def select_rows(columns: Mapping[str, Any], rows: Rows) -> Columns:
    """Some rows of columns as made here; values that are the same for every row stay."""
    indices = pa.array(rows)
    return {
        name: value.take(indices)
        if isinstance(value, pa.Array)
        else value[rows]
        if isinstance(value, np.ndarray)
        else value
        for name, value in columns.items()
    }


def _is_truncated(generations: GenerationBatch) -> npt.NDArray[np.bool_]:
    return np.array([reason == "length" for reason in generations.finish_reasons], dtype=np.bool_)


def int32_lists(lists: Sequence[Int32]) -> pa.ListArray:
    """A list column from the ids of each row, at least one row."""
    offsets = np.concatenate([[0], np.cumsum([len(values) for values in lists])]).astype(np.int32)
    flat = np.concatenate(lists)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=list_of(INT32))


def _version_runs(generations: GenerationBatch) -> pa.ListArray:
    versions = pa.array(generations.run_versions)
    columns = {
        "start": pa.array(generations.run_starts),
        "length": pa.array(generations.run_lengths),
        "policy_id": pa.array([v.policy_id for v in generations.versions], pa.string()).take(versions),
        "run_epoch": pa.array([v.run_epoch for v in generations.versions], pa.int32()).take(versions),
        "version": pa.array([v.version for v in generations.versions], pa.int64()).take(versions),
        "weights_digest": pa.array([v.weights_digest for v in generations.versions], pa.string()).take(versions),
    }
    runs = _struct(VERSION_RUNS_TYPE.value_type, columns, len(versions))
    return pa.ListArray.from_arrays(pa.array(generations.run_offsets), runs, type=VERSION_RUNS_TYPE)


def _sampling(sampling: SamplingConfig, seeds: Sequence[int]) -> pa.StructArray:
    return _struct(
        SAMPLING_TYPE,
        {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": pa.array(seeds, pa.int64()),
            "stop_token_ids": list(sampling.stop_token_ids),
            "max_tokens": sampling.max_tokens,
            "logprobs_mode": sampling.logprobs_mode,
        },
        len(seeds),
    )


def _support(generations: GenerationBatch) -> Columns:
    """Kept support of each rollout's tokens: ids flattened, offsets from 0 in each rollout, one more than tokens."""
    assert generations.support_token_ids is not None
    assert generations.support_offsets is not None
    token_offsets, support_offsets = generations.offsets, generations.support_offsets
    bounds = support_offsets[token_offsets]
    lengths = np.diff(token_offsets) + 1
    rows = np.repeat(np.arange(len(lengths)), lengths)
    offsets_of_rows = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places = np.arange(len(rows)) - offsets_of_rows[rows] + token_offsets[rows]
    relative = support_offsets[places] - bounds[rows]
    return {
        "support_token_ids": pa.ListArray.from_arrays(
            pa.array(bounds), pa.array(generations.support_token_ids), type=list_of(INT32)
        ),
        "support_offsets": pa.ListArray.from_arrays(
            pa.array(offsets_of_rows), pa.array(relative.astype(np.int32)), type=list_of(INT32)
        ),
    }


def _components(components: Sequence[Sequence[RewardComponent]]) -> pa.ListArray:
    flat = [component for of_row in components for component in of_row]
    type_ = _COMPONENTS_TYPE.value_type
    columns = {field.name: pa.array([getattr(c, field.name) for c in flat], field.type) for field in type_.fields}
    offsets = np.concatenate([[0], np.cumsum([len(of_row) for of_row in components])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), _struct(type_, columns, len(flat)), type=_COMPONENTS_TYPE)


def _struct(type_: pa.StructType, columns: Mapping[str, Any], num_rows: int) -> pa.StructArray:
    """A struct array from columns and plain values; fields that are not named are null."""
    arrays = []
    for field in type_.fields:
        value = columns.get(field.name)
        if value is None:
            arrays.append(pa.nulls(num_rows, field.type))
        elif isinstance(value, pa.Array):
            arrays.append(value)
        else:
            arrays.append(pa.repeat(pa.scalar(value, field.type), num_rows))
    return pa.StructArray.from_arrays(arrays, fields=list(type_.fields))
