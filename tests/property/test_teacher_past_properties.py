"""Identity columns alone tell the scoring service what the whole events tell it of an attempt's end and segments."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from tests.property.test_fold_set import SETTINGS, tapes

from rolltape.rollout.teacher_past import identity_columns
from rolltape.rollout.teacher_queue import KINDS
from rolltape.rollout.teacher_units import ended_segments, unread_units
from rolltape.schema.fold import fold

SEGMENT = ("trajectory_id", "attempt", "segment_index")
UNIT = (1, 0, 0)


def told(events: dict[str, pa.Table]) -> tuple[list[dict[str, object]], set[object], list[dict[str, object]]]:
    """Ends, whether an attempt is open, and segments that may be scored."""
    folded = fold(events)
    ends = folded.trajectories.select(["trajectory_id", "attempt", "is_current", "state", "status"])
    open_units = unread_units(folded, lambda trajectory, attempt: (UNIT, int(trajectory[1:]), attempt))
    return ends.to_pylist(), set(open_units), ended_segments(folded).select(SEGMENT).to_pylist()


def bare(kind: str, table: pa.Table) -> pa.Table:
    """The columns and struct fields that the service reads first."""
    names = [name for name in identity_columns(kind) if "." not in name]
    fields = [name.partition(".")[2] for name in identity_columns(kind) if "." in name]
    if not fields:
        return table.select(names)
    struct = table[kind].combine_chunks()
    kept = pa.StructArray.from_arrays([pc.struct_field(struct, name) for name in fields], fields)
    return table.select(names).append_column(kind, kept)


@SETTINGS
@given(tapes())
def test_identity_columns_tell_ends_and_segments(events: dict[str, pa.Table]) -> None:
    whole = {kind: table for kind, table in events.items() if kind in (*KINDS, "dead_letter_redriven")}
    assert told({kind: bare(kind, table) if kind in KINDS else table for kind, table in whole.items()}) == told(whole)
