"""Whatever a kind can hold comes back from its bytes, bit for bit; order, slices and chunks change nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arrow_bits import same_bits
from tests.random_events import random_batch
from tests.schema_events import action_batch

from rolltape.schema.build import build_batch
from rolltape.schema.conform import conform
from rolltape.schema.jsonline import from_json_line, to_json_line
from rolltape.schema.kinds import KINDS
from rolltape.schema.layout import column_of
from rolltape.schema.records import Headers, event_ranges, make_record
from rolltape.schema.stream import decode, encode
from rolltape.schema.validate import Limits, validate

FEW = settings(max_examples=25, deadline=None)
EACH_KIND = settings(max_examples=8, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
SPECIAL_BITS = (0x7FC00001, 0xFFC00000, 0x7F800001, 0x00000001, 0x80000000, 0xFF800000, 0x7F800000)
FLOAT_BITS = st.one_of(st.sampled_from(SPECIAL_BITS), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS)
@EACH_KIND
def test_every_kind_comes_back_bit_for_bit(kind: str, seed: int) -> None:
    batch = random_batch(kind, seed)
    assert same_bits(decode(encode(batch), kind=kind), batch)
    for start in range(batch.num_rows):
        assert same_bits(decode(encode(batch.slice(start, 2))), batch.slice(start, 2))


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS)
@EACH_KIND
def test_validation_never_fails_whatever_a_row_holds(kind: str, seed: int) -> None:
    batch = random_batch(kind, seed)
    assert [refusal.row for refusal in validate(batch)] == list(range(batch.num_rows))  # their stamps are random, too


@given(SEEDS, st.data())
@FEW
def test_conforming_another_spelling_changes_no_bit(seed: int, data: st.DataObject) -> None:
    """Columns in any order, large lists and large strings, chunks: as other engines hand the same rows back."""
    batch = random_batch("action_sampled", seed)
    spelled = pa.RecordBatch.from_arrays(
        [column.cast(respelled(column.type)) for column in batch.columns], names=batch.schema.names
    )
    order = data.draw(st.permutations(batch.schema.names))
    assert same_bits(conform(spelled.select(order), "action_sampled"), batch)
    cut = data.draw(st.integers(0, batch.num_rows))
    table = pa.Table.from_batches([spelled.slice(0, cut), spelled.slice(cut)])
    assert same_bits(conform(table, "action_sampled").combine_chunks().to_batches()[0], batch)


def respelled(type_: pa.DataType) -> pa.DataType:
    if pt.is_list(type_):
        return pa.large_list(pa.field("item", respelled(type_.value_type)))
    if pt.is_struct(type_):
        return pa.struct([pa.field(field.name, respelled(field.type)) for field in type_.fields])
    return pa.large_string() if pt.is_string(type_) else type_


ROWS = st.lists(
    st.none() | st.lists(st.integers(-5, 5) | st.sampled_from([2**31, None]), max_size=4), min_size=1, max_size=6
)


@given(ROWS)
@FEW
def test_building_keeps_exactly_the_rows_that_fit(rows: list[list[int | None] | None]) -> None:
    built = build_batch("action_sampled", {"token_ids": rows})
    fit = [at for at, row in enumerate(rows) if row is None or 2**31 not in row]
    assert built.kept_rows.tolist() == fit
    assert column_of(built.batch, "token_ids").to_pylist() == [rows[at] for at in fit]
    assert sorted([*fit, *(refused.row for refused in built.refused)]) == list(range(len(rows)))
    for refused in built.refused:
        assert from_json_line("action_sampled", refused.payload)["token_ids"] == rows[refused.row]


@given(ROWS)
@FEW
def test_lists_and_arrays_build_the_same(rows: list[list[int | None] | None]) -> None:
    clean = [None if row is None else [id_ for id_ in row if id_ is not None and id_ < 2**31] for row in rows]
    ragged = [None if row is None else np.array(row, np.int64) for row in clean]
    one, other = (build_batch("action_sampled", {"token_ids": ids}).batch for ids in (clean, ragged))
    assert same_bits(one, other)


@given(st.lists(st.lists(st.integers(-2, 12), max_size=5), min_size=1, max_size=8), st.data())
@FEW
def test_validation_is_the_same_for_rows_and_batches(rows: list[list[int]], data: st.DataObject) -> None:
    """A row is refused for what it holds, never for its neighbours; a slice is judged like its rows."""
    lengths = [len(row) + data.draw(st.integers(0, 1)) for row in rows]
    batch = action_batch(len(rows), token_ids=rows, rollout_log_probs=[[-1.0] * length for length in lengths])
    limits = Limits(vocab_size=10)
    found = {refusal.row: refusal.reason for refusal in validate(batch, limits)}
    alone = {row: [item.reason for item in validate(batch.slice(row, 1), limits)] for row in range(len(rows))}
    assert found == {row: reasons[0] for row, reasons in alone.items() if reasons}
    good = {row for row, ids in enumerate(rows) if all(0 <= id_ < 10 for id_ in ids) and lengths[row] == len(ids)}
    assert set(range(len(rows))) - set(found) == good


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=12, unique=True
    )
)
@FEW
def test_event_ranges_cover_exactly_the_events(events: list[tuple[str, int, int]]) -> None:
    trajectories, attempts, indexes = (list(column) for column in zip(*events, strict=True))
    batch = action_batch(len(events), trajectory_id=trajectories, attempt=attempts, event_index=indexes)
    ranges = event_ranges(batch)
    covered = [(r.trajectory_id, r.attempt, index) for r in ranges for index in range(r.first, r.last + 1)]
    assert sorted(covered) == sorted(events)
    headers = make_record(batch).headers
    assert Headers.from_pairs(headers.to_pairs()) == headers


@given(st.dictionaries(st.sampled_from(["text", "finish_reason"]), st.text() | st.none()), st.lists(FLOAT_BITS))
@FEW
def test_json_lines_keep_what_json_can_hold(texts: dict[str, str | None], bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    row = from_json_line("action_sampled", to_json_line({**texts, "rollout_log_probs": values}))
    back = np.array(row.pop("rollout_log_probs"), np.float32)
    assert row == texts
    finite = ~np.isnan(values)
    assert (np.isnan(back) == np.isnan(values)).all()
    assert (back[finite].view(np.uint32) == values[finite].view(np.uint32)).all()
