"""A report per domain of a distilled batch (algorithms.md §4.9).

Which teacher a domain has is the tape's to say: the scoring service routes (rollout), and the trainer takes the routed
teacher's scores alone (:mod:`rolltape.trainers.score_book`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolltape.trainers.distill import Gap
from rolltape.trainers.losses import check_lengths


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
