"""What a scoring service reads of the lake when it starts: units that lack scores, and nothing else of the past."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from tests.conftest import Tape

from rolltape.rollout import teacher_past
from rolltape.rollout.teacher_models import TeacherRoute
from rolltape.rollout.teacher_past import Past, read_past
from rolltape.rollout.teacher_queue import KINDS
from rolltape.rollout.teachers import TeacherConfig
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import VacuumedError
from rolltape.store.lake import Lake

ROLLOUT: Final = Partition("rollout", 0)
ROUTES = (TeacherRoute(domain="up", lake="elsewhere", run="up"),)


class Lakeside:
    """A tape, and a lake that has what was archived of it."""

    def __init__(self, folder: Path, tape: Tape) -> None:
        self.tape = tape
        self.lake = Lake.create(folder / "lake")
        self.config = TeacherConfig(
            lake=str(folder / "lake"), run_id="run", routes=ROUTES, groups_per_step=8, group_size=2, rollouts_per_unit=2
        )
        tape.add("run_started", purpose="train")
        self.of_run = {"run_started": tape.tables()["run_started"]}
        self.register("p", "up")

    def register(self, problem: str, domain: str) -> None:
        self.tape.add("problem_registered", problem_id=problem, domain=domain)

    def dispatch(self, group: int, problem: str = "p", attempt: int = 0) -> None:
        for member in range(2):
            self.tape.add(
                "rollout_dispatched", purpose="train", training_step=1, group_ordinal=group, member=member,
                group_size=2, problem_id=problem, **self.who(group, member, attempt),
            )  # fmt: skip

    def roll(
        self, group: int, *, problem: str = "p", attempt: int = 0, segments: int = 1, end: str = "completed"
    ) -> None:
        """Both rollouts of a group, with an action in each segment."""
        self.dispatch(group, problem, attempt)
        for member in range(2):
            who = self.who(group, member, attempt)
            self.tape.add("rollout_started", event_index=0, prompt_token_ids=[[1, 2]], **who)
            for segment in range(segments):
                if segment:
                    self.tape.add("context_rewritten", event_index=2 * segment, context_token_ids=[[1, 9]],
                                  reason="compaction", **who)  # fmt: skip
                self.tape.add("action_sampled", event_index=2 * segment + 1, action_kind="execution",
                              token_ids=[[5, 6]], rollout_log_probs=[[-0.5, -0.5]], prefix_length=2, **who)  # fmt: skip
            self.tape.add("rollout_ended", event_index=2 * segments, status=end, num_action_tokens=2 * segments,
                          num_observation_tokens=0, last_event_index=2 * segments, **who)  # fmt: skip

    def score(self, group: int, *members: int, segment: int = 0, attempt: int = 0) -> None:
        for member in members or range(2):
            self.tape.add("teacher_scored", teacher_id="up@final", segment_index=segment,
                          log_probs=[[-1.0, -2.0]], **self.who(group, member, attempt))  # fmt: skip

    @staticmethod
    def who(group: int, member: int, attempt: int = 0) -> dict[str, Any]:
        return {"trajectory_id": f"t{group}.{member}", "attempt": attempt, "group_id": f"g{group}"}

    def archive(self, **ends: int) -> None:
        """Commit what the tape has, a file of each kind; ``ends`` are positions that stay behind it."""
        tables = self.tape.tables()
        last = {f"log/{table['log_topic'][0]}/0": 0 for table in tables.values()}
        for table in tables.values():
            name = f"log/{table['log_topic'][0]}/0"
            last[name] = max(last[name], table["log_offset"][-1].as_py())
        self.lake.append(tables, {**last, **{f"log/{topic}/0": end - 1 for topic, end in ends.items()}})
        self.tape.batches.clear()

    def past(self) -> Past:
        """What a service reads that starts now."""
        return read_past(self.lake, self.config, self.of_run)

    def waiting(self) -> list[str]:
        """Groups of which rows were read whole."""
        return sorted(set(self.past().tables["rollout_dispatched"]["group_id"].to_pylist()))


@pytest.fixture
def side(tmp_path: Path, tape: Tape) -> Lakeside:
    return Lakeside(tmp_path, tape)


@pytest.mark.parametrize("folded_at_once", [1, 2, 64])
def test_of_scored_units_nothing_is_read_whole_and_of_others_all(
    side: Lakeside, monkeypatch: pytest.MonkeyPatch, folded_at_once: int
) -> None:
    monkeypatch.setattr(teacher_past, "_UNITS_FOLDED", folded_at_once)
    for group in range(3):
        side.roll(group)
    side.score(0)
    side.score(1, 0)
    side.score(2)
    expected = {kind: table for kind, table in side.tape.tables().items() if kind in KINDS}
    side.archive()
    past = side.past()
    for kind, table in expected.items():
        of_group = pa.compute.equal(table["group_id"], "g1")
        assert past.tables[kind].to_pylist() == table.filter(of_group).to_pylist()
        assert past.tables[kind].num_rows == 2
    assert past.cursor == side.lake.cursor()
    scored = past.tables["teacher_scored"].select(["trajectory_id", "attempt", "segment_index"])
    assert scored.to_pylist() == [{"trajectory_id": "t1.0", "attempt": 0, "segment_index": 0}]
    assert past.tables["problem_registered"]["problem_id"].to_pylist() == ["p"]


def _abandoned(side: Lakeside) -> None:
    side.roll(0)
    side.score(0)
    side.tape.add("attempt_abandoned", reason="worker_lost", **side.who(0, 1))


def _made_again(side: Lakeside) -> None:
    _abandoned(side)
    side.roll(0, attempt=1)
    side.score(0, 0, attempt=1)


def _only_dispatched(side: Lakeside) -> None:
    side.dispatch(0)


def _one_of_its_segments(side: Lakeside) -> None:
    side.roll(0, segments=2)
    side.score(0)
    side.score(0, 0, segment=1)


def _not_all_events_read(side: Lakeside) -> None:
    side.roll(0)
    side.score(0)
    side.tape.batches["action_sampled"].pop()


@pytest.mark.parametrize(
    "happened",
    [_abandoned, _made_again, _only_dispatched, _one_of_its_segments, _not_all_events_read],
)
def test_a_unit_that_may_lack_a_score_is_looked_at_again(side: Lakeside, happened: Callable[[Lakeside], None]) -> None:
    happened(side)
    side.roll(1)
    side.score(1)
    side.archive()
    assert side.waiting() == ["g0"]


def test_what_is_never_trained_is_not_waited_for(side: Lakeside) -> None:
    side.roll(0, end="env_failed")
    side.roll(1, segments=2)
    side.score(1)
    side.score(1, segment=1)
    side.archive()
    assert side.waiting() == []


def test_a_dead_letter_closes_a_rollout_until_it_is_redriven(side: Lakeside) -> None:
    side.roll(0)
    side.score(0, 0)
    [letter] = side.tape.add("dead_letter", reason="bad_value", first_event_index=1, last_event_index=1,
                             **side.who(0, 1))  # fmt: skip
    side.archive()
    assert side.waiting() == []
    side.tape.add("dead_letter_redriven", dead_letter_event_id=letter, **side.who(0, 1))
    side.of_run |= {"dead_letter_redriven": side.tape.tables()["dead_letter_redriven"]}
    assert side.waiting() == ["g0"]


def test_scores_may_be_archived_before_their_rollouts(side: Lakeside) -> None:
    side.score(0)
    side.archive()
    past = side.past()
    assert past.tables["teacher_scored"]["trajectory_id"].to_pylist() == ["t0.0", "t0.1"]
    assert past.cursor[ROLLOUT] == side.lake.cursor()[ROLLOUT]


def test_rows_beyond_the_lakes_position_come_from_the_log(side: Lakeside) -> None:
    """A lake that is fed from Kafka may hold rows behind one that waits for a lane's missing record."""
    side.dispatch(0)
    side.archive()
    position = side.lake.cursor()[ROLLOUT]
    side.roll(0)
    side.archive(rollout=position + 2)
    past = side.past()
    assert past.cursor[ROLLOUT] == position + 2
    read = [offset for kind in KINDS for offset in past.tables[kind]["log_offset"].to_pylist()]
    assert sorted(read) == [position - 2, position - 1, position, position + 1]


