"""The teachers of a run: routed on the tape before they score, and the same ones for as long as the run lasts."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
from tests.conftest import Tape

from rolltape.numerics.char_tokenizer import CharTokenizer
from rolltape.numerics.scoring import Scorer, ScorerIdentity
from rolltape.numerics.vocabulary import Vocabulary
from rolltape.rollout.teacher_bench import TeacherBench
from rolltape.rollout.teacher_models import Teacher, TeacherRoute
from rolltape.rollout.teachers import Alarms, TeacherConfig
from rolltape.schema.errors import ConfigError, DigestMismatchError, NotPublishedError

STUDENT = Vocabulary.of(CharTokenizer("c", "01234"))
UP = TeacherRoute(domain="up", lake="elsewhere", run="up")
CONFIG = TeacherConfig(lake="memory://", run_id="run", routes=(UP,), retry_s=1e-9)


class Records:
    """A recorder that keeps what it is told, in order."""

    run_id = "run"

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def record(self, kind: str, **fields: Any) -> None:
        self.rows.append((kind, fields))

    def flush(self, level: str) -> None:
        self.rows.append(("flush", {"level": level}))


class Named:
    """A scorer that has weights by name and nothing else."""

    def __init__(self, weights: str) -> None:
        self.identity = ScorerIdentity(
            weights_digest=weights, engine="none", dtype="float32", logprobs_mode="processed_logprobs", temperature=1.0
        )


def teacher(weights: str) -> Teacher:
    return Teacher(scorer=cast("Scorer", Named(weights)), vocabulary=STUDENT, max_length=8, origin_digest="o")


def bench(records: Records, weights: str = "w", config: TeacherConfig = CONFIG) -> TeacherBench:
    return TeacherBench(config, STUDENT, cast("Any", records), lambda _: teacher(weights))


def alarms(records: Records) -> Alarms:
    return Alarms(cast("Any", records))


def recorded_route(**changes: Any) -> Any:
    tape = Tape()
    tape.add("teacher_routed", **{"domain": "up", "teacher_id": "up@final", "weights_digest": "w", **changes})
    return [tape.tables()["teacher_routed"].select(["teacher_routed"])]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_route_is_on_the_tape_before_its_teacher_scores_under_its_own_name(shuffled: bool) -> None:
    """A control's scores are nobody's: they never carry the teacher's name."""
    records = Records()
    made = bench(records, config=dataclasses.replace(CONFIG, shuffle_scores=shuffled))
    assert made.teacher_of(UP) is None
    assert made.load_missing(alarms(records))
    assert [kind for kind, _ in records.rows] == ["teacher_routed", "flush"]
    fields = records.rows[0][1]
    assert (fields["domain"], fields["teacher_id"]) == ("up", "up@final-shuffled" if shuffled else "up@final")
    assert (fields["weights_digest"], fields["origin_digest"]) == ("w", "o")
    assert fields["tokenizer_digest"] == fields["student_tokenizer_digest"] == STUDENT.behaviour_digest
    assert made.teacher_of(UP) is not None
    assert not made.load_missing(alarms(records)), "nothing is missing any more"


def test_a_route_of_the_tape_is_not_recorded_again() -> None:
    records = Records()
    made = bench(records)
    made.adopt(recorded_route())
    assert made.load_missing(alarms(records))
    assert [kind for kind, _ in records.rows] == ["flush"]


@pytest.mark.parametrize("changes", [{"weights_digest": "other"}, {"teacher_id": "other"}])
def test_another_teacher_than_the_run_was_begun_with_is_refused(changes: dict[str, str]) -> None:
    records = Records()
    made = bench(records)
    made.adopt(recorded_route(**changes))
    (name,) = changes
    with pytest.raises(
        DigestMismatchError, match=rf"expected {name} other, as the run was begun.*never changes within"
    ):
        made.load_missing(alarms(records))
    assert made.teacher_of(UP) is None


def test_more_likeliest_ids_than_the_teacher_has_are_refused() -> None:
    made = bench(Records(), config=dataclasses.replace(CONFIG, top_k=STUDENT.num_ids + 1))
    with pytest.raises(ConfigError, match=rf"teachers\.top_k: expected at most the {STUDENT.num_ids} ids of teacher"):
        made.load_missing(alarms(Records()))


def test_a_teacher_that_is_not_there_is_told_once_and_looked_for_again() -> None:
    records, there = Records(), False

    def load(_: TeacherRoute) -> Teacher:
        if not there:
            raise NotPublishedError("no weights yet")
        return teacher("w")

    made, told = TeacherBench(CONFIG, STUDENT, cast("Any", records), load), alarms(records)
    for _ in range(3):
        assert not made.load_missing(told)
    raised = [fields["alarm"] for kind, fields in records.rows if kind == "alarm_raised"]
    assert raised == ["teacher_unavailable"]
    there = True
    assert made.load_missing(told)
    assert made.teacher_of(UP) is not None


def test_routes_are_of_exactly_their_domain() -> None:
    made = bench(Records())
    assert made.route_of("up") is UP
    assert [made.route_of(domain) for domain in ("Up", "up ", "", None)] == [None] * 4
