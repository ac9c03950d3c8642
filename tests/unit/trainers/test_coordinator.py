"""Weight sync on the trainer's side: what counts as staged, and that a commit waits for every registered engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.ingest.memory import MemoryLog
from rolltape.ingest.recorder import Recorder
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import EngineError
from rolltape.schema.policy import PolicyVersion
from rolltape.schema.render import arrow_schema
from rolltape.trainers.coordinator import Coordinator, Rollover, SyncState


def table(kind: str, event_id: str, epoch: int, **fields: Any) -> pa.Table:
    """One event of ``kind``, with the envelope columns that the coordinator reads."""
    row = {"event_id": event_id, "kind": kind, "producer_epoch": epoch, kind: fields}
    return pa.Table.from_pylist([row], schema=arrow_schema(kind))


VERSION = {"policy_id": "actor", "policy_run_epoch": 1, "version": 3, "weights_digest": "w"}
KEY = (1, 3)


def test_a_restarted_engine_must_stage_again() -> None:
    state = SyncState()
    state.apply("engine_joined", table("engine_joined", "j1", 1, engine_id="e"))
    state.apply("weights_staged", table("weights_staged", "s1", 1, engine_id="e", **VERSION))
    assert state.staged_by(KEY) == {"e": "s1"}
    state.apply("engine_joined", table("engine_joined", "j2", 2, engine_id="e"))
    assert state.staged_by(KEY) == {}
    state.apply("weights_staged", table("weights_staged", "s2", 2, engine_id="e", **VERSION))
    assert state.staged_by(KEY) == {"e": "s2"}


def test_an_engine_that_left_does_not_count() -> None:
    state = SyncState()
    state.apply("engine_joined", table("engine_joined", "j1", 1, engine_id="e"))
    state.apply("weights_staged", table("weights_staged", "s1", 1, engine_id="e", **VERSION))
    state.apply("engine_left", table("engine_left", "l1", 1, engine_id="e", reason="silent"))
    assert state.staged_by(KEY) == {}
    assert state.engines == {}


@given(st.permutations(range(4)))
def test_topics_may_arrive_in_any_order(order: list[int]) -> None:
    """Between `control` and `weights` there is no order; within each there is."""
    control = iter([("engine_joined", "j1", 1), ("engine_joined", "j2", 2)])
    weights = iter([("weights_staged", "s1", 1), ("weights_staged", "s2", 2)])
    state = SyncState()
    for place in order:
        kind, event_id, epoch = next(control if place < 2 else weights)
        version = VERSION if kind == "weights_staged" else {}
        state.apply(kind, table(kind, event_id, epoch, engine_id="e", **version))
    assert state.staged_by(KEY) == {"e": "s2"}


@pytest.mark.parametrize("missing", ["a", "b"])
def test_commit_waits_for_every_registered_engine(missing: str) -> None:
    state = SyncState()
    for number, engine in enumerate("ab"):
        state.apply("engine_joined", table("engine_joined", f"j{number}", 1, engine_id=engine))
        if engine != missing:
            state.apply("weights_staged", table("weights_staged", f"s{number}", 1, engine_id=engine, **VERSION))
    assert set(state.engines) - set(state.staged_by(KEY)) == {missing}


def test_committed_and_aborted_are_kept_by_epoch_and_number() -> None:
    state = SyncState()
    state.apply("weights_committed", table("weights_committed", "c", 1, **VERSION))
    state.apply("weights_aborted", table("weights_aborted", "a", 1, reason="x", **{**VERSION, "version": 4}))
    assert state.committed == {(1, 3)}
    assert state.aborted == {(1, 4)}
    assert not set(itertools.chain(state.committed, state.aborted)) & {(2, 3), (2, 4)}


class Engines:
    """A coordinator over hand-made weight-sync events."""

    def __init__(self, *names: str) -> None:
        self.log = MemoryLog()
        self.engines = Recorder(self.log, producer_id="engines", run_id="run")
        self.recorder = Recorder(self.log, producer_id="trainer", run_id="run")
        for name in names:
            self.engines.record("engine_joined", engine_id=name, incarnation=f"{name}/1")
        self.coordinator = Coordinator(
            EmptyLake(),  # type: ignore[arg-type]
            self.log,
            self.recorder,
            coordinator_id="trainer",
            run_id="run",
            min_engines=len(names),
            engine_timeout_s=0.2,
        )

    def stage(self, engine: str, number: int) -> None:
        self.engines.record("weights_staged", engine_id=engine, **version(number).fields)

    def committed(self) -> list[int]:
        reader = self.log.reader(Cursor(), kinds=("weights_committed",))
        return [row["version"] for d in reader.poll(0.0) for row in d.table["weights_committed"].to_pylist()]


class EmptyLake:
    """Nothing happened before."""

    def cursor(self) -> Cursor:
        return Cursor()

    def events(self, kinds: Sequence[str], **_: Any) -> dict[str, pa.Table]:
        return {kind: arrow_schema(kind).empty_table() for kind in kinds}


def version(number: int) -> PolicyVersion:
    return PolicyVersion("actor", 1, number, f"w{number}")


def test_a_rollover_commits_the_newest_version_that_every_engine_has_staged() -> None:
    engines = Engines("a", "b")
    rollover = Rollover(engines.coordinator, version(0), max_waiting=3)
    for number in (1, 2, 3):
        rollover.published(version(number))
    engines.stage("a", 1)
    engines.stage("b", 2)
    rollover.settle()
    assert engines.committed() == []
    engines.stage("a", 2)
    assert rollover.serving == version(0)
    rollover.settle()
    assert engines.committed() == [2]
    assert rollover.serving == version(2)
    engines.stage("b", 1)
    rollover.settle()
    assert engines.committed() == [2], "versions go forward only"
    for engine in "ab":
        engines.stage(engine, 3)
    rollover.settle()
    assert engines.committed() == [2, 3]


def test_a_rollover_holds_the_trainer_back_until_a_version_serves() -> None:
    engines = Engines("a")
    rollover = Rollover(engines.coordinator, version(0), max_waiting=1)
    rollover.published(version(1))
    engines.stage("a", 1)
    rollover.published(version(2))  # version 1 serves, 2 waits
    assert engines.committed() == [1]
    with pytest.raises(EngineError, match="no engine staged"):
        rollover.published(version(3))
    engines.stage("a", 3)
    rollover.published(version(3))
    assert engines.committed() == [1, 3]


def test_an_aborted_version_is_taken_off_the_live_line() -> None:
    """D29: what it sampled is refused by name where batches are formed, also of one that was skipped long ago."""
    engines = Engines("a")
    live = {(1, 0), (1, 1), (1, 2)}
    rollover = Rollover(engines.coordinator, version(0), max_waiting=2, live_versions=live)
    rollover.published(version(1))
    rollover.published(version(2))
    engines.stage("a", 2)
    engines.engines.record("weights_aborted", policy_id="actor", policy_run_epoch=1, version=1, reason="digest")
    rollover.settle()
    assert engines.committed() == [2]
    assert live == {(1, 0), (1, 2)}


def test_bringing_a_version_into_effect_leaves_silent_engines_behind() -> None:
    engines = Engines("a", "b")
    engines.stage("a", 1)
    assert engines.coordinator.bring_into_effect(version(1)) == version(1)
    assert engines.committed() == [1]
    left = engines.log.reader(Cursor(), kinds=("engine_left",)).poll(0.0)
    assert [row["engine_id"] for d in left for row in d.table["engine_left"].to_pylist()] == ["b"]
