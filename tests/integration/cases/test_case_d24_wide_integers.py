"""Case D24: integers beyond int64 come back exactly or are refused by name; they never become floats.

Reported elsewhere: sums written as DOUBLE, uint64 mis-typed through Arrow, wide integers turned negative.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rolltape.ingest import Recorder, open_log
from rolltape.store.lake import Lake

ABOVE = 2**63 + 1
LARGEST = 2**64 - 1


def seeds(value: Any) -> dict[str, Any]:
    return {"trajectory_id": ["t"], "attempt": 0, "token_ids": [[1]], "sampling": [{"seed": value}]}


@pytest.mark.parametrize("value", [ABOVE, LARGEST, np.uint64(ABOVE), np.uint64(LARGEST), -(2**63) - 1])
def test_case_d24_a_wide_integer_is_refused_by_name_with_its_digits(tmp_path: Path, value: int | np.uint64) -> None:
    lake = Lake.create(tmp_path / "lake")
    with open_log(str(tmp_path / "lake")) as log, Recorder(log, producer_id="p", run_id="r") as recorder:
        (refused,) = recorder.record_batch("action_sampled", seeds(value), 1).refused
        assert refused.reason == "bad_value"
        assert "seed" in refused.detail
        recorder.flush("logged")
    (letter,) = lake.sql("SELECT reason, payload FROM dead_letters").rows()
    assert letter["reason"] == "bad_value"
    assert json.loads(letter["payload"])["sampling"]["seed"] == int(value)


@pytest.mark.parametrize("make", [lambda values: pa.array(values, pa.uint64()), lambda values: np.array(values, "u8")])
def test_case_d24_a_column_of_unsigned_integers_keeps_what_fits(tmp_path: Path, make: Any) -> None:
    lake = Lake.create(tmp_path / "lake")
    with open_log(str(tmp_path / "lake")) as log, Recorder(log, producer_id="p", run_id="r") as recorder:
        columns = {"policy_id": "policy", "policy_run_epoch": 1, "version": make([2**63 - 1, ABOVE, LARGEST])}
        refused = recorder.record_batch("weights_aborted", {**columns, "reason": "test"}).refused
        assert [row.row for row in refused if row.reason == "bad_value"] == [1, 2]
        recorder.flush("logged")
    found = lake.sql("SELECT version FROM weights_aborted").arrow()["version"]
    assert (found.type, found.to_pylist()) == (pa.int64(), [2**63 - 1])


def test_case_d24_sums_and_unsigned_answers_are_exact_in_every_form(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    result = lake.sql(
        f"SELECT sum(x) AS total, {LARGEST}::UBIGINT AS largest, {ABOVE}::UBIGINT > {2**63}::UBIGINT AS greater "
        f"FROM (VALUES ({2**63 - 1}::BIGINT), ({2**63 - 1}::BIGINT), (3)) AS t(x)"
    )
    expected = {"total": Decimal(2**64 + 1), "largest": LARGEST, "greater": True}
    table = result.arrow()
    assert table.to_pylist() == [expected]
    assert not any(pa.types.is_floating(field.type) for field in table.schema)
    assert result.polars().to_dicts() == [expected]
    assert result.pandas().to_dict("records") == [expected]

    pq.write_table(table, tmp_path / "answer.parquet")
    again = pq.read_table(tmp_path / "answer.parquet")
    assert again.to_pylist() == [expected]
    assert again.schema.types == table.schema.types


def test_case_d24_unsigned_integers_beside_nulls_stay_integers(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    result = lake.sql(f"SELECT x FROM (VALUES ({LARGEST}::UBIGINT), (NULL), ({ABOVE}::UBIGINT)) AS t(x)")
    assert result.arrow()["x"].to_pylist() == [LARGEST, None, ABOVE]
    assert [int(value) for value in result.pandas()["x"].dropna()] == [LARGEST, ABOVE]
    ordered = result.arrow().take(pc.sort_indices(result.arrow()["x"]))
    assert ordered["x"].to_pylist() == [ABOVE, LARGEST, None]
