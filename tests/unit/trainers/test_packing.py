"""Packing keeps every token's mask, log-prob and version at that token, wherever rows are cut or repeated."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from rolltape.schema.fold_schema import SEGMENT_SCHEMA
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.packing import BatchBuilder, FlatSegments

COLUMNS = ("prompt_token_ids", "response_token_ids", "response_mask", "rollout_log_probs", "policy_versions")
ROWS = [
    # action, action, observation, action; then a row that ends in an observation; then an empty response
    ([1, 2], [20, 21, 30, 22], [True, True, False, True], [-0.1, -0.2, None, -0.4], [3, 3, -1, 4]),
    ([5], [40, 31, 32], [True, False, False], [None, None, None], [4, -1, -1]),
    ([6, 7, 8], [], [], [], []),
    ([], [50], [False], [None], [-1]),
]


def segments() -> pa.Table:
    fields = [SEGMENT_SCHEMA.field(name) for name in COLUMNS]
    columns = [pa.array([row[i] for row in ROWS], field.type) for i, field in enumerate(fields)]
    return pa.table(columns, pa.schema(fields))


def packed(table: pa.Table, rows: list[int]) -> PackedBatch:
    builder = BatchBuilder()
    builder.add(FlatSegments.of(table), rows, list(range(len(rows))))
    count = len(rows)
    return builder.finish(rewards=[0.0] * count, groups=[0] * count, is_padding=[False] * count)


def test_masks_log_probs_and_versions_stay_at_their_tokens() -> None:
    batch = packed(segments(), [0, 1])
    assert batch.token_ids.tolist() == [1, 2, 20, 21, 30, 22, 5, 40, 31, 32]
    assert batch.cu_seqlens.tolist() == [0, 6, 10]
    assert batch.context_lengths.tolist() == [2, 1]
    assert batch.action_mask.tolist() == [False, False, True, True, False, True, False, True, False, False]
    assert batch.policy_versions.tolist() == [-1, -1, 3, 3, -1, 4, -1, 4, -1, -1]
    log_probs = batch.rollout_log_probs
    assert torch.isnan(log_probs).tolist() == [False] * 7 + [True, False, False]
    expected = torch.tensor([0, 0, -0.1, -0.2, 0, -0.4, 0, 0, 0, 0])
    assert torch.equal(torch.nan_to_num(log_probs, nan=0.0), expected)


def test_rows_in_any_order_and_repeated() -> None:
    batch = packed(segments(), [1, 0, 1])
    once, other = packed(segments(), [1]), packed(segments(), [0])
    for name in ("token_ids", "action_mask", "policy_versions"):
        parts = [getattr(once, name), getattr(other, name), getattr(once, name)]
        assert torch.equal(getattr(batch, name), torch.cat(parts)), name


def test_sliced_and_chunked_tables_pack_alike() -> None:
    table = segments()
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    sliced = pa.concat_tables([table, table]).combine_chunks().slice(4)
    for other in (chunked, sliced):
        batch, expected = packed(other, [0, 1]), packed(table, [0, 1])
        for name in ("token_ids", "action_mask", "policy_versions", "cu_seqlens"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name


def test_which_rows_have_something_to_train() -> None:
    assert FlatSegments.of(segments()).has_action().tolist() == [True, True, False, False]
    assert FlatSegments.of(segments().slice(2)).has_action().tolist() == [False, False]
    assert FlatSegments.of(segments().slice(0, 0)).has_action().tolist() == []


def test_parts_grow_one_batch() -> None:
    builder = BatchBuilder()
    for row in (0, 1):
        builder.add(FlatSegments.of(segments()), [row], [row])
    batch = builder.finish(rewards=[0.5, 1.0], groups=[0, 0], is_padding=[False, True])
    whole = packed(segments(), [0, 1])
    for name in ("token_ids", "action_mask", "policy_versions", "cu_seqlens", "context_lengths"):
        assert torch.equal(getattr(batch, name), getattr(whole, name)), name
    assert batch.rewards.dtype == torch.float64
    assert batch.is_padding.tolist() == [False, True]
    assert np.array_equal(batch.row_of_token().numpy(), [0] * 6 + [1] * 4)
