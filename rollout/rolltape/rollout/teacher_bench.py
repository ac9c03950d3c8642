"""A run's teachers, side by side: loaded when they are there, routed by exact domain, looked at again (§4.9)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rolltape.ingest.recorder import Recorder
from rolltape.numerics.vocabulary import Vocabulary
from rolltape.rollout.teacher_models import SHUFFLED, Teacher, TeacherRoute, load_teacher
from rolltape.schema.errors import (
    ConfigError,
    DigestMismatchError,
    LakeNotFoundError,
    NotPublishedError,
    StoreUnreachableError,
)
from rolltape.schema.identity import derived_id

if TYPE_CHECKING:
    from rolltape.rollout.teachers import Alarms, TeacherConfig

UNAVAILABLE = "teacher_unavailable"
RULE = "domain"
"""How a teacher was found: the domain's name, exactly."""

Loader = Callable[[TeacherRoute], Teacher]


class TeacherBench:
    """The teachers of a run.

    Args:
        config: routes, temperature.
        student: what the ids that they score mean.
        recorder: for the routes.
        load: gives a teacher; by default out of a lake's published weights.
    """

    def __init__(
        self, config: TeacherConfig, student: Vocabulary, recorder: Recorder, load: Loader | None = None
    ) -> None:
        self._config = config
        self._student = student
        self._recorder = recorder
        self._load = load or self._load_published
        self._routes = {route.domain: route for route in config.routes}
        self._teachers: dict[str, Teacher] = {}  # by name
        self._recorded: dict[str, dict[str, Any]] = {}  # teacher_routed, by domain
        self._next_look = 0.0

    def teacher_id(self, route: TeacherRoute) -> str:
        """As the tape names it: a control's scores carry another name than the teacher's own."""
        return route.name + SHUFFLED if self._config.shuffle_scores else route.name

    def route_of(self, domain: str | None) -> TeacherRoute | None:
        """The route of exactly this domain."""
        return self._routes.get(domain or "")

    def teacher_of(self, route: TeacherRoute) -> Teacher | None:
        """The route's teacher; None while it is not there."""
        return self._teachers.get(route.name)

    def adopt(self, tables: Sequence[pa.Table]) -> None:
        """Take over the routes that the tape has."""
        for table in tables:
            for row in table["teacher_routed"].to_pylist():
                self._recorded.setdefault(row["domain"], row)

    def load_missing(self, alarms: Alarms) -> bool:
        """Load the teachers that are not there yet, if it is time to look; whether one came.

        Raises:
            ConfigError, DigestMismatchError: a teacher that may not score this run.
        """
        missing = [route for route in self._config.routes if route.name not in self._teachers]
        missing += [
            route
            for route in self._config.routes
            if route.name in self._teachers and route.domain not in self._recorded
        ]
        if not missing or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + self._config.retry_s
        came = False
        for route in missing:
            try:
                teacher = self._teachers.get(route.name) or self._load(route)
            except (LakeNotFoundError, NotPublishedError, StoreUnreachableError) as error:
                alarms.raise_once(
                    UNAVAILABLE, route.name, f"teacher {route.name} of domain {route.domain!r} is not there: {error}"
                )
                continue
            self._admit(route, teacher)
            came = True
        self._recorder.flush("spooled")
        return came

    def verify(self) -> None:
        """Look at every teacher's weights again.

        Raises:
            DigestMismatchError: some are not what they were.
        """
        for teacher in self._teachers.values():
            teacher.verify()

    def _load_published(self, route: TeacherRoute) -> Teacher:
        return load_teacher(
            route, self._student, temperature=self._config.temperature, token_budget=self._config.token_budget
        )

    def _admit(self, route: TeacherRoute, teacher: Teacher) -> None:
        """Let a teacher score, once its route is on the tape."""
        if self._config.top_k > teacher.vocabulary.num_ids:
            raise ConfigError(
                f"teachers.top_k: expected at most the {teacher.vocabulary.num_ids} ids of teacher {route.name}, got "
                f"{self._config.top_k}"
            )
        recorded = self._recorded.get(route.domain)
        fields = {
            "domain": route.domain,
            "teacher_id": self.teacher_id(route),
            "rule": RULE,
            "weights_digest": teacher.weights_digest,
            "tokenizer_digest": teacher.vocabulary.behaviour_digest,
            "student_tokenizer_digest": self._student.behaviour_digest,
            "origin_digest": teacher.origin_digest,
        }
        if recorded is None:
            event_id = derived_id(self._recorder.run_id, "teacher_routed", route.domain)
            self._recorder.record("teacher_routed", event_id=event_id, **fields)
            self._recorded[route.domain] = fields
        else:
            for name in ("teacher_id", "weights_digest"):
                if recorded[name] != fields[name]:
                    raise DigestMismatchError(
                        f"teacher of domain {route.domain!r}: expected {name} {recorded[name]}, as the run was begun, "
                        f"got {fields[name]}; a teacher never changes within a run, name the version by its number"
                    )
        self._teachers[route.name] = teacher
