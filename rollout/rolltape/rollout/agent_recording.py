"""Columns of the events that only rollouts of several turns have; actions are recorded as those of one turn are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rolltape.rollout import recording
from rolltape.rollout.agent_context import Span, joined, provenance
from rolltape.rollout.agent_environment import Observation, ToolCall
from rolltape.rollout.compaction import Trigger
from rolltape.rollout.engine import Int32
from rolltape.rollout.recording import Columns, RolloutBatch
from rolltape.schema.kinds import KINDS
from rolltape.schema.reward import RewardComponent

_PROVENANCE_TYPE: Final = KINDS["context_rewritten"].struct_type.field("provenance").type
_RANGES_TYPE: Final = KINDS["mask_assigned"].struct_type.field("ranges").type
_TOOL_CALLS_TYPE: Final = KINDS["action_sampled"].struct_type.field("tool_calls").type


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rollout's new context."""

    segment_index: int
    spans: Sequence[Span]
    trigger: Trigger | None = None
    summary_event_id: str | None = None
    rejected_event_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """One action that stays out of the loss."""

    event_id: str
    length: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one rollout ended."""

    status: str
    cause: str
    num_action_tokens: int
    num_observation_tokens: int


def tool_calls(calls: Sequence[Sequence[ToolCall]]) -> pa.Array | None:
    """The column of parsed tool calls; None where nobody made one."""
    if not any(calls):
        return None
    rows = [[{"id": c.id, "name": c.name, "arguments": c.arguments} for c in of_row] or None for of_row in calls]
    return pa.array(rows, _TOOL_CALLS_TYPE)


def observed(
    batch: RolloutBatch,
    observations: Sequence[Observation],
    token_ids: Sequence[Int32],
    *,
    segment_indexes: Sequence[int],
    turn_index: int,
    latencies_s: Sequence[float],
) -> Columns:
    """``observation_received``: what each rollout of ``batch`` sees next."""
    return {
        **batch.identity,
        "segment_index": _int32(segment_indexes),
        "turn_index": turn_index,
        "token_ids": recording.int32_lists(token_ids),
        "source": _text([seen.source for seen in observations]),
        "tool_name": _text([seen.tool_name for seen in observations]),
        "status": _text([seen.status for seen in observations]),
        "error_class": _text([seen.error_class for seen in observations]),
        "latency_s": pa.array(latencies_s, pa.float64()),
        "text": _text([seen.text for seen in observations]),
    }


def rewritten(batch: RolloutBatch, rewrites: Sequence[Rewrite], *, reasons: Sequence[str], turn_index: int) -> Columns:
    """``context_rewritten``: the next segment of each rollout of ``batch``."""
    triggers = [rewrite.trigger for rewrite in rewrites]
    return {
        **batch.identity,
        "segment_index": _int32([rewrite.segment_index for rewrite in rewrites]),
        "turn_index": turn_index,
        "reason": _text(reasons),
        "context_token_ids": recording.int32_lists([joined(rewrite.spans) for rewrite in rewrites]),
        "provenance": pa.array([provenance(rewrite.spans) for rewrite in rewrites], _PROVENANCE_TYPE),
        "context_budget": _int32([trigger and trigger.budget for trigger in triggers]),
        "context_used": _int32([trigger and trigger.used for trigger in triggers]),
        "context_threshold": _int32([trigger and trigger.threshold for trigger in triggers]),
        "summary_event_id": _text([rewrite.summary_event_id for rewrite in rewrites]),
        "rejected_event_ids": pa.array(
            [list(rewrite.rejected_event_ids) or None for rewrite in rewrites], pa.list_(pa.string())
        ),
    }


def masked(batch: RolloutBatch, masks: Sequence[Sequence[Masked]], *, assigned_by: str) -> Columns:
    """``mask_assigned``: erroneous actions of each rollout of ``batch``, at least one each."""
    ranges: list[list[dict[str, Any]]] = [
        [{"event_id": mask.event_id, "start": 0, "length": mask.length} for mask in of_row] for of_row in masks
    ]
    reasons = ["; ".join(dict.fromkeys(mask.reason for mask in of_row)) for of_row in masks]
    return {
        **batch.identity,
        "ranges": pa.array(ranges, _RANGES_TYPE),
        "assigned_by": assigned_by,
        "reason": _text(reasons),
    }


def rewarded(
    batch: RolloutBatch, components: Sequence[Sequence[RewardComponent]], targets: Sequence[str | None]
) -> Columns:
    """``reward_assigned`` to the action that ``targets`` names, or (None) to the whole rollout."""
    return {**recording.rewarded(batch, components), "target_event_id": _text(targets)}


def ended(batch: RolloutBatch, ends: Sequence[End]) -> Columns:
    """``rollout_ended``; the recorder fills in the last event index, its own."""
    return {
        **batch.identity,
        "status": _text([end.status for end in ends]),
        "cause": _text([end.cause for end in ends]),
        "num_action_tokens": np.array([end.num_action_tokens for end in ends]),
        "num_observation_tokens": np.array([end.num_observation_tokens for end in ends]),
    }


def _text(values: Sequence[str | None]) -> pa.Array:
    return pa.array(values, pa.string())


def _int32(values: Sequence[int | None]) -> pa.Array:
    return pa.array(values, pa.int32())