def test_a_unit_that_waits_for_long_does_not_bring_back_what_came_since(
    side: Lakeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.dispatch(0)
    side.archive()
    for group in range(1, 7):
        side.roll(group)
        side.score(group)
        side.archive()
    side.roll(7)
    side.archive()
    opened: list[int] = []
    read_files = Lake.read_files

    def spy(lake: Lake, files: Any, kind: str, columns: Any = None, wanted: Any = None) -> pa.Table:
        if columns is None and kind in KINDS:
            opened.append(len(files))
        return read_files(lake, files, kind, columns, wanted)

    monkeypatch.setattr(Lake, "read_files", spy)
    assert side.waiting() == ["g0", "g7"]
    assert sum(opened) == 2 + 3, "two files of dispatches, one of starts, actions and ends"


def test_a_snapshot_that_is_vacuumed_meanwhile_is_given_up_for_a_newer_one(
    side: Lakeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.roll(0)
    side.archive()
    read_files = Lake.read_files

    def gone(lake: Lake, *args: Any) -> pa.Table:
        monkeypatch.setattr(Lake, "read_files", read_files)
        side.roll(1)
        side.archive()
        raise VacuumedError("gone")

    monkeypatch.setattr(Lake, "read_files", gone)
    assert side.waiting() == ["g0", "g1"]

    def always_gone(lake: Lake, *args: Any) -> pa.Table:
        raise VacuumedError("gone for good")

    monkeypatch.setattr(Lake, "read_files", always_gone)
    with pytest.raises(VacuumedError, match="for good"):
        side.past()


def test_an_empty_lake_has_no_past(side: Lakeside) -> None:
    past = side.past()
    assert past.cursor == Cursor()
    assert not any(table.num_rows for table in past.tables.values())
