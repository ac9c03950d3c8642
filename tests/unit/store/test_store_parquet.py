"""Data files: encodings that keep every bit, row groups, older and newer shapes of the same kind (D21, D23)."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltape.schema.errors import ValidationError
from rolltape.schema.kinds import KINDS
from rolltape.schema.render import arrow_schema
from rolltape.store import parquet
from rolltape.store.location import Location


def read_back(data: pa.Buffer, kind: str, columns: list[str] | None = None) -> pa.Table:
    return parquet.read_groups(pq.ParquetFile(data), kind, columns)


def bits(column: pa.ChunkedArray) -> list[list[int] | None]:
    return [
        None if row is None else np.asarray(row, dtype=np.float32).view(np.uint32).tolist()
        for chunk in column.chunks
        for row in [chunk[i].values if chunk[i].is_valid else None for i in range(len(chunk))]
    ]


def action_table(ids: pa.Array, log_probs: pa.Array) -> pa.Table:
    schema = arrow_schema("action_sampled")
    columns = {"kind": pa.array(["action_sampled"] * len(ids)), "token_ids": ids, "rollout_log_probs": log_probs}
    arrays = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(len(ids), f.type) for f in schema]
    return pa.table(arrays, schema=schema)


@pytest.mark.parametrize("num_rows", [1, 300])
def test_every_bit_pattern_comes_back(num_rows: int) -> None:
    odd = np.array([0x80000000, 0x7FC00001, 0xFFC12345, 0x00000001, 0x7F800000, 0xFF800000, 0], np.uint32)
    values = pa.array(np.tile(odd.view(np.float32), num_rows))
    ends = pa.array(np.arange(num_rows + 1, dtype=np.int32) * len(odd))
    log_probs = pa.ListArray.from_arrays(ends, values)
    table = action_table(pa.ListArray.from_arrays(ends, pa.array(np.arange(len(values), dtype=np.int32))), log_probs)
    back = read_back(parquet.encode_file("action_sampled", table), "action_sampled")
    assert back.schema.equals(arrow_schema("action_sampled"))
    assert bits(back["rollout_log_probs"]) == [odd.tolist()] * num_rows
    assert back["token_ids"].to_pylist() == table["token_ids"].to_pylist()


def test_null_log_probs_stay_null() -> None:
    table = action_table(pa.array([[1, 2, 3], [4], None]), pa.array([[-0.1, None, float("nan")], None, []]))
    back = read_back(parquet.encode_file("action_sampled", table), "action_sampled")
    assert back["token_ids"].to_pylist() == [[1, 2, 3], [4], None]
    first, second, third = back["rollout_log_probs"].to_pylist()
    assert first[1] is None
    assert np.isnan(first[2])
    assert (second, third) == (None, [])


def test_wholly_null_columns_are_left_out_and_read_as_null() -> None:
    table = action_table(pa.array([[1]]), pa.array([[-1.0]]))
    file = pq.ParquetFile(parquet.encode_file("action_sampled", table))
    assert file.schema_arrow.names == ["kind", "token_ids", "rollout_log_probs"]
    assert parquet.read_groups(file, "action_sampled").equals(table)


def test_log_probs_are_byte_stream_split_and_ids_plain() -> None:
    ids = pa.array([list(range(200))] * 100)
    table = action_table(ids, pa.array([[-0.5] * 200] * 100))
    group = pq.ParquetFile(parquet.encode_file("action_sampled", table)).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert "BYTE_STREAM_SPLIT" in columns["rollout_log_probs.list.element"].encodings
    assert not {"RLE_DICTIONARY", "PLAIN_DICTIONARY"} & set(columns["token_ids.list.element"].encodings)
    assert columns["token_ids.list.element"].compression == "ZSTD"


def test_row_groups_hold_at_most_256_rows_and_half_a_million_tokens() -> None:
    lengths = [10] * 600 + [400_000, 400_000, 700_000, 5]
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(ends[-1], np.int32)))
    table = pa.table({"token_ids": ids})
    assert parquet.row_group_ends("action_sampled", table) == [256, 512, 601, 602, 603, 604]
    assert parquet.row_group_ends("reward_assigned", pa.table({"kind": ["x"] * 5_000})) == [4_096, 5_000]


@pytest.mark.parametrize("null_first", [False, True])
def test_rows_of_a_slice_are_its_own(null_first: bool) -> None:
    """D23: the values buffer of a sliced list column starts at the parent's first row."""
    rows: list[list[int] | None] = [[1], [1, 2], [1, 2, 3]]
    if null_first:
        rows[0] = None
    whole = action_table(pa.array(rows), pa.array([None if r is None else [-1.0 * v for v in r] for r in rows]))
    cut = whole.slice(1)
    back = read_back(parquet.encode_file("action_sampled", cut), "action_sampled")
    assert back["token_ids"].to_pylist() == [[1, 2], [1, 2, 3]]
    assert back["rollout_log_probs"].to_pylist() == [[-1.0, -2.0], [-1.0, -2.0, -3.0]]
    assert parquet.row_group_ends("action_sampled", cut) == [2]


