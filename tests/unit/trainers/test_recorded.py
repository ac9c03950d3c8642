"""Recorded batches are read part by part: only what the fold needs, as much as memory has room for."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from tests.conftest import Tape

from rolltape.schema.fold import FOLDED_COLUMNS
from rolltape.schema.render import arrow_schema
from rolltape.trainers.assembly import VersionRules
from rolltape.trainers.recorded import FOLDED_KINDS, read_events
from rolltape.trainers.replayed import assemble, room


class Source:
    """A tape that notes what is asked of it."""

    def __init__(self, events: dict[str, pa.Table]) -> None:
        self.events = events
        self.asked: list[tuple[str, Sequence[str] | None]] = []

    def read(self, kind: str, columns: Sequence[str] | None) -> pa.Table:
        self.asked.append((kind, columns))
        return self.events.get(kind, arrow_schema(kind).empty_table())


def test_only_folded_columns_are_read(tape: Tape) -> None:
    tape.rollout("t0")
    source = Source(tape.tables())
    read_events(source.read, whole=("reward_assigned",))
    assert dict(source.asked) == {
        kind: None if kind == "reward_assigned" else FOLDED_COLUMNS[kind] for kind in FOLDED_KINDS
    }


def test_a_kind_that_repeats_an_event_is_read_whole(tape: Tape) -> None:
    tape.rollout("t0")
    events = tape.tables()
    events["rollout_ended"] = pa.concat_tables([events["rollout_ended"]] * 2)
    source = Source(events)
    found = read_events(source.read)
    assert [columns for kind, columns in source.asked if kind == "rollout_ended"] == [
        FOLDED_COLUMNS["rollout_ended"],
        None,
    ]
    assert found["rollout_ended"].num_rows == 2
    assert found["rollout_ended"]["event_id"].num_chunks == 1


def test_parts_shrink_as_the_batch_fills() -> None:
    sizes: list[int] = []
    while sum(sizes) < 4_096:
        sizes.append(room(4_096, sum(sizes)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2
    assert all(size % 64 == 0 for size in sizes)
    assert room(8, 0) == 64


def test_a_failed_read_is_told() -> None:
    def read(ids: Sequence[str]) -> dict[str, pa.Table]:
        raise OSError(f"no {ids[0]}")

    with pytest.raises(OSError, match="no t0"):
        assemble(read, [["t0", "t1"], ["t2"]], VersionRules(current=0, newest=0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100, None])
def test_groups_stay_whole_in_every_part(size: int | None) -> None:
    groups = [["a", "b"], ["c"], ["d", "e", "f"]]
    parts: list[list[str]] = []

    def read(ids: Sequence[str]) -> dict[str, pa.Table]:
        parts.append(list(ids))
        return {}

    assemble(read, groups, VersionRules(current=0, newest=0), trajectories_per_part=size)
    assert [id_ for part in parts for id_ in part] == ["a", "b", "c", "d", "e", "f"]
    assert all(set(group) <= set(part) or not set(group) & set(part) for group in groups for part in parts)
    assert len(parts) == {1: 3, 2: 3, 3: 2, 4: 2}.get(size or 0, 1)
