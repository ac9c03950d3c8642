"""What a verification found: per contract what was checked, what broke, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from rolltape.schema.cursor import Cursor

Contract = Literal["token", "probability", "index", "version", "quantization", "lifecycle", "log"]

CONTRACTS: Final[tuple[Contract, ...]] = (
    "token",
    "probability",
    "index",
    "version",
    "quantization",
    "lifecycle",
    "log",
)
"""The six numeric contracts of design §9, and what the log itself promises (§5.5, §5.6)."""

MAX_FINDINGS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that broke.

    Attributes:
        contract: which contract.
        check: which check of it, e.g. ``prefix_proof``.
        message: what was expected, what came, where.
        trajectory_id: the trajectory, where it is about one.
        attempt: its attempt.
        event_id: the event, where it is about one.
        tensor: the tensor that differs, e.g. ``rollout_log_probs``.
        index: the first differing index of the context or tensor, from 0.
    """

    contract: Contract
    check: str
    message: str
    trajectory_id: str | None = None
    attempt: int | None = None
    event_id: str | None = None
    tensor: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check: how much it looked at, what it counted on the way, what broke.

    ``findings`` holds the first of them; ``num_broken`` counts them all.
    """

    contract: Contract
    check: str
    doc: str
    num_checked: int
    unit: str
    num_broken: int = 0
    findings: tuple[Finding, ...] = ()
    counts: Mapping[str, int | float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def ok(self) -> bool:
        """Whether nothing broke."""
        return self.num_broken == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All checks over one state of a tape.

    ``cursor`` is where the next incremental verification starts.
    """

    lake_version: int
    since: Cursor | None
    cursor: Cursor
    checks: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing broke."""
        return all(check.ok for check in self.checks)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What broke, check by check."""
        return tuple(finding for check in self.checks for finding in check.findings)

    def check(self, name: str) -> CheckResult:
        """The check called ``name``.

        Raises:
            KeyError: there is none.
        """
        for check in self.checks:
            if check.check == name:
                return check
        raise KeyError(name)

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dictionary a check, for tables and JSON lines."""
        return [
            {
                "contract": check.contract,
                "check": check.check,
                "ok": check.ok,
                "num_checked": check.num_checked,
                "unit": check.unit,
                "num_broken": check.num_broken,
                "counts": dict(check.counts),
                "findings": [finding.message for finding in check.findings],
            }
            for check in self.checks
        ]
