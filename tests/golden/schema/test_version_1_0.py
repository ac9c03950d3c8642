"""What a producer of schema version 1.0 wrote is read today, from files that never change."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyarrow import ipc
from tests.arrow_bits import bits_of, same_bits

from rolltape.schema.build import with_columns
from rolltape.schema.conform import conform
from rolltape.schema.layout import column_of
from rolltape.schema.stream import decode, encode
from rolltape.schema.validate import validate

FOLDER = Path(__file__).parents[2] / "data" / "schema_1_0"


def stored(kind: str) -> bytes:
    return (FOLDER / f"{kind}.arrows").read_bytes()


def old_table(kind: str) -> pa.Table:
    with ipc.open_stream(stored(kind)) as reader:
        return reader.read_all()


def test_one_stamp_becomes_a_run_of_versions() -> None:
    batch = decode(stored("action_sampled"))
    run = {"start": 0, "length": 3, "policy_id": "actor", "run_epoch": 2, "version": 4, "weights_digest": None}
    # An empty action has no token to stamp, and an unknown version stays unknown.
    assert column_of(batch, "version_runs").to_pylist() == [[run], None, None]


def test_everything_else_is_as_it_was() -> None:
    batch = decode(stored("action_sampled"))
    assert column_of(batch, "schema_version").to_pylist() == ["1.0"] * 3
    assert column_of(batch, "token_ids").to_pylist() == [[11, 12, 13], [], [14]]
    old = old_table("action_sampled").column("rollout_log_probs").chunk(0)
    assert bits_of(column_of(batch, "rollout_log_probs").flatten()) == bits_of(old.flatten())
    assert column_of(batch, "finish_reason").to_pylist() == [None, "stop", None]
    assert column_of(batch, "sampling")[0].as_py()["logprobs_mode"] == "processed_logprobs"
    assert column_of(batch, "extensions").null_count == 3
    assert validate(batch) == []


def test_the_prompt_has_another_name() -> None:
    batch = decode(stored("rollout_started"))
    assert column_of(batch, "prompt_text").to_pylist() == ["sort 312", None, None]
    assert column_of(batch, "prompt_token_ids").to_pylist() == [[3, 1, 2], [1], None]
    assert validate(batch) == []


def test_what_is_upcast_once_passes_through() -> None:
    for kind in ("action_sampled", "rollout_started"):
        batch = decode(stored(kind))
        assert same_bits(decode(encode(batch)), batch)
        assert conform(batch, kind) is batch


def test_tables_are_upcast_chunk_by_chunk() -> None:
    """As a reader of a file meets them."""
    for kind in ("action_sampled", "rollout_started"):
        old = old_table(kind)
        parts = pa.concat_tables([old.slice(2), old.slice(0, 2)])
        result = conform(parts, kind).combine_chunks().to_batches()[0].take(pa.array([1, 2, 0]))
        assert same_bits(result, decode(stored(kind)))
        assert conform(old.slice(0, 0), kind).num_rows == 0


def test_a_stamp_of_an_action_without_ids_covers_nothing() -> None:
    old = old_table("action_sampled").drop_columns(["token_ids", "rollout_log_probs"])
    assert column_of(conform(old, "action_sampled").to_batches()[0], "version_runs").null_count == 3


def test_the_writer_of_today_says_so() -> None:
    batch = with_columns(decode(stored("action_sampled")), {"schema_version": "1.1"})
    assert column_of(decode(encode(batch)), "version_runs")[0].is_valid
