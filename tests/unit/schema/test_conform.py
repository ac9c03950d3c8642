"""Reading what was written elsewhere: evolved schemas, other spellings, long lists, slices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.arrow_bits import same_bits
from tests.schema_events import action_batch

from rolltape.schema.align import conforming, fit_array, list_parts
from rolltape.schema.columns import INT32, list_of
from rolltape.schema.conform import conform
from rolltape.schema.errors import UnknownKindError, ValidationError
from rolltape.schema.layout import column_of
from rolltape.schema.render import arrow_schema


def conformed(array: pa.Array, target: pa.DataType) -> pa.Array:
    return conforming(array.type, target, "x")(array)


V1 = pa.struct([("a", pa.int32()), ("b", pa.string()), ("c", pa.list_(pa.int32()))])
V2 = pa.struct([("a", pa.int32()), ("b", pa.string()), ("c", pa.list_(pa.int32())), ("d", pa.float64())])


def test_an_old_reader_ignores_a_new_field_and_a_new_one_reads_null() -> None:
    """Case D21."""
    new = pa.array([{"a": 1, "b": "x", "c": [1], "d": 0.5}, None], V2)
    assert conformed(new, V1).to_pylist() == [{"a": 1, "b": "x", "c": [1]}, None]
    assert conformed(conformed(new, V1), V2).to_pylist() == [{"a": 1, "b": "x", "c": [1], "d": None}, None]


@pytest.mark.parametrize(
    "spelling",
    [
        pa.list_(pa.field("item", pa.int32())),
        pa.list_(pa.field("element", pa.int32())),
        pa.large_list(pa.field("item", pa.int32())),
        pa.list_(pa.int16()),
        pa.list_view(pa.int32()),
        pa.large_list_view(pa.int32()),
    ],
)
def test_both_spellings_of_a_list_are_read(spelling: pa.DataType) -> None:
    """Case D21."""
    array = pa.array([[1, 2], None, [], [3]], spelling)
    result = conformed(array, list_of(INT32))
    assert result.to_pylist() == [[1, 2], None, [], [3]]
    assert result.type == list_of(INT32)
    assert conformed(array.slice(1), list_of(INT32)).to_pylist() == [None, [], [3]]


def test_a_fixed_size_list_is_a_list() -> None:
    array = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    assert conformed(array, list_of(INT32)).to_pylist() == [[1, 2], None, [3, 4]]
    assert conformed(array.slice(2), list_of(INT32)).to_pylist() == [[3, 4]]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (pa.int64(), pa.int32()),
        (pa.uint32(), pa.int32()),
        (pa.float64(), pa.float32()),
        (pa.float32(), pa.int32()),
        (pa.int32(), pa.float64()),
        (pa.string(), pa.int32()),
        (pa.int32(), pa.string()),
        (pa.bool_(), pa.int32()),
        (pa.timestamp("ns", tz="UTC"), pa.timestamp("us", tz="UTC")),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
        (pa.list_(pa.int64()), pa.list_(pa.int32())),
        (pa.int32(), pa.list_(pa.int32())),
        (pa.int32(), V1),
        (pa.struct([("a", pa.int64())]), V1),
        (pa.binary(), pa.string()),
    ],
)
def test_narrowing_is_refused_whatever_the_values(source: pa.DataType, target: pa.DataType) -> None:
    """Case D21."""
    with pytest.raises(ValidationError, match="expected"):
        conforming(source, target, "x")


@pytest.mark.parametrize(
    ("array", "target"),
    [
        (pa.array([1], pa.int16()), pa.int64()),
        (pa.array([1], pa.uint32()), pa.int64()),
        (pa.array([0.5], pa.float32()), pa.float64()),
        (pa.array(["a"], pa.large_string()), pa.string()),
        (pa.array(["a"], pa.string_view()), pa.string()),
        (pa.array(["a"]).dictionary_encode(), pa.string()),
        (pa.array([b"a"], pa.large_binary()), pa.binary()),
        (pa.array([None], pa.null()), pa.string()),
        (pa.array([1], pa.timestamp("ms", tz="UTC")), pa.timestamp("us", tz="UTC")),
    ],
)
def test_widening_and_respelling_keep_values(array: pa.Array, target: pa.DataType) -> None:
    assert conformed(array, target).to_pylist() == array.to_pylist()
    assert conformed(array, target).type == target


def test_fitting_narrows_only_what_fits() -> None:
    assert fit_array(pa.array([1]), pa.int32(), "x").to_pylist() == [1]
    with pytest.raises(ValidationError, match="does not fit"):
        fit_array(pa.array([2**40]), pa.int32(), "x")


@pytest.mark.parametrize("rows", [[[1], [1, 2], [1, 2, 3]], [None, [1], [1, 2], [1, 2, 3]]])
def test_a_sliced_list_has_its_own_values(rows: list[list[int] | None]) -> None:
    """Case D23: after slice, filter and take, row i has exactly its own ids."""
    array = pa.array(rows, pa.list_(pa.int16()))
    for start in range(len(rows)):
        part = array.slice(start)
        assert conformed(part, list_of(INT32)).to_pylist() == rows[start:]
        offsets, values = list_parts(part)
        pieces = [values[a:b].to_pylist() for a, b in pairwise(offsets)]
        assert pieces == [row or [] for row in rows[start:]]
    keep = pa.array([at % 2 == 1 for at in range(len(rows))])
    assert conformed(array.filter(keep), list_of(INT32)).to_pylist() == rows[1::2]


def test_slices_of_structs_and_nested_lists() -> None:
    type_ = pa.list_(pa.struct([("start", pa.int16()), ("length", pa.int16())]))
    rows = [[{"start": 0, "length": 1}], None, [{"start": 5, "length": 2}, None], []]
    target = list_of(pa.struct([("start", pa.int32()), ("length", pa.int32()), ("more", pa.string())]))
    result = conformed(pa.array(rows, type_).slice(1), target)
    assert result.to_pylist() == [None, [{"start": 5, "length": 2, "more": None}, None], []]


def test_a_list_too_long_for_its_offsets_is_an_error_with_a_reason() -> None:
    """Case D22: a null child has no buffer, so this costs no memory."""
    length = 2**31 + 10
    array = pa.LargeListArray.from_arrays(pa.array([0, length], pa.int64()), pa.nulls(length))
    with pytest.raises(ValidationError, match="int32 offsets"):
        conformed(array, list_of(INT32))


def test_chunks_whose_lists_sum_to_over_two_billion_values_stay_chunks() -> None:
    """Case D22: one buffer, many chunks, no copy."""
    values = pa.array(np.zeros(2**22, np.int32))
    lists = pa.ListArray.from_arrays(pa.array([0, 2**22], pa.int32()), values, type=list_of(INT32))
    num_chunks = 2**31 // 2**22 + 1
    struct = pa.nulls(1, arrow_schema("action_sampled").field("action_sampled").type)
    table = pa.table(
        {
            "kind": pa.chunked_array([pa.array(["action_sampled"])] * num_chunks),
            "token_ids": pa.chunked_array([lists] * num_chunks),
            "action_sampled": pa.chunked_array([struct] * num_chunks),
        }
    )
    before = pa.total_allocated_bytes()
    result = conform(table, "action_sampled")
    assert pa.total_allocated_bytes() - before < 2**24
    tokens = result.column("token_ids")
    assert tokens.num_chunks == num_chunks
    assert pc.sum(pc.list_value_length(tokens).cast(pa.int64())).as_py() > 2**31


def test_chunks_of_large_lists_are_cut_to_what_offsets_address() -> None:
    half = 2**30 + 1
    offsets = pa.array([0, half, 2 * half, 2 * half], pa.int64())
    lists = pa.LargeListArray.from_arrays(offsets, pa.nulls(2 * half))
    table = pa.table({"token_ids": lists}).slice(2)  # only the empty row: nothing has to be cut, nothing is copied
    assert conform(table, "action_sampled").column("token_ids").to_pylist() == [[]]
    one_row = pa.table({"token_ids": pa.LargeListArray.from_arrays(pa.array([0, 2 * half]), pa.nulls(2 * half))})
    with pytest.raises(ValidationError, match="one row holds"):
        conform(one_row, "action_sampled")


def test_what_has_the_schema_already_is_returned_as_it_is() -> None:
    batch = action_batch(1)
    assert conform(batch, "action_sampled") is batch
    table = pa.Table.from_batches([batch])
    assert conform(table, "action_sampled") is table


def test_absent_columns_are_null_and_unknown_ones_left_out() -> None:
    batch = pa.RecordBatch.from_pydict({"event_id": ["e"], "mood": [1]})
    result = conform(batch, "rollout_ended")
    assert result.schema == arrow_schema("rollout_ended")
    assert column_of(result, "event_id").to_pylist() == ["e"]
    assert column_of(result, "status").to_pylist() == [None]
    assert result.column("rollout_ended").null_count == 0


def test_tables_and_empty_ones() -> None:
    empty = pa.table({"event_id": pa.array([], pa.string())})
    assert conform(empty, "rollout_ended").schema == arrow_schema("rollout_ended")
    batch = action_batch(3)
    parts = pa.Table.from_batches([batch.slice(0, 1), batch.slice(1)]).drop_columns(["tenant"])
    result = conform(parts, "action_sampled")
    assert same_bits(result.combine_chunks().to_batches()[0], batch)


def test_the_column_that_cannot_be_read_is_named() -> None:
    batch: Any = pa.RecordBatch.from_pydict({"attempt": pa.array([1], pa.int64())})
    with pytest.raises(ValidationError, match="rollout_ended: attempt: expected int32, got int64"):
        conform(batch, "rollout_ended")
    with pytest.raises(UnknownKindError):
        conform(batch, "nothing")
