"""Merging data files: the same rows as one file of all of them, in memory that does not grow with them."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltape.schema.errors import StoreError
from rolltape.schema.render import arrow_schema
from rolltape.store import Lake, merging, parquet
from rolltape.store.maintenance import compact
from rolltape.store.merging import merge_files

KIND = "action_sampled"


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small, files are merged row group by row group."""
    monkeypatch.setattr(merging, "STREAMED_BYTES", 0)
    monkeypatch.setattr(merging, "_BUFFERED_BYTES", 64 << 10)


def actions(offsets: list[int], *, tokens: int, partitions: int = 1, log_probs: bool = True, seed: int = 7) -> pa.Table:
    """Two rows for each offset, of partitions by turns; the second of each two has no run in its sampling."""
    rng = np.random.default_rng(seed)
    places = np.repeat(offsets, 2)
    num_rows = len(places)
    ends = np.arange(num_rows + 1, dtype=np.int32) * tokens
    ids = rng.integers(0, 50_000, num_rows * tokens, dtype=np.int32)
    probs = rng.standard_normal(num_rows * tokens).astype(np.float32)
    columns: dict[str, Any] = {
        "event_id": [f"e{offset}-{row}" for row, offset in enumerate(places)],
        "kind": [KIND] * num_rows,
        "run_id": ["run"] * num_rows,
        "trajectory_id": [f"t{offset}" for offset in places],
        "log_topic": ["rollout"] * num_rows,
        "log_partition": pa.array(places % partitions, pa.int32()),
        "log_offset": pa.array(places, pa.int64()),
        "token_ids": pa.ListArray.from_arrays(pa.array(ends), pa.array(ids)),
    }
    if log_probs:
        columns["rollout_log_probs"] = pa.ListArray.from_arrays(pa.array(ends), pa.array(probs))
    return parquet.conform_columns(pa.table(columns), KIND)


def append(lake: Lake, *tables: pa.Table) -> None:
    for table in tables:
        last = lake.snapshot().transactions.get("log/rollout/0", -1)
        lake.append({KIND: table}, {"log/rollout/0": last + 1})


def in_order(table: pa.Table) -> pa.Table:
    return merging.in_log_order(table).combine_chunks()


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_streamed_merge_writes_what_one_in_memory_does(lake: Lake, partitions: int) -> None:
    tables = [actions(list(range(at, at + 300)), tokens=5, partitions=partitions) for at in (0, 300, 600)]
    append(lake, *tables)
    before = lake.read(KIND)
    expected = lake.write_files({KIND: in_order(before)})[0]
    done = compact(lake)
    (file,) = lake.snapshot().files_of(KIND)
    assert len(done.removed) == 3
    assert lake.read(KIND).combine_chunks() == in_order(before)
    assert {**vars_of(file), "path": ""} == {**vars_of(expected.file), "path": "", "size_bytes": file.size_bytes}
    ours, whole = (pq.read_metadata(lake.table.child(path).path) for path in (file.path, expected.file.path))
    assert [ours.row_group(at).num_rows for at in range(ours.num_row_groups)] == [
        whole.row_group(at).num_rows for at in range(whole.num_row_groups)
    ]
    assert layout_of(ours) == layout_of(whole)


def vars_of(file: Any) -> dict[str, Any]:
    return {name: getattr(file, name) for name in file.__dataclass_fields__}


def layout_of(footer: pq.FileMetaData) -> dict[str, tuple[Any, ...]]:
    """How each column is encoded and compressed."""
    columns = [footer.row_group(0).column(at) for at in range(footer.num_columns)]
    return {column.path_in_schema: (column.compression, *sorted(column.encodings)) for column in columns}


@pytest.mark.usefixtures("streamed")
def test_floats_that_one_file_lacks_are_not_split(lake: Lake) -> None:
    # parquet-java 1.12 fails on a null in a split page.
    append(lake, actions([0, 1], tokens=4), actions([2, 3], tokens=4, log_probs=False))
    before = lake.read(KIND)
    compact(lake)
    (file,) = lake.snapshot().files_of(KIND)
    _, *encodings = layout_of(pq.read_metadata(lake.table.child(file.path).path))["rollout_log_probs.list.element"]
    assert "BYTE_STREAM_SPLIT" not in encodings
    assert lake.read(KIND).combine_chunks() == in_order(before)


@pytest.mark.usefixtures("streamed")
def test_rows_that_are_missing_stop_a_merge_and_leave_nothing(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    append(lake, actions([0, 1], tokens=4), actions([2, 3], tokens=4))
    run = lake.snapshot().files_of(KIND)
    names = {path.name for path in pathlib.Path(lake.table.path).iterdir()}
    whole = merging._whole_groups

    def cut(kind: str, parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for table in whole(kind, parts):
            yield table.slice(1)

    monkeypatch.setattr(merging, "_whole_groups", cut)
    with pytest.raises(StoreError, match="expected 8 rows of action_sampled in 2 data files, read 7"):
        merge_files(lake, run)
    assert {path.name for path in pathlib.Path(lake.table.path).iterdir()} == names


def test_a_merge_takes_as_much_memory_as_a_few_row_groups(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    # 128 MB decoded; a row group is 4 MB.
    append(lake, *(actions(list(range(at, at + 64)), tokens=16_000) for at in range(0, 512, 64)))
    run = lake.snapshot().files_of(KIND)
    assert sum(file.size_bytes for file in run) > merging.STREAMED_BYTES
    before = pa.total_allocated_bytes()
    highest = [0]
    write = parquet.write_groups

    def noted(writer: pq.ParquetWriter, kind: str, table: pa.Table) -> None:
        write(writer, kind, table)
        highest[0] = max(highest[0], pa.total_allocated_bytes() - before)

    monkeypatch.setattr(parquet, "write_groups", noted)
    merged = merge_files(lake, run)
    assert merged.file.num_rows == 1024
    assert 0 < highest[0] < 40 << 20


def test_files_of_interleaved_partitions_are_decoded_once_a_partition(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "STREAMED_BYTES", 0)
    append(lake, *(actions(list(range(at, at + 100)), tokens=2, partitions=2) for at in (0, 100)))
    decoded: list[Any] = []
    read = parquet.read_groups

    def counted(file: Any, kind: str, columns: Any = None, groups: Any = None, **options: Any) -> pa.Table:
        decoded.extend(groups or ())
        return read(file, kind, columns, groups, **options)

    monkeypatch.setattr(parquet, "read_groups", counted)
    merge_files(lake, lake.snapshot().files_of(KIND))
    assert len(decoded) == 2 * 2


def test_schema_is_whole() -> None:
    assert parquet.schema_of(KIND, arrow_schema(KIND).names) == arrow_schema(KIND)
    assert parquet.schema_of(KIND, {"kind", "of_tomorrow"}).names == ["kind"]
