"""Reading events of older minor versions: each changed kind has one upcaster per step.

An upcaster rewrites the kind's struct column as an older producer wrote it into that of the next minor version. It is
recognised by the old field's presence, so data that is upcast already passes through. ``schema_version`` stays what the
producer wrote: it says with which specs, not in which form the event lies here.

Changes so far, 1.0 → 1.1:

* ``action_sampled``: one stamp for the whole action (``policy_version``, ``policy_id``) became ``version_runs``.
* ``rollout_started``: ``prompt`` became ``prompt_text``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.align import rebuild_struct
from rolltape.schema.columns import INT32, STRING
from rolltape.schema.kinds.rollout import VERSION_RUNS_TYPE

Data = TypeVar("Data", pa.RecordBatch, pa.Table)
Upcaster = Callable[[pa.RecordBatch], pa.StructArray]


def upcast(data: Data, kind_name: str) -> Data:
    """``data`` of one kind with the fields of older minor versions rewritten; the same object where there are none."""
    for upcaster in _upcasters_for(data.schema, kind_name):
        data = _rewrite(data, data.schema.get_field_index(kind_name), upcaster)
    return data


def needs_upcast(schema: pa.Schema, kind_name: str) -> bool:
    """Whether data of ``schema`` has fields that only an older minor version of the kind has."""
    return bool(_upcasters_for(schema, kind_name))


def _upcasters_for(schema: pa.Schema, kind_name: str) -> list[Upcaster]:
    index = schema.get_field_index(kind_name)
    fields = [(field, upcaster) for (kind, field), upcaster in UPCASTERS.items() if kind == kind_name]
    if not fields or index < 0:
        return []
    struct = schema.field(index).type
    return [upcaster for field, upcaster in fields if struct.get_field_index(field) >= 0]


def _rewrite(data: Data, index: int, upcaster: Upcaster) -> Data:
    if isinstance(data, pa.RecordBatch):
        struct = upcaster(data)
        return data.set_column(index, pa.field(data.schema.field(index).name, struct.type), struct)
    batches = data.to_batches() or [pa.RecordBatch.from_pylist([], schema=data.schema)]
    return pa.Table.from_batches([_rewrite(batch, index, upcaster) for batch in batches])


def _action_sampled_from_1_0(batch: pa.RecordBatch) -> pa.StructArray:
    struct = batch.column("action_sampled")
    versions = _child(struct, "policy_version")
    policies = _child(struct, "policy_id")
    lengths = _token_counts(batch)
    stamped = pc.and_(versions.is_valid(), pc.greater(lengths, 0))
    rows = pc.indices_nonzero(stamped)
    num_runs = len(rows)
    runs = pa.StructArray.from_arrays(
        [
            pa.array(np.zeros(num_runs, np.int32)),
            lengths.take(rows),
            policies.take(rows),
            batch.column("run_epoch").take(rows),
            versions.take(rows),
            pa.nulls(num_runs, STRING),
        ],
        fields=VERSION_RUNS_TYPE.value_type.fields,
    )
    offsets = np.concatenate(([0], np.cumsum(stamped.to_numpy(zero_copy_only=False), dtype=np.int32)))
    version_runs = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), runs, type=VERSION_RUNS_TYPE, mask=pc.invert(stamped)
    )
    return _replaced(struct, drop=("policy_version", "policy_id"), name="version_runs", values=version_runs)


def _rollout_started_from_1_0(batch: pa.RecordBatch) -> pa.StructArray:
    struct = batch.column("rollout_started")
    return _replaced(struct, drop=("prompt",), name="prompt_text", values=_child(struct, "prompt"))


def _token_counts(batch: pa.RecordBatch) -> pa.Array:
    if batch.schema.get_field_index("token_ids") < 0:
        return pa.array(np.zeros(batch.num_rows, np.int32))
    return pc.fill_null(pc.list_value_length(batch.column("token_ids")), 0).cast(INT32)


def _child(struct: pa.StructArray, name: str) -> pa.Array:
    index = struct.type.get_field_index(name)
    if index < 0:
        return pa.nulls(len(struct), STRING)
    return struct.field(index)


def _replaced(struct: pa.StructArray, *, drop: tuple[str, ...], name: str, values: pa.Array) -> pa.StructArray:
    kept = [(field, struct.field(at)) for at, field in enumerate(struct.type.fields) if field.name not in (*drop, name)]
    fields = [*(field for field, _ in kept), pa.field(name, values.type)]
    return rebuild_struct(struct, [*(array for _, array in kept), values], fields)


UPCASTERS: Final = MappingProxyType(
    {
        ("action_sampled", "policy_version"): _action_sampled_from_1_0,
        ("rollout_started", "prompt"): _rollout_started_from_1_0,
    }
)
"""(kind, field that only the older version has) → the rewrite to the next minor version, oldest step first."""
