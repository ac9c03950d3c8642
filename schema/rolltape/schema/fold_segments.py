"""The table of segments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rolltape.schema.columns import INT32
from rolltape.schema.fold_labels import ActionPlaces
from rolltape.schema.fold_parts import Parts, int32_array
from rolltape.schema.fold_ranges import Bools, bool_array, list_array, take_or_null
from rolltape.schema.fold_schema import EXECUTION, SEGMENT_SCHEMA, SUMMARY
from rolltape.schema.fold_timeline import REWRITE


def segment_table(parts: Parts, identity: Mapping[str, pa.Array], revisions: pa.Array) -> pa.Table:
    """All segments; ``identity`` and ``revisions`` (tokenizer) are columns over the attempts."""
    layout, tokens, keys = parts.layout, parts.tokens, parts.keys
    rows = pa.array(layout.key)
    bounds = layout.bounds
    columns = {
        "run_id": keys.run_ids.take(rows),
        "trajectory_id": keys.trajectory_ids.take(rows),
        "attempt": int32_array(keys.attempts[layout.key]),
        "is_current": bool_array(parts.attempts.current[layout.key]),
        "segment_index": int32_array(layout.index),
        "segment_kind": pa.array([EXECUTION, SUMMARY]).take(pa.array(layout.is_summary.astype(np.int64))),
        "is_accepted": pa.array(_accepted(parts), mask=~layout.is_summary),
        "group_id": identity["group_id"].take(rows),
        "problem_id": identity["problem_id"].take(rows),
        "prompt_token_ids": list_array(
            parts.contexts.bounds, pa.array(parts.contexts.values, INT32), parts.contexts.known
        ),
        "response_token_ids": list_array(bounds, pa.array(tokens.ids, INT32)),
        "rollout_log_probs": list_array(bounds, tokens.log_probs.array()),
        "response_mask": list_array(bounds, bool_array(tokens.trained)),
        "observation_mask": list_array(bounds, bool_array(tokens.observed)),
        "policy_versions": list_array(bounds, pa.array(tokens.versions)),
        "sampling_config": _sampling(parts),
        "tokenizer_revision": revisions.take(rows),
    }
    return pa.table([columns[name] for name in SEGMENT_SCHEMA.names], schema=SEGMENT_SCHEMA)


def _sampling(parts: Parts) -> pa.Array:
    """Sampling configuration of the first action of each segment."""
    layout = parts.layout
    first = np.full(layout.num_segments, -1, np.int64)
    actions = np.flatnonzero(layout.is_action)[::-1]
    first[layout.segment[actions]] = layout.events.row[actions]  # the earliest action is written last
    return take_or_null(parts.kinds["action_sampled"].field("sampling"), first)


def _accepted(parts: Parts) -> Bools:
    """Summary segments of which a rewrite of the same attempt accepted an action."""
    layout = parts.layout
    accepted = np.zeros(layout.num_segments, np.bool_)
    if not layout.is_summary.any():
        return accepted
    rewrites = parts.kinds["context_rewritten"]
    named = rewrites.field("summary_event_id")
    shown = parts.timeline.select(parts.timeline.kind == REWRITE)
    places = ActionPlaces(layout, parts.kinds["action_sampled"])
    for key, row in zip(shown.key.tolist(), shown.row.tolist(), strict=True):
        event_id = named[row].as_py()
        place = places.find(key, event_id) if event_id else None
        if place is not None:
            accepted[place.segment] = True
    return accepted & layout.is_summary
