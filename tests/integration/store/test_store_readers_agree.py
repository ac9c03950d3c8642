"""Other readers of the same table: Delta Kernel, delta-rs and Polars see what Rolltape sees, bit for bit.

Delta Kernel is found through ``ROLLTAPE_DELTA_KERNEL_HOME``; where that is not set, the test run's summary says so.
"""

from __future__ import annotations

import pathlib
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.lake_readers import assert_agree

from rolltape.ingest.importers import import_file
from rolltape.schema.kinds import KINDS
from rolltape.schema.render import arrow_schema
from rolltape.store import Lake
from rolltape.store.maintenance import checkpoint, clean_logs, compact, vacuum

DATA = pathlib.Path(__file__).parents[2] / "data"


def sample(type_: pa.DataType) -> Any:
    """Some value of a type of the specs."""
    if pa.types.is_struct(type_):
        return {field.name: sample(field.type) for field in type_.fields}
    if pa.types.is_list(type_):
        return [sample(type_.value_type)] * 2
    if pa.types.is_timestamp(type_):
        return datetime(2026, 11, 30, tzinfo=UTC)
    plain = {pa.string(): "x", pa.binary(): b"\x00\xff", pa.bool_(): True, pa.float32(): -0.5, pa.float64(): 0.25}
    return plain.get(type_, 7)


def one_of_each(start: int) -> dict[str, pa.Table]:
    """One event of each kind with every column filled, each the record at its own offset."""
    tables = {}
    for number, kind in enumerate(KINDS):
        schema = arrow_schema(kind)
        row = {field.name: sample(field.type) for field in schema}
        row |= {"event_id": f"one-{start + number:06d}", "kind": kind}
        row |= {"log_topic": KINDS[kind].topic, "log_partition": 0, "log_offset": start + number}
        tables[kind] = pa.Table.from_pylist([row], schema=schema)
    return tables


def with_odd_bits(table: pa.Table) -> pa.Table:
    """The table with log-probs that a careless writer changes."""
    odd = np.array([0x80000000, 0x7FC00001, 0xFFC12345, 0x00000001, 0x7F800000, 0xFF800000], np.uint32).view(np.float32)
    rows = [[None, -0.5]] * table.num_rows
    values = pa.array(np.tile(odd, table.num_rows))
    ends = pa.array(np.arange(table.num_rows + 1, dtype=np.int32) * len(odd))
    place = table.column_names.index("rollout_log_probs")
    type_ = table.schema.field(place).type
    lists = pa.ListArray.from_arrays(ends, values, type=type_)
    half = table.num_rows // 2
    return pa.concat_tables(
        [
            table.slice(0, half).set_column(place, table.schema.field(place), lists.slice(0, half)),
            table.slice(half).set_column(place, table.schema.field(place), pa.array(rows[half:], type_)),
        ]
    )


def fill(lake: Lake, feed: Any, num_commits: int) -> None:
    for number in range(num_commits):
        tables, transactions = feed.commit(num_rollouts=6 if number % 5 else 70, num_tokens=6)
        tables["action_sampled"] = with_odd_bits(tables["action_sampled"])
        lake.append(tables, transactions)


@pytest.fixture
def lake(tmp_path: pathlib.Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_readers_agree_before_and_after_maintenance(lake: Lake, feed: Any) -> None:
    path = lake.location.local_path()
    apps = ["lane/p/1/rollout/0", "log/rollout/0", "log/control/0"]
    fill(lake, feed, 6)
    lake.append(one_of_each(1_000), {"log/control/0": 2_000})
    before = assert_agree(path, apps)
    assert before.counts == dict.fromkeys(KINDS, 1) | {"action_sampled": 165, "reward_assigned": 165}
    compact(lake)
    checkpoint(lake)
    assert clean_logs(lake, safe_age_s=0) > 6
    assert vacuum(lake, safe_age_s=-1)
    after = assert_agree(path, apps)
    assert after == before
    fill(lake, feed, 3)
    grown = assert_agree(path, [*apps, "maintenance"])
    assert grown.counts["action_sampled"] == before.counts["action_sampled"] + 82


def test_checkpoint_of_a_lake_without_compaction_is_read(lake: Lake, feed: Any) -> None:
    fill(lake, feed, 4)
    checkpoint(lake)
    clean_logs(lake, safe_age_s=0)
    fill(lake, feed, 2)
    assert_agree(lake.location.local_path(), ["log/rollout/0"])


def test_readers_agree_on_recorded_rollouts(lake: Lake) -> None:
    import_file(lake, str(DATA / "nemogym" / "cc_rollouts_with_logprobs.jsonl"))
    path = lake.location.local_path()
    apps = sorted(app for app in lake.snapshot().transactions if app.startswith("log/"))
    before = assert_agree(path, apps)
    values = pa.concat_arrays([chunk.flatten() for chunk in lake.read("action_sampled")["rollout_log_probs"].chunks])
    assert len(values) == 5_023
    assert int((values.to_numpy() == 0.0).sum()) == 914
    compact(lake)
    checkpoint(lake)
    clean_logs(lake, safe_age_s=0)
    assert assert_agree(path, apps) == before
