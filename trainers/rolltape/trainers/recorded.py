"""Reading recorded rollouts back: of each event no more than the fold needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.fold import FOLDED_COLUMNS

FOLDED_KINDS: Final = (
    "rollout_dispatched",
    "rollout_started",
    "rollout_resumed",
    "action_sampled",
    "observation_received",
    "context_rewritten",
    "rollout_ended",
    "reward_assigned",
    "mask_assigned",
)
"""What is read of a recorded batch. Its members stand, so nothing that ends an attempt otherwise is among it."""

_MAX_JOINED: Final = 1 << 30  # bytes: well below what the 32-bit offsets of a list can address

ReadKind = Callable[[str, Sequence[str] | None], pa.Table]
"""Kind and columns (None: all) -> rows, conformed; from a lake, or from its recent window."""


def read_events(read: ReadKind, *, whole: Collection[str] = ()) -> dict[str, pa.Table]:
    """The events to fold, with the columns that the fold needs; all columns of the kinds in ``whole``.

    A kind in which an event id comes twice is read whole as well: the fold compares copies, whatever differs.
    """
    return {kind: _read(read, kind, None if kind in whole else FOLDED_COLUMNS[kind]) for kind in FOLDED_KINDS}


def _read(read: ReadKind, kind: str, columns: Sequence[str] | None) -> pa.Table:
    table = read(kind, columns)
    if columns is not None and table.num_rows:
        ids = table["event_id"]
        if pc.count_distinct(ids, mode="all").as_py() < len(ids):
            table = read(kind, None)
    # The fold joins chunks in any case; joined here, the chunks are gone by then.
    return table.combine_chunks() if table["event_id"].num_chunks > 1 and table.nbytes < _MAX_JOINED else table
