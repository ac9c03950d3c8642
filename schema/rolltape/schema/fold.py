"""Folding a set of events to trajectories and segments (design §4, Fold).

>>> fold({}).trajectories.num_rows
0

The result is a function of the *set* of events: duplicates, order, files and clocks do not show in it. What it says
of a trajectory depends on the events of that trajectory alone (beside the few of its run, and of the weights that
were aborted), so a fold over a part of the tape agrees with a fold over all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.fold_digests import content_digests_of, segment_digests
from rolltape.schema.fold_facts import RunFacts, identity_columns
from rolltape.schema.fold_inputs import FOLDED_COLUMNS, KEYED_KINDS, Keys, KindRows, read_inputs
from rolltape.schema.fold_parts import fold_parts
from rolltape.schema.fold_schema import SEGMENT_SCHEMA, TRAJECTORY_SCHEMA
from rolltape.schema.fold_segments import segment_table
from rolltape.schema.fold_supports import SUPPORT_SCHEMA, support_table
from rolltape.schema.fold_trajectories import trajectory_table

__all__ = [
    "FOLDED_COLUMNS",
    "FOLDED_KINDS",
    "SEGMENT_SCHEMA",
    "SUPPORT_SCHEMA",
    "TRAJECTORY_SCHEMA",
    "Fold",
    "content_digests_of",
    "fold",
    "segment_digests",
]

FOLDED_KINDS: Final = (*KEYED_KINDS, "dead_letter_redriven", "run_started", "run_resumed", "weights_aborted")
"""Kinds that the fold reads; others are ignored."""

_MAX_VALUES: Final = 1 << 30  # list values folded at once: half of what 32-bit offsets can address


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """What events say: one row per attempt (:data:`TRAJECTORY_SCHEMA`), one per segment (:data:`SEGMENT_SCHEMA`).

    Rows are ordered by (run, trajectory, attempt, segment). ``supports`` (:data:`SUPPORT_SCHEMA`) has a row for each
    segment that was sampled from a kept part of the vocabulary, where the tape says which.
    """

    trajectories: pa.Table
    segments: pa.Table
    supports: pa.Table = field(default_factory=SUPPORT_SCHEMA.empty_table)


def fold(events: Mapping[str, pa.Table]) -> Fold:
    """Fold events to trajectories and segments.

    Args:
        events: tables by kind name, as :func:`rolltape.schema.codec.conform` gives them; any kinds, any order,
            duplicates allowed. Columns that a reader left out read as null.
    """
    keys, kinds = read_inputs(events)
    folded = [_fold_shard(part, rows, events) for part, rows in _shards(keys, kinds)]
    return Fold(
        trajectories=pa.concat_tables([part.trajectories for part in folded]),
        segments=pa.concat_tables([part.segments for part in folded]),
        supports=_joined_supports(folded),
    )


def _joined_supports(folded: Sequence[Fold]) -> pa.Table:
    """Supports of shards in order, their rows numbered among the segments of all."""
    shards, first = [], 0
    for part in folded:
        moved = pc.add(part.supports["segment"], first)
        shards.append(part.supports.set_column(0, SUPPORT_SCHEMA.field("segment"), moved))
        first += part.segments.num_rows
    return pa.concat_tables(shards)


def _fold_shard(keys: Keys, kinds: Mapping[str, KindRows], events: Mapping[str, pa.Table]) -> Fold:
    """The fold of whole trajectories; ``events`` holds the kinds that no attempt owns."""
    parts = fold_parts(keys, kinds, events)
    identity = identity_columns(kinds, keys)
    purposes, revisions = RunFacts(events).columns(keys.run_ids, identity["run_epoch"])
    identity["purpose"] = pc.coalesce(identity["purpose"], purposes)
    return Fold(
        trajectories=trajectory_table(parts, identity),
        segments=segment_table(parts, identity, revisions),
        supports=support_table(parts),
    )


def _shards(keys: Keys, kinds: dict[str, KindRows]) -> list[tuple[Keys, dict[str, KindRows]]]:
    """Whole trajectories in parts whose lists fit 32-bit offsets; one part where all of it does."""
    total = sum(_num_values(rows.table) for rows in kinds.values() if rows.num_rows)
    if total <= _MAX_VALUES or not keys.num_keys:
        return [(keys, kinds)]
    num_shards = min(-(-total // _MAX_VALUES) * 2, int(keys.trajectory[-1]) + 1)
    edges = np.linspace(0, int(keys.trajectory[-1]) + 1, num_shards + 1).astype(np.int64)
    bounds = np.searchsorted(keys.trajectory, edges)
    return [_part(keys, kinds, int(low), int(high)) for low, high in pairwise(bounds)]


def _part(keys: Keys, kinds: dict[str, KindRows], low: int, high: int) -> tuple[Keys, dict[str, KindRows]]:
    part = Keys(
        keys.run_ids.slice(low, high - low),
        keys.trajectory_ids.slice(low, high - low),
        keys.attempts[low:high],
        keys.trajectory[low:high] - (keys.trajectory[low] if high > low else 0),
    )
    chosen = {}
    for name, rows in kinds.items():
        inside = rows.only((rows.key >= low) & (rows.key < high))
        chosen[name] = inside.with_key(inside.key - low)
    return part, chosen


def _num_values(table: pa.Table) -> int:
    """List values of the widest column of ``table``."""
    widths = [
        sum(chunk.offsets[-1].as_py() - chunk.offsets[0].as_py() for chunk in column.chunks if len(chunk))
        for column in table.columns
        if pa.types.is_list(column.type)
    ]
    return max(widths, default=0)
