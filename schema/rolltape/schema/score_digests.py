"""Digests of what teachers said of a batch member: one definition for trainer, replay and verify (algorithms.md §4.7).

Content digests (design §7) cover what a rollout itself is; scores have a digest of their own beside them, so that a
member is the same member whether a teacher is read or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_DOMAIN: Final = b"rolltape scores 1"
_LISTS: Final = ("scored_token_ids", "log_probs", "top_k_token_ids", "top_k_log_probs")


def score_digests(scored: pa.Table, event_ids: Sequence[Sequence[str] | None]) -> list[int | None]:
    """Digest of each member's scores: the first 8 bytes of a SHA-256, big-endian and signed.

    Digested are, for each score in the order given: where it begins, then its ids, log-probs and top-k payload by
    their bits, each behind its length. A null log-prob counts as a NaN.

    Args:
        scored: rows of ``teacher_scored``; of several under one event id the first in the log counts.
        event_ids: the scores of each member, in the order in which its segments are trained.

    Returns:
        None for a member without scores, or with one that is not among ``scored``.
    """
    if not any(event_ids):
        return [None] * len(event_ids)
    ordered = scored.sort_by("log_offset")
    struct = ordered["teacher_scored"].combine_chunks()
    row_of: dict[str, int] = {}
    for row, event_id in enumerate(ordered["event_id"].to_pylist()):
        row_of.setdefault(event_id, row)
    starts = pc.struct_field(struct, "start_position").to_pylist()
    lists = [_flat(pc.struct_field(struct, name)) for name in _LISTS]
    found: list[int | None] = []
    for ids in event_ids:
        if not ids or any(event_id not in row_of for event_id in ids):
            found.append(None)
            continue
        hasher = hashlib.sha256(_DOMAIN)
        for row in (row_of[event_id] for event_id in ids):
            hasher.update(f"\n{starts[row]}".encode())
            for values, bounds in lists:
                part = values[bounds[row] : bounds[row + 1]]
                hasher.update(f" {len(part)} ".encode())
                hasher.update(part.data)
        found.append(int.from_bytes(hasher.digest()[:8], "big", signed=True))
    return found


def _flat(lists: pa.ListArray) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
    """Values of all rows, one after another, and their bounds; a null row has none."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    values = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
