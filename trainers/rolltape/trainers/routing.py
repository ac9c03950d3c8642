"""Hard routing of rows to teachers, fail closed, and a report per domain (algorithms.md §4.9).

A row's teacher is the one that the table names for exactly its domain. There is no default, no nearest match and no
mixture: a row whose domain is unknown, or whose teacher is away, is held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.trainers.distill import Gap
from rolltape.trainers.losses import check_lengths

UNKNOWN_DOMAIN: Final = "unknown_domain"
TEACHER_UNAVAILABLE: Final = "teacher_unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen teacher as the tape names it."""

    teacher_id: str
    weights_digest: str
    tokenizer_digest: str
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """A row that no teacher may score now."""

    row: int
    reason: str
    """:data:`UNKNOWN_DOMAIN` or :data:`TEACHER_UNAVAILABLE`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Which teacher scores which row."""

    teachers: tuple[str | None, ...]
    """Teacher id per row; None where the row is held."""
    held: tuple[HeldRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Domain -> teacher, exact match.

    Raises:
        ConfigError: a teacher's tokenizer or vocabulary is not the student's: its token ids would mean other text.
    """

    teachers: Mapping[str, Teacher]
    student_tokenizer_digest: str
    student_vocab_size: int

    def __post_init__(self) -> None:
        student = (self.student_tokenizer_digest, self.student_vocab_size)
        for domain, teacher in self.teachers.items():
            if (teacher.tokenizer_digest, teacher.vocab_size) != student:
                raise ConfigError(
                    f"teacher {teacher.teacher_id} of domain {domain!r}: expected the student's tokenizer and "
                    f"vocabulary {student}, got {(teacher.tokenizer_digest, teacher.vocab_size)}"
                )

    def teacher_of(self, domain: str) -> Teacher:
        """The domain's teacher.

        Raises:
            UntrainableError: no teacher is named for it.
        """
        if domain not in self.teachers:
            raise UntrainableError(
                f"{UNKNOWN_DOMAIN}: expected one of {sorted(self.teachers)}, got {domain!r}; add a route for it"
            )
        return self.teachers[domain]

    def route(self, domains: Sequence[str], available: Collection[str]) -> Routed:
        """Route rows by their domains; ``available`` are the ids of teachers that can score now."""
        chosen: list[str | None] = []
        held = []
        for row, domain in enumerate(domains):
            teacher = self.teachers.get(domain)
            if teacher is not None and teacher.teacher_id in available:
                chosen.append(teacher.teacher_id)
                continue
            chosen.append(None)
            reason = UNKNOWN_DOMAIN if teacher is None else TEACHER_UNAVAILABLE
            detail = f"domain {domain!r}" if teacher is None else f"teacher {teacher.teacher_id} of domain {domain!r}"
            held.append(HeldRow(row=row, reason=reason, detail=detail))
        return Routed(teachers=tuple(chosen), held=tuple(held))


def routed_scores(routed: Routed, rows: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
    """Each token's log-prob by its own row's teacher, ``[N]``; NaN, thus untrusted, where the row is held.

    Args:
        routed: from :meth:`RoutingTable.route`.
        rows: ``[N]`` int64.
        scores: per teacher id ``[N]``; only the tokens of its own rows are read.

    Raises:
        UntrainableError: a teacher that was chosen has given no scores.
    """
    found = torch.full(rows.shape, torch.nan, device=rows.device)
    for teacher_id in sorted({teacher for teacher in routed.teachers if teacher is not None}):
        if teacher_id not in scores:
            raise UntrainableError(
                f"{TEACHER_UNAVAILABLE}: expected scores of teacher {teacher_id}, got those of {sorted(scores)}; "
                "hold its rows, no other teacher stands in"
            )
        check_lengths(rows, scores[teacher_id])
        own = torch.tensor([teacher == teacher_id for teacher in routed.teachers], device=rows.device)[rows]
        given = scores[teacher_id].detach()
        found = found.to(torch.promote_types(found.dtype, given.dtype))
        found = torch.where(own, given.to(found.dtype), found)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainReport:
    """One domain's tokens in a batch."""

    tokens: int
    nonfinite_tokens: int
    kl: float | None
    """k1 of KL(student || teacher), nat per token; None without a token whose gap is a number."""
    gap_abs: float | None
    """Mean |a|, after clipping."""
    clip_share: float | None


def domain_reports(domains: Sequence[str], rows: Tensor, raw: Gap, used: Gap) -> dict[str, DomainReport]:
    """A report for each domain of a batch, sorted by name.

    Args:
        domains: of each row.
        rows: ``[N]`` int64.
        raw: the gap without a clip, for the divergence.
        used: the gap that the loss uses.
    """
    check_lengths(rows, raw.advantage, used.advantage)
    reports = {}
    for domain in sorted(set(domains)):
        of_row = torch.tensor([name == domain for name in domains], device=rows.device)
        own = of_row[rows]
        usable = own & ~used.nonfinite
        count = int(usable.sum())
        reports[domain] = DomainReport(
            tokens=int(own.sum()),
            nonfinite_tokens=int((own & used.nonfinite).sum()),
            kl=-float(raw.advantage[usable].double().mean()) if count else None,
            gap_abs=float(used.advantage[usable].double().abs().mean()) if count else None,
            clip_share=float(used.clipped[usable].double().mean()) if count else None,
        )
    return reports


def distant_domains(reports: Mapping[str, DomainReport], max_kl: float) -> tuple[str, ...]:
    """Domains whose divergence exceeds ``max_kl``, or has no number at all: at the start of a run, an alarm.

    Teachers of the student's own origin begin near 0.04 nat per token, foreign ones near 0.19 (§4.9).
    """
    return tuple(name for name, report in reports.items() if report.kl is None or report.kl > max_kl)
