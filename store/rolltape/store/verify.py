"""``verify``: check the numeric contracts over a tape and say what was checked, what broke and where (design §9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rolltape.schema.cursor import Cursor
from rolltape.store.lake import Lake
from rolltape.store.sources import LakeSource
from rolltape.store.verify_context import Check, Context
from rolltape.store.verify_log import LOG_CHECKS
from rolltape.store.verify_objects import OBJECT_CHECKS
from rolltape.store.verify_probability import PROBABILITY_CHECKS
from rolltape.store.verify_report import CheckResult, Finding, VerifyReport
from rolltape.store.verify_tokens import TOKEN_CHECKS
from rolltape.store.verify_versions import VERSION_CHECKS

__all__ = ["CHECKS", "CheckResult", "Finding", "VerifyReport", "run_checks", "verify"]

CHECKS: Final[tuple[Check, ...]] = (
    *TOKEN_CHECKS,
    *PROBABILITY_CHECKS,
    *[check for check in OBJECT_CHECKS if check.contract == "index"],
    *VERSION_CHECKS,
    *[check for check in OBJECT_CHECKS if check.contract != "index"],
    *LOG_CHECKS,
)


def verify(
    lake: Lake, since: Cursor | None = None, *, progress: Callable[[CheckResult], None] | None = None
) -> VerifyReport:
    """Check a lake at its newest version.

    Args:
        lake: the lake; it is only read.
        since: check only trajectories with events at or after this cursor, and only such batches, versions and files
            (the ``cursor`` of an earlier report). Lanes, offsets, event ids and conservation are always checked whole.
        progress: called with each check as it ends.
    """
    source = LakeSource(lake)
    snapshot = source.snapshot
    context = Context(source, since=since, transactions=snapshot.transactions, location=lake.location)
    return VerifyReport(
        lake_version=snapshot.version,
        since=since,
        cursor=snapshot.cursor,
        checks=run_checks(context, progress),
    )


def run_checks(context: Context, progress: Callable[[CheckResult], None] | None = None) -> tuple[CheckResult, ...]:
    """All checks, in the order of the contracts."""
    results = []
    for check in CHECKS:
        result = check.result(context)
        results.append(result)
        if progress is not None:
            progress(result)
    return tuple(results)
