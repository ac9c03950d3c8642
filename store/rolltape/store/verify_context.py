"""What every check of a verification works with: the views, what is new, and a way to turn rows into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rolltape.schema.cursor import Cursor
from rolltape.store.duck import literal
from rolltape.store.location import Location
from rolltape.store.projections import VIEW_NAMES
from rolltape.store.sources import EventSource
from rolltape.store.statement import read_statement
from rolltape.store.verify_report import MAX_FINDINGS, CheckResult, Contract, Finding
from rolltape.store.workspace import Workspace

NEW_EVENTS: Final = "new_trajectories"


class Context:
    """One verification.

    Args:
        source: the events.
        since: only what was archived at or after this cursor is new; None: everything is.
        transactions: the table's application transactions; None where there is no table.
        location: the lake, for its files; None where there is none.
    """

    def __init__(
        self,
        source: EventSource,
        *,
        since: Cursor | None = None,
        transactions: Mapping[str, int] | None = None,
        location: Location | None = None,
    ) -> None:
        self.source = source
        self.since = since
        self.transactions = transactions
        self.location = location
        self.trajectory_ids = None if since is None else self._new_trajectories(source, since)
        # What is verified is what lies in the files now, not what a statement folded before.
        self._workspace = Workspace(source, trajectory_ids=self.trajectory_ids, share_folds=False)

    def new(self, alias: str = "") -> str:
        """The condition that a row of an event view is new."""
        if self.since is None:
            return "TRUE"
        dot = f"{alias}." if alias else ""
        before = [
            f"({dot}log_topic = {literal(place.topic)} AND {dot}log_partition = {place.partition}"
            f" AND {dot}log_offset < {self.since[place]})"
            for place in self.since
        ]
        return f"NOT ({' OR '.join(before)})" if before else "TRUE"

    def query(self, select: str) -> pa.Table:
        """Run a SELECT over the views. ``trajectories``, ``segments`` and ``tokens`` hold what is new alone."""
        return self._workspace.table(select, read_statement(select, VIEW_NAMES).tables)

    def rows(self, select: str) -> list[dict[str, Any]]:
        """The rows of a SELECT, for answers of few rows."""
        found: list[dict[str, Any]] = self.query(select).to_pylist()
        return found

    def one(self, select: str) -> dict[str, Any]:
        """The single row of a SELECT of aggregates; a null counts as 0."""
        (row,) = self.rows(select)
        return {name: 0 if value is None else value for name, value in row.items()}

    def _new_trajectories(self, source: EventSource, since: Cursor) -> frozenset[str]:
        self.since = since
        workspace = Workspace(source)
        table = workspace.table(
            f"SELECT DISTINCT trajectory_id FROM events WHERE trajectory_id IS NOT NULL AND {self.new()}", ["events"]
        )
        return frozenset(table["trajectory_id"].to_pylist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check: its name, its contract, one line of meaning, and the function that makes it."""

    contract: Contract
    name: str
    doc: str
    unit: str
    run: Callable[[Context], Outcome]

    def result(self, context: Context) -> CheckResult:
        """Run it."""
        outcome = self.run(context)
        findings = tuple(
            Finding(contract=self.contract, check=self.name, **fields)
            for fields, _ in zip(outcome.broken, range(MAX_FINDINGS), strict=False)
        )
        return CheckResult(
            contract=self.contract,
            check=self.name,
            doc=self.doc,
            num_checked=outcome.num_checked,
            unit=self.unit,
            num_broken=len(outcome.broken),
            findings=findings,
            counts=outcome.counts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check found: how much it looked at, the fields of each finding, and what it counted."""

    num_checked: int
    broken: list[dict[str, Any]]
    counts: Mapping[str, int | float]


def outcome(
    num_checked: int, broken: Iterable[dict[str, Any]] = (), counts: Mapping[str, int | float] | None = None
) -> Outcome:
    """Short form of :class:`Outcome`."""
    return Outcome(num_checked=num_checked, broken=list(broken), counts=counts or {})


def at_trajectory(row: Mapping[str, Any], message: str, **more: Any) -> dict[str, Any]:
    """Fields of a finding about an attempt; ``row`` names it."""
    return {"trajectory_id": row["trajectory_id"], "attempt": row["attempt"], "message": message, **more}
