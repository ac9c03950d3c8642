"""Teachers: frozen models out of a lake's published weights, by digest (algorithms.md §4.7 to §4.9).

A teacher is a version that some run has published. It is loaded once, its weights are verified against the tape, and
it scores a student's ids through the :class:`~rolltape.numerics.scoring.Scorer` protocol: it generates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rolltape.numerics.device import select_device
from rolltape.numerics.models import build_model, build_tokenizer, model_parts, model_spec
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.vocabulary import Vocabulary, check_same_ids
from rolltape.numerics.weights import (
    Manifest,
    first_difference,
    load_shards,
    load_weights,
    named_weights,
    tensor_digests,
)
from rolltape.schema.errors import ConfigError, DigestMismatchError
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.published import FINAL, PublishedModel, find_published

if TYPE_CHECKING:
    from torch import nn

    from rolltape.numerics.scoring import Scorer

SHUFFLED: Final = "-shuffled"
"""Ends the id of a teacher whose scores were permuted: a control, never to be taken for the teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRoute:
    """The teacher of one domain: a version that a run has published."""

    domain: str
    lake: str  # path or URL
    run: str
    version: str = FINAL  # or a number
    teacher_id: str = ""  # default: run@version
    origin: str = ""  # names the common ancestor of student and teacher; default: digest of the run's version 0

    def __post_init__(self) -> None:
        for name in ("domain", "lake", "run"):
            if not getattr(self, name):
                raise ConfigError(f"teachers.routes.{name}: expected a name, got nothing")
        if self.version != FINAL and not self.version.isdecimal():
            raise ConfigError(f"teachers.routes.version: expected a number or {FINAL!r}, got {self.version!r}")

    @property
    def name(self) -> str:
        """Teacher id."""
        return self.teacher_id or f"{self.run}@{self.version}"

    @property
    def source(self) -> tuple[str, str, str]:
        """Where its weights come from."""
        return (self.lake, self.run, self.version)


def check_routes(routes: Sequence[TeacherRoute]) -> None:
    """Refuse two teachers for one domain, and two sources under one id.

    Raises:
        ConfigError: names the domain or the teacher.
    """
    sources: dict[str, tuple[str, str, str]] = {}
    domains: set[str] = set()
    for route in routes:
        if route.domain in domains:
            raise ConfigError(f"teachers.routes: expected one teacher for domain {route.domain!r}, got several")
        domains.add(route.domain)
        if sources.setdefault(route.name, route.source) != route.source:
            raise ConfigError(
                f"teachers.routes: expected one source for teacher {route.name!r}, got {sources[route.name]} and "
                f"{route.source}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A teacher that can score."""

    scorer: Scorer
    vocabulary: Vocabulary
    max_length: int  # most tokens of one row, context and response together
    origin_digest: str | None = None
    model: nn.Module | None = None  # where it is in this process, so that its weights can be looked at again
    digests: Mapping[str, str] = field(default_factory=dict)  # of the model's tensors when it was loaded

    @property
    def weights_digest(self) -> str:
        """Digest over all of its weights."""
        return self.scorer.identity.weights_digest

    def verify(self) -> None:
        """Compare the weights with what they were when the teacher was loaded.

        Raises:
            DigestMismatchError: names the first tensor that changed; scores since the last call are not the teacher's.
        """
        if self.model is None:
            return
        found = tensor_digests(named_weights(self.model))
        name = first_difference(self.digests, found)
        if name is not None:
            raise DigestMismatchError(
                f"teacher with weights {self.weights_digest}: expected tensor {name} with digest "
                f"{self.digests.get(name)}, got {found.get(name)}; a teacher never changes, load it again"
            )


def find_teacher(route: TeacherRoute) -> PublishedModel:
    """What the tape of the route's run says of the version.

    Raises:
        LakeNotFoundError, NotPublishedError, StoreUnreachableError: it is not there (yet).
    """
    return find_published(Lake.open(Location.parse(route.lake), read_only=True), route.run, route.version)


def load_teacher(route: TeacherRoute, student: Vocabulary, *, temperature: float, token_budget: int) -> Teacher:
    """Load a teacher from its shards.

    Args:
        route: which one.
        student: what the ids that it will score mean.
        temperature: of the distribution that it scores; the rollouts' own.
        token_budget: padded tokens of one forward pass.

    Raises:
        LakeNotFoundError, NotPublishedError, StoreUnreachableError: it is not there (yet).
        ConfigError: its ids, or its template, are not the student's.
        DigestMismatchError: shards or tensors are not what the tape says.
    """
    found = find_teacher(route)
    who = f"teacher {route.name} of domain {route.domain!r}"
    tokenizer = build_tokenizer(found.model_name)
    check_same_ids(student, Vocabulary.of(tokenizer), who)  # before any weights are read
    model = load_model(found).to(select_device())
    vocabulary = Vocabulary.of(tokenizer, model_parts(model).output_weight.shape[0])
    check_same_ids(student, vocabulary, who)
    return Teacher(
        scorer=ModelScorer(model, temperature=temperature, token_budget=token_budget),
        vocabulary=vocabulary,
        max_length=model_spec(found.model_name).max_length,
        origin_digest=route.origin or found.origin_digest,
        model=model,
        digests=tensor_digests(named_weights(model)),
    )


def load_model(found: PublishedModel) -> nn.Module:
    """A published version as a frozen model on the CPU.

    Raises:
        DigestMismatchError: shards or tensors are not what the tape says.
    """
    manifest = Manifest.from_fields({name: found.fields[name] for name in ("weights_digest", "shards", "manifest")})
    model = build_model(found.model_name, 0)
    load_weights(model, load_shards(found.location, manifest))
    return model.requires_grad_(requires_grad=False)
