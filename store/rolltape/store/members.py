"""Content digests of batch members: what a trajectory is trained from, tensor by tensor (design §7).

One definition for the trainer that pins a batch and for ``verify`` and ``replay``, which recompute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.schema.digest import ContentDigests, content_digests

TENSOR_NAMES: Final = {
    "token_ids_digest": "token_ids",
    "log_probs_digest": "rollout_log_probs",
    "masks_digest": "response_mask",
    "versions_digest": "policy_versions",
    "rewards_digest": "reward",
}
"""Digest column of ``batch_formed`` members → the tensor that it covers."""

Key = tuple[str, int]


def member_digests(
    segments: pa.Table, keys: Sequence[Key], rewards: Sequence[float | None]
) -> list[ContentDigests | None]:
    """Content digests of the attempts ``keys`` (trajectory id, attempt), in that order.

    Over all segments of an attempt in segment order: ``token_ids`` are each segment's prompt ids followed by its
    response ids; ``log_probs``, ``versions`` and the stacked ``[response_mask, observation_mask]`` run over the
    responses; ``rewards`` is the one scalar, or empty where there is none.

    Args:
        segments: rows of ``SEGMENT_SCHEMA`` (any order, other attempts may be among them).
        keys: attempts wanted.
        rewards: scalar reward of each, None where missing.

    Returns:
        One entry for each key; None where ``segments`` has no row of it.
    """
    columns = _Columns(segments)
    rows = _rows_by_key(segments)
    return [
        _digests(columns, rows[key], reward) if key in rows else None
        for key, reward in zip(keys, rewards, strict=True)
    ]


class _Columns:
    """The list columns as flat NumPy values and int64 offsets, so that a row is a slice."""

    def __init__(self, segments: pa.Table) -> None:
        self.prompt = _flat(segments["prompt_token_ids"], np.int32)
        self.response = _flat(segments["response_token_ids"], np.int32)
        self.log_probs = _flat(segments["rollout_log_probs"], np.float32)
        self.action = _flat(segments["response_mask"], np.bool_)
        self.observation = _flat(segments["observation_mask"], np.bool_)
        self.versions = _flat(segments["policy_versions"], np.int64)


Flat = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]


def _flat(column: pa.ChunkedArray, dtype: type[np.generic]) -> Flat:
    values: list[npt.NDArray[Any]] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for chunk in column.chunks:
        child = chunk.flatten()  # respects slices and null rows
        lengths.append(chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
        values.append(_values(child, dtype))
    flat = np.concatenate(values) if values else np.zeros(0, dtype)
    offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths) if lengths else lengths, out=offsets[1:])
    return flat, offsets


def _values(child: pa.Array, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Values with 0 under every null: a null log-prob and a missing one are the same absence."""
    if child.null_count:
        child = child.fill_null(0 if dtype is not np.bool_ else False)
    return cast("npt.NDArray[Any]", child.to_numpy(zero_copy_only=False).astype(dtype, copy=False))


def _rows_by_key(segments: pa.Table) -> dict[Key, list[int]]:
    rows: dict[Key, list[tuple[int, int]]] = {}
    names = zip(
        segments["trajectory_id"].to_pylist(),
        segments["attempt"].to_pylist(),
        segments["segment_index"].to_pylist(),
        strict=True,
    )
    for row, (trajectory_id, attempt, index) in enumerate(names):
        rows.setdefault((trajectory_id, attempt), []).append((index, row))
    return {key: [row for _, row in sorted(found)] for key, found in rows.items()}


def _digests(columns: _Columns, rows: Sequence[int], reward: float | None) -> ContentDigests:
    ids = [part for row in rows for part in (_slice(columns.prompt, row), _slice(columns.response, row))]
    masks = np.stack([_joined(columns.action, rows), _joined(columns.observation, rows)])
    return content_digests(
        token_ids=np.concatenate(ids),
        log_probs=_joined(columns.log_probs, rows),
        masks=masks,
        versions=_joined(columns.versions, rows),
        rewards=np.array([] if reward is None else [reward], np.float64),
    )


def _slice(flat: Flat, row: int) -> npt.NDArray[Any]:
    values, offsets = flat
    return values[offsets[row] : offsets[row + 1]]


def _joined(flat: Flat, rows: Sequence[int]) -> npt.NDArray[Any]:
    return np.concatenate([_slice(flat, row) for row in rows])