def foreign_file(columns: dict[str, pa.Array], *, compliant: bool) -> pq.ParquetFile:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, use_compliant_nested_type=compliant)
    return pq.ParquetFile(sink.getvalue())


@pytest.mark.parametrize("compliant", [False, True])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_both_spellings_of_lists_are_read(make: Any, compliant: bool) -> None:
    file = foreign_file(
        {"kind": pa.array(["action_sampled"]), "token_ids": pa.array([[5, 6]], make(pa.field("item", pa.int32())))},
        compliant=compliant,
    )
    back = parquet.read_groups(file, "action_sampled")
    assert back.schema.equals(arrow_schema("action_sampled"))
    assert back["token_ids"].to_pylist() == [[5, 6]]


def test_older_struct_reads_null_and_newer_field_is_ignored() -> None:
    older_type = pa.struct({"step": pa.int64()})
    newer_type = pa.struct([*KINDS["optimizer_reset"].struct_type.fields, pa.field("of_tomorrow", pa.string())])
    structs = [pa.array([{"step": 3}], older_type), pa.array([{"step": 4, "of_tomorrow": "x"}], newer_type)]
    files = [foreign_file({"optimizer_reset": struct}, compliant=True) for struct in structs]
    rows = [parquet.read_groups(file, "optimizer_reset")["optimizer_reset"][0].as_py() for file in files]
    names = [field.name for field in KINDS["optimizer_reset"].struct_type.fields]
    assert [list(row) for row in rows] == [names, names]
    assert [row["step"] for row in rows] == [3, 4]


def test_narrowing_is_refused_by_name() -> None:
    file = foreign_file({"token_ids": pa.array([[1.5]], pa.list_(pa.float64()))}, compliant=True)
    with pytest.raises(ValidationError, match="token_ids"):
        parquet.read_groups(file, "action_sampled")


def test_dotted_column_decodes_one_field() -> None:
    type_ = KINDS["reward_assigned"].struct_type
    rewards = pa.array([{"scalar": 0.5, "state": "earned"}], type_)
    table = pa.table({"kind": ["reward_assigned"], "reward_assigned": rewards})
    file = pq.ParquetFile(parquet.encode_file("reward_assigned", table))
    back = parquet.read_groups(file, "reward_assigned", ["event_id", "reward_assigned.scalar"])
    assert back.column_names == ["event_id", "reward_assigned"]
    assert back["reward_assigned"][0]["scalar"].as_py() == 0.5
    assert back["reward_assigned"][0]["state"].as_py() is None


def test_open_file_parses_a_footer_once(tmp_path: pathlib.Path) -> None:
    place = Location.parse(tmp_path / "f.parquet")
    place.write_bytes(parquet.encode_file("optimizer_reset", pa.table({"kind": ["optimizer_reset"]})))
    first, second = parquet.open_file(place), parquet.open_file(place)
    assert first.metadata is second.metadata or first.metadata.equals(second.metadata)
    assert second.read().num_rows == 1


def test_footers_are_kept_within_a_bound_of_bytes_and_forgotten_with_their_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file.parquet"
    path.write_bytes(parquet.encode_file("action_sampled", action_table(pa.array([[1]]), pa.array([[-1.0]]))))
    footer = pq.ParquetFile(path).metadata
    kept = parquet._Footers(max_bytes=3 * footer.serialized_size)
    for number in range(10):
        kept.put(f"file-{number}", footer)
    assert [number for number in range(10) if kept.get(f"file-{number}") is not None] == [7, 8, 9]
    kept.drop("file-8")
    kept.put("file-10", footer)
    assert [number for number in range(11) if kept.get(f"file-{number}") is not None] == [7, 9, 10]
