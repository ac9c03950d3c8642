"""Leaving out nulls: what is remembered between batches never mixes them up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from tests.arrow_bits import same_bits
from tests.schema_events import action_batch

from rolltape.schema.build import with_columns
from rolltape.schema.layout import columns_of
from rolltape.schema.prune import pruner_of
from rolltape.schema.records import make_record
from rolltape.schema.stream import decode, encode
from rolltape.schema.validate import validate


def test_only_fields_with_a_value_remain() -> None:
    batch = action_batch(2, sampling=[{"seed": 1}, None], version_runs=[[{"start": 0, "length": 3}], []])
    pruned = pruner_of("action_sampled").prune(batch)
    own = pruned.schema.field("action_sampled").type
    assert [field.name for field in own.fields] == ["version_runs", "sampling"]
    assert [field.name for field in own.field("sampling").type.fields] == ["seed"]
    assert [field.name for field in own.field("version_runs").type.value_type.fields] == ["start", "length"]


def test_the_columns_of_one_batch_are_not_anothers() -> None:
    one, other = action_batch(1, text="one"), action_batch(1, text="other")
    for batch, text in ((one, "one"), (other, "other"), (one, "one")):
        assert columns_of(batch).children[0] is columns_of(batch).children[0]
        assert decode(encode(batch)).column("action_sampled")[0].as_py()["text"] == text
    part = action_batch(3).slice(1, 1)
    assert columns_of(part).top[0].to_pylist() == part.column(0).to_pylist()


def test_a_struct_that_is_null_in_some_rows_stays_so() -> None:
    batch = action_batch(2, text=["a", "b"])
    struct = batch.column("action_sampled")
    holed = pa.StructArray.from_arrays(struct.flatten(), fields=list(struct.type.fields), mask=pa.array([True, False]))
    batch = pa.RecordBatch.from_arrays([*batch.columns[:-1], holed], schema=batch.schema)
    assert same_bits(decode(encode(batch)), batch)


def test_more_sets_of_fields_than_are_remembered() -> None:
    """The schemas of the first few hundred are kept, the others made anew: the bytes say the same."""
    rng = np.random.default_rng(0)
    names = ["tenant", "subject_id", "problem_id", "root_rollout_id", "parent_event_id", "text", "thinking_mode"]
    names += ["finish_reason", "continues_event_id", "action_kind"]
    for _ in range(300):
        chosen = [name for name in names if rng.random() < 0.5]
        batch = action_batch(1, **dict.fromkeys(chosen, "execution"))
        assert same_bits(decode(encode(batch)), batch)


def test_threads_do_not_get_each_others_rows() -> None:
    def work(number: int) -> bool:
        batch = action_batch(2, sampling={"seed": number}, text=str(number), engine={"id": f"e{number}"})
        for step in range(20):
            stamped = with_columns(batch, {"lane_seq": np.array([step, step + 1])})
            if validate(stamped) or not same_bits(decode(make_record(stamped).value), stamped):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
