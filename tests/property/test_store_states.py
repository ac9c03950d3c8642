"""A lake under any sequence of commits, maintenance, reopening and reading agrees with a list of rows."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolltape.schema.build import build_batch
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import CommitterFencedError
from rolltape.store import Lake, Tail, Window
from rolltape.store.maintenance import checkpoint, clean_logs, compact, vacuum

KINDS = ("rollout_ended", "reward_assigned")


def rows(kind: str, first: int, num_rows: int, offset: int) -> pa.Table:
    names = [f"{kind}-{first + i:06d}" for i in range(num_rows)]
    own = {"status": "completed"} if kind == "rollout_ended" else {"state": "missing", "scalariser_version": "1"}
    stamps = {
        "event_id": names,
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": "p",
        "producer_epoch": 1,
        "lane_seq": np.arange(first, first + num_rows),
        "log_topic": "rollout",
        "log_partition": 0,
        "log_offset": offset,
        "recorded_at": datetime(2026, 11, 30, tzinfo=UTC),
        "trajectory_id": names,
    }
    built = build_batch(kind, {**stamps, **own}, num_rows)
    assert not built.refused, built.refused
    return pa.Table.from_batches([built.batch])


class LakeStates(RuleBasedStateMachine):
    """Two handles on one lake, a tail, a window, and what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.lake = Lake.create(self.folder / "lake")
        self.other = Lake.open(self.lake.location)
        self.tail = Tail(self.other)
        self.window = Window(self.other, max_bytes=20_000)
        self.expected: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self.tailed: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self.next_offset = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(kinds=st.sets(st.sampled_from(KINDS), min_size=1), num_rows=st.integers(1, 5), by_other=st.booleans())
    def append(self, kinds: set[str], num_rows: int, by_other: bool) -> None:
        writer = self.other if by_other else self.lake
        writer.snapshot()
        tables = {kind: rows(kind, len(self.expected[kind]), num_rows, self.next_offset) for kind in sorted(kinds)}
        writer.append(tables, {"log/rollout/0": self.next_offset})
        self.next_offset += 1
        for kind, table in tables.items():
            self.expected[kind] += table["event_id"].to_pylist()

    @precondition(lambda self: self.next_offset > 0)
    @rule()
    def append_on_old_marks(self) -> None:
        with pytest.raises(CommitterFencedError):
            self.lake.append({}, {"log/rollout/0": self.next_offset - 1})

    @rule(kind=st.sampled_from(KINDS))
    def compact_one_kind(self, kind: str) -> None:
        compact(self.lake, kinds=[kind])

    @rule(keep=st.integers(0, 2))
    def write_checkpoint(self, keep: int) -> None:
        checkpoint(self.other)
        clean_logs(self.other, keep_versions=keep, safe_age_s=0)

    @rule()
    def delete_what_is_not_named(self) -> None:
        vacuum(self.lake, safe_age_s=-1)
        self.drain()

    @rule()
    def reopen(self) -> None:
        self.lake = Lake.open(self.lake.location)
        self.window = Window(self.lake, max_bytes=20_000)

    @rule()
    def drain(self) -> None:
        while deliveries := self.tail.poll():
            for delivery in deliveries:
                self.tailed[delivery.kind] += delivery.table["event_id"].to_pylist()
        assert self.tailed == self.expected
        assert self.tail.cursor == self.lake.cursor()

    @rule()
    def refresh_window(self) -> None:
        assert self.window.refresh() == self.lake.cursor()
        for kind in KINDS:
            held = self.window.read(kind)["event_id"].to_pylist()
            assert held == self.expected[kind][len(self.expected[kind]) - len(held) :]
            assert self.window.read_through(kind)["event_id"].to_pylist() == self.expected[kind]

    @precondition(lambda self: self.next_offset > 0)
    @rule(data=st.data())
    def read_as_of(self, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, self.next_offset))
        cursor = Cursor.parse(f"rollout/0:{cut}")
        for kind in KINDS:
            before = self.lake.read(kind, as_of=cursor)["event_id"].to_pylist()
            after = self.lake.read(kind, min_offset=cut)["event_id"].to_pylist()
            assert before + after == self.expected[kind]

    @invariant()
    def both_handles_read_everything(self) -> None:
        for handle in (self.lake, self.other):
            for kind in KINDS:
                assert handle.read(kind)["event_id"].to_pylist() == self.expected[kind]


LakeStates.TestCase.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)
test_any_sequence_of_steps = LakeStates.TestCase
