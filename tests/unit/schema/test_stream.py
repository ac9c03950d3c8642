"""Records as bytes: what comes back, and what is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc
from tests.arrow_bits import same_bits
from tests.schema_events import action_batch

from rolltape.schema.build import with_columns
from rolltape.schema.errors import CodecError, RolltapeError, SchemaVersionError, UnknownKindError
from rolltape.schema.extensions import read_extensions
from rolltape.schema.layout import column_of
from rolltape.schema.stream import decode, encode
from rolltape.schema.trust import trusted_log_probs


def stream_of(batch: pa.RecordBatch) -> bytes:
    """A stream of whatever columns, as a stranger might send it."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def rows(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"kind": ["rollout_ended"], "schema_version": ["1.1"], **columns})


def test_null_and_nan_log_probs_survive() -> None:
    """Case D8: neither becomes 0.0."""
    batch = action_batch(1, token_ids=[[1, 2, 3, 4]], rollout_log_probs=[[-0.1, None, float("nan"), -0.2]])
    decoded = decode(encode(batch))
    assert same_bits(decoded, batch)
    values = column_of(decoded, "rollout_log_probs").flatten()
    assert values.is_valid().to_pylist() == [True, False, True, True]
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    assert trusted_log_probs(values.to_numpy(zero_copy_only=False), valid).tolist() == [True, False, False, True]


def test_infinities_and_sentinels_survive() -> None:
    """Case D9."""
    values = [float("-inf"), -9999.0, -100.0, -1e-7]
    batch = action_batch(1, token_ids=[[1, 2, 3, 4]], rollout_log_probs=[values])
    decoded = column_of(decode(encode(batch)), "rollout_log_probs").flatten().to_numpy()
    assert decoded.tolist() == np.array(values, np.float32).tolist()
    assert trusted_log_probs(decoded).tolist() == [False, False, True, True]
    assert trusted_log_probs(decoded, sentinels=(-9999.0, -100.0)).tolist() == [False, False, False, True]


def test_a_slice_is_written_as_what_it_shows() -> None:
    """Case D23."""
    batch = action_batch(4, token_ids=[None, [1], [1, 2], [1, 2, 3]], rollout_log_probs=[None] * 4)
    decoded = decode(encode(batch.slice(2)))
    assert column_of(decoded, "token_ids").to_pylist() == [[1, 2], [1, 2, 3]]
    assert len(encode(batch.slice(2, 1))) <= len(encode(batch))


def test_what_is_null_everywhere_costs_nothing() -> None:
    batch = action_batch(1)
    with ipc.open_stream(encode(batch)) as reader:
        names = reader.schema.names
    assert "tenant" not in names
    assert "action_sampled" not in names  # none of its fields has a value here
    assert same_bits(decode(encode(batch)), batch)


def test_empty_structs_and_lists_are_not_nulls() -> None:
    batch = action_batch(3, sampling=[{}, None, {"seed": 1}], version_runs=[[], None, [{"start": 0, "length": 3}]])
    assert same_bits(decode(encode(batch)), batch)
    batch = action_batch(2, sampling=[{}, None], version_runs=[[], None], token_ids=[[], None], rollout_log_probs=None)
    assert same_bits(decode(encode(batch)), batch)


def test_any_truncation_is_found() -> None:
    value = encode(action_batch(3)).to_pybytes()
    for length in (*range(0, len(value), 97), len(value) - 1, len(value) - 8):
        with pytest.raises(CodecError):
            decode(value[:length])


def test_damaged_bytes_never_crash() -> None:
    """Flipping any one byte gives an error of ours or readable rows, never anything else."""
    value = encode(action_batch(2)).to_pybytes()
    for at in range(0, len(value) - 8, 41):
        damaged = bytearray(value)
        damaged[at] ^= 0xFF
        with contextlib.suppress(RolltapeError):
            decode(bytes(damaged))


