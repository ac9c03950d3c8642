"""A run's teachers: their part of the configuration, and what is made of it for the service and for a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolltape.schema.errors import ConfigError, DigestMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rolltape.numerics.scoring import Scorer
    from rolltape.recipes.config import RunConfig
    from rolltape.rollout.teacher_models import TeacherRoute
    from rolltape.rollout.teachers import TeacherConfig
    from rolltape.store.lake import Lake


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSection:
    """The teacher of one domain: ``version`` (a number, or ``final``) of the policy of ``run`` in ``lake``."""

    domain: str
    lake: str
    run: str
    version: str = "final"
    teacher_id: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachersSection:
    """Who teaches which domain, and how it is scored.

    ``top_k`` above 0 records so many of the likeliest ids at each token. ``shuffle_scores`` makes a control of the run:
    the scores of a step change places among the tokens of their domain, and the teachers' ids say so on the tape.
    """

    routes: tuple[RouteSection, ...] = ()
    top_k: int = 0
    shuffle_scores: bool = False
    token_budget: int = 16_384
    num_threads: int = 1
    group_wait_s: float = 30.0

    def __post_init__(self) -> None:
        domains = [route.domain for route in self.routes]
        twice = next((domain for domain in domains if domains.count(domain) > 1), None)
        if twice is not None:
            raise ConfigError(f"teachers.routes: expected one teacher for domain {twice!r}, got several")
        for name, least in (("top_k", 0), ("token_budget", 1), ("num_threads", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"teachers.{name}: expected {least} or more, got {getattr(self, name)}")
        if not self.group_wait_s > 0:
            raise ConfigError(f"teachers.group_wait_s: expected more than 0, got {self.group_wait_s}")


def check_teachers(config: RunConfig) -> None:
    """Refuse a configuration whose trainer and teachers do not fit together.

    Raises:
        ConfigError: names the field.
    """
    trainer, teachers = config.trainer, config.teachers
    if not trainer.is_distillation:
        return
    if not teachers.routes:
        raise ConfigError(
            f"teachers.routes: expected a teacher for each domain under algorithm {trainer.algorithm!r}, got none"
        )
    if trainer.opd_form == "full" and teachers.shuffle_scores:
        raise ConfigError(
            "teachers.shuffle_scores: expected false under trainer.opd_form 'full', which reads no scores from the tape"
        )
    if trainer.opd_form == "top_k" and 0 < teachers.top_k < trainer.top_k:
        raise ConfigError(
            f"teachers.top_k: expected at least trainer.top_k ({trainer.top_k}) or 0 (as many), got {teachers.top_k}"
        )


def routes_of(config: RunConfig) -> tuple[TeacherRoute, ...]:
    """The routes of a run."""
    from rolltape.rollout.teacher_models import TeacherRoute

    return tuple(
        TeacherRoute(
            domain=route.domain,
            lake=route.lake,
            run=route.run,
            version=route.version,
            teacher_id=route.teacher_id,
            origin=route.origin,
        )
        for route in config.teachers.routes
    )


def teacher_config(config: RunConfig, lake_url: str, *, log_url: str = "") -> TeacherConfig:
    """What the scoring service of a run is told."""
    from rolltape.rollout.teachers import TeacherConfig

    section = config.teachers
    needed = config.trainer.top_k if config.trainer.is_distillation and config.trainer.opd_form == "top_k" else 0
    return TeacherConfig(
        lake=lake_url,
        log=log_url,
        run_id=config.run_id,
        routes=routes_of(config),
        model=config.model.name,
        temperature=config.rollout.temperature,
        top_k=section.top_k or needed,
        token_budget=section.token_budget,
        shuffle_scores=section.shuffle_scores,
        groups_per_step=config.rollout.groups_per_step,
        group_size=config.rollout.group_size,
        seed=config.seed,
        num_threads=section.num_threads,
        group_wait_s=section.group_wait_s,
    )


def scorers_of(config: RunConfig, lake: Lake) -> Mapping[str, Scorer] | None:
    """Scorers by teacher id for a trainer that needs full distributions; None for any other.

    Args:
        config: of the run.
        lake: whose tape says which weights a teacher has, where the run has begun.

    Raises:
        LakeNotFoundError, NotPublishedError: a teacher's weights are not there.
        ConfigError: a teacher's ids are not the student's.
        DigestMismatchError: the weights are not those that the run was begun with.
    """
    if not (config.trainer.is_distillation and config.trainer.opd_form == "full"):
        return None
    from rolltape.numerics.models import build_tokenizer
    from rolltape.numerics.vocabulary import Vocabulary
    from rolltape.rollout.teacher_models import load_teacher

    student = Vocabulary.of(build_tokenizer(config.model.name))
    rows = lake.read("teacher_routed", run_id=config.run_id)["teacher_routed"].to_pylist()
    recorded = {row["teacher_id"]: row["weights_digest"] for row in rows}
    scorers: dict[str, Scorer] = {}
    for route in routes_of(config):
        if route.name in scorers:
            continue
        teacher = load_teacher(
            route, student, temperature=config.rollout.temperature, token_budget=config.teachers.token_budget
        )
        expected = recorded.get(route.name, teacher.weights_digest)
        if expected != teacher.weights_digest:
            raise DigestMismatchError(
                f"teacher {route.name}: expected weights {expected}, as run {config.run_id} was begun, got "
                f"{teacher.weights_digest} from {route.lake}; name the version by its number"
            )
        scorers[route.name] = teacher.scorer
    return scorers
