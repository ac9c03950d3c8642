"""Weight sync on the trainer's side: what counts as staged, and that a commit waits for every registered engine."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.schema.render import arrow_schema
from rolltape.trainers.coordinator import SyncState


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
