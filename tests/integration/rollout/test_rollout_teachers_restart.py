"""The scoring service on a lake, started again: what it reads of the past, and what it still scores of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rolltape.ingest.deadletters import list_dead_letters, redrive
from rolltape.ingest.embedded import EmbeddedLog
from rolltape.schema.digest import prefix_digest
from rolltape.store.lake import Lake

from .teacher_stage import ROUTES, SAMPLING, VERSION, Rollouts, Serving


class Stage:
    """A lake with its committer, rollouts, and services one after another."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake.create(folder / "lake")
        self.log = EmbeddedLog(self.lake, committer="thread")
        self.rollouts = Rollouts(self.log)
        self.rollouts.start_run({"p-up": "up", "p-down": "down"})
        self.running: list[Serving] = []

    def serve(self, **options: Any) -> Serving:
        lake = Lake.open(self.lake.location, read_only=True)
        self.running.append(Serving(self.log, lake=lake, group_size=2, **options))
        return self.running[-1]

    def close(self) -> None:
        for serving in self.running:
            serving.stop()
        self.rollouts.close()
        self.log.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def test_a_restart_reads_whole_only_what_lacks_scores(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for ordinal in range(6):
        stage.rollouts.group("p-up" if ordinal % 2 else "p-down", ordinal=ordinal)
    first = stage.serve(groups_per_step=8, rollouts_per_unit=4)
    stage.rollouts.wait_for_scores(12)
    handed = stage.rollouts.dispatch("p-up", ordinal=6)
    stage.rollouts.act(handed, [0])
    first.stop()
    before = stage.rollouts.scored()
    read: Counter[str] = Counter()
    read_files = Lake.read_files

    def spy(lake: Lake, files: Any, kind: str, columns: Any = None, wanted: Any = None) -> pa.Table:
        table = read_files(lake, files, kind, columns, wanted)
        read[kind] += table.num_rows if columns is None and lake.read_only else 0
        return table

    monkeypatch.setattr(Lake, "read_files", spy)
    stage.serve(groups_per_step=8, rollouts_per_unit=4)
    stage.rollouts.group("p-down", ordinal=7)
    stage.rollouts.act(handed, [1])
    stage.rollouts.wait_for_scores(16)
    after = stage.rollouts.scored()
    assert (len(after), after.items() >= before.items()) == (16, True)
    assert read["action_sampled"] == 1
    assert (read["rollout_dispatched"], read["rollout_started"], read["rollout_ended"]) == (2, 2, 1)
    assert read["teacher_scored"] == 0


def test_a_domain_that_has_a_teacher_only_now_is_scored_from_the_beginning(stage: Stage) -> None:
    stage.rollouts.group("p-up", ordinal=0)
    stage.rollouts.group("p-down", ordinal=1)
    stage.serve(routes=ROUTES[:1])
    stage.rollouts.wait_for_scores(2)
    stage.rollouts.tape.wait_for("the alarm", lambda: bool(stage.rollouts.alarms()))
    stage.running[0].stop()
    stage.serve()
    stage.rollouts.wait_for_scores(4)
    assert {teacher for teacher, _, _ in stage.rollouts.scored().values()} == {"teacher-up", "teacher-down"}
    assert len(stage.rollouts.alarms()) == 1


def test_attempts_that_another_run_epoch_makes_again_are_scored_again(stage: Stage) -> None:
    stage.rollouts.act(handed := stage.rollouts.dispatch("p-up"))
    stage.serve()
    stage.rollouts.wait_for_scores(2)
    stage.running[0].stop()
    identity, _ = handed
    stage.rollouts.recorder.record_batch("attempt_abandoned", {**identity, "reason": "superseded"}, 2)
    stage.rollouts.act(again := stage.rollouts.dispatch("p-up", attempt=1), [0])
    stage.serve()
    stage.rollouts.act(again, [1])
    stage.rollouts.wait_for_scores(4)
    assert sorted(attempt for _, attempt, _ in stage.rollouts.scored()) == [0, 0, 1, 1]


@pytest.mark.parametrize("is_away", [False, True], ids=["live", "away"])
def test_a_rollout_that_is_redriven_is_scored(stage: Stage, is_away: bool) -> None:
    identity, context = handed = stage.rollouts.dispatch("p-up")
    stage.rollouts.act(handed, [0])
    own = {name: value[1] if isinstance(value, list) else value for name, value in identity.items()}
    stage.rollouts.recorder.record(
        "action_sampled", **own, segment_index=0, turn_index=0, token_ids=[5, 6], rollout_log_probs=[-0.5] * 3,
        action_kind="execution", version_runs=[{"start": 0, "length": 2, **VERSION}], sampling=SAMPLING,
        prefix_length=len(context), prefix_digest=prefix_digest(context), prefix_source="engine",
    )  # fmt: skip
    ended = {"status": "completed", "num_action_tokens": 2, "num_observation_tokens": 0}
    stage.rollouts.recorder.record("rollout_ended", **own, **ended)
    stage.rollouts.recorder.flush("logged")
    serving = stage.serve()
    stage.rollouts.wait_for_scores(1)
    if is_away:
        serving.stop()
    [letter] = list_dead_letters(stage.lake)
    redrive(stage.log, stage.lake, letter.event_id, lambda event: {**event, "rollout_log_probs": [-0.5] * 2})
    if is_away:
        stage.serve()
    stage.rollouts.wait_for_scores(2)
    assert {trajectory for trajectory, _, _ in stage.rollouts.scored()} == set(identity["trajectory_id"])
