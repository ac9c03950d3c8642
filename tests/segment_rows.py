"""Folded segments without a tape, for what works on segments alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rolltape.schema.fold_schema import SEGMENT_SCHEMA

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed_logprobs"}


def segment_rows(
    *,
    contexts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    observed: Sequence[Sequence[int]] | None = None,
    **columns: Any,
) -> pa.Table:
    """A table of segments, each of a trajectory of its own; ``observed`` are places of observation tokens."""
    rows = []
    for number, (context, response) in enumerate(zip(contexts, responses, strict=True)):
        seen = set(observed[number] if observed is not None else ())
        is_observation = [place in seen for place in range(len(response))]
        rows.append(
            {
                "run_id": "run",
                "trajectory_id": f"t{number}",
                "attempt": 0,
                "is_current": True,
                "segment_index": 0,
                "segment_kind": "execution",
                "group_id": "g",
                "problem_id": "p",
                "prompt_token_ids": list(context),
                "response_token_ids": list(response),
                "rollout_log_probs": [None if flag else -0.5 for flag in is_observation],
                "response_mask": [not flag for flag in is_observation],
                "observation_mask": is_observation,
                "policy_versions": [-1 if flag else 0 for flag in is_observation],
                "sampling_config": SAMPLING,
                **{name: values[number] for name, values in columns.items()},
            }
        )
    return pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA)
