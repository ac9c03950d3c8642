"""Which rollouts of a unit are scored, and which keep it waiting."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest

from rolltape.ingest.recorder import Recorder
from rolltape.rollout.teacher_bench import TeacherBench
from rolltape.rollout.teacher_queue import KINDS, ScoringQueue
from rolltape.rollout.teacher_units import UNREAD, UnitScorer
from rolltape.rollout.teachers import Alarms, TeacherConfig


@pytest.mark.parametrize("late", ["action_sampled", "rollout_started"])
def test_an_end_that_is_read_before_what_it_ends_keeps_its_unit_waiting(tape: Any, late: str) -> None:
    """The kinds of a commit lie in files of their own; a reader may stand between two of them."""
    tape.add("run_started", purpose="train")
    for member in range(2):
        tape.rollout(f"t{member}", member=member, group_size=2, reward=None)
    tables: dict[str, pa.Table] = tape.tables()
    queue = ScoringQueue("run")
    held_back = tables[late].slice(1)
    for kind in KINDS:
        if kind in tables:
            queue.add(kind, tables[kind].slice(0, 1) if kind == late else tables[kind])
    (unit,) = queue.complete()
    nothing = cast("Any", None)
    scorer = UnitScorer(cast("TeacherConfig", nothing), cast("Recorder", nothing), cast("TeacherBench", nothing))
    folded = queue.fold([unit], {"run_started": tables["run_started"]})
    assert scorer.score(folded, queue.place, {}, cast("Alarms", nothing)) == {unit: UNREAD}
    queue.add(late, held_back)
    whole = queue.fold([unit], {"run_started": tables["run_started"]})
    assert whole.trajectories["state"].to_pylist() == ["ended", "ended"]