def test_the_kind_is_the_rows_own() -> None:
    with pytest.raises(UnknownKindError):
        decode(stream_of(rows(kind=["rollout_vanished"])))
    with pytest.raises(CodecError, match="expected a record of kind"):
        decode(stream_of(rows()), kind="rollout_started")
    with pytest.raises(CodecError, match="one kind"):
        decode(stream_of(pa.RecordBatch.from_pydict({"schema_version": ["1.1"]})))
    two = pa.RecordBatch.from_pydict({"kind": ["rollout_ended", "rollout_started"], "schema_version": ["1.1", "1.1"]})
    with pytest.raises(CodecError, match="one kind"):
        decode(stream_of(two))
    assert decode(stream_of(rows()), kind="rollout_ended").num_rows == 1


@pytest.mark.parametrize("version", ["2.0", "0.9", "1", "", "1.x", None])
def test_other_major_versions_are_refused(version: str | None) -> None:
    with pytest.raises(SchemaVersionError):
        decode(stream_of(rows(schema_version=pa.array([version], pa.string()))))


def test_a_record_has_rows() -> None:
    with pytest.raises(CodecError, match="at least one row"):
        encode(action_batch(1).slice(0, 0))
    with pytest.raises(CodecError, match="at least one row"):
        decode(stream_of(rows().slice(0, 0)))


def test_several_batches_in_one_stream_are_one_record() -> None:
    batch = action_batch(3)
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch.slice(0, 1))
        writer.write_batch(batch.slice(1))
    assert same_bits(decode(sink.getvalue()), batch)


def test_broken_text_is_left_for_validation() -> None:
    text = pa.array([b"\xff", "fine"], pa.binary()).cast(pa.string(), safe=False)
    decoded = decode(encode(with_columns(action_batch(2), {"text": text})))
    assert column_of(decoded, "text")[1].as_py() == "fine"


def test_a_newer_minor_is_read_and_the_unknown_kept() -> None:
    batch = action_batch(2, schema_version="1.9", sampling={"temperature": 1.0}, finish_reason="stop")
    struct = batch.column("action_sampled")
    fields = [struct.type.field(at) for at in range(struct.type.num_fields)]
    sampling = struct.field("sampling")
    newer_sampling = pa.StructArray.from_arrays(
        [*sampling.flatten(), pa.array([0.5, 0.5])], names=[*(f.name for f in sampling.type.fields), "mirostat"]
    )
    arrays = [newer_sampling if f.name == "sampling" else struct.field(f.name) for f in fields]
    newer_struct = pa.StructArray.from_arrays(
        [*arrays, pa.array([None, "deep"])], names=[*(f.name for f in fields), "thought"]
    )
    newer = pa.RecordBatch.from_arrays(
        [*batch.columns[:-1], pa.array([1, None], pa.int64()), newer_struct],
        names=[*batch.schema.names[:-1], "mood", "action_sampled"],
    )
    decoded = decode(stream_of(newer))
    assert column_of(decoded, "finish_reason").to_pylist() == ["stop", "stop"]
    assert column_of(decoded, "sampling")[0].as_py()["temperature"] == 1.0
    kept = [read_extensions(value).to_pylist()[0] for value in column_of(decoded, "extensions").to_pylist()]
    assert kept[0]["mood"] == 1
    assert kept[0]["action_sampled.sampling"]["mirostat"] == 0.5
    assert set(kept[1]) == {"action_sampled.sampling", "action_sampled.thought"}
    assert kept[1]["action_sampled.thought"] == "deep"
    assert same_bits(decode(encode(decoded)), decoded)


def test_a_newer_minor_without_anything_unknown_has_no_extensions() -> None:
    decoded = decode(encode(action_batch(1, schema_version="1.9")))
    assert column_of(decoded, "extensions").null_count == 1


def test_an_unknown_column_is_kept_whatever_the_version() -> None:
    decoded = decode(stream_of(rows(mood=[7])))
    (value,) = column_of(decoded, "extensions").to_pylist()
    assert read_extensions(value).to_pylist() == [{"mood": 7}]


def test_extensions_that_cannot_be_read_are_named() -> None:
    with pytest.raises(CodecError, match="one-row"):
        read_extensions(b"nothing")
