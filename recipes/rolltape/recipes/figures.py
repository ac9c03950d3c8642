"""What a finished run's tape says of it: held-out answers before and after, steps, time, trusted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

from rolltape.schema.errors import ReplayError
from rolltape.store.lake import Lake
from rolltape.trainers.history import RunHistory
from rolltape.trainers.records import metric_values

# A held-out answer is right where the environment's own component `exact` is 1. Evaluations of version 0 are recorded
# for step 0, those of the last version for the last step.
_HELDOUT = """
    WITH judged AS (
        SELECT t.training_step AS step, p.domain, r.event_id, unnest(r.components) AS component
        FROM trajectories t
        JOIN problems p ON p.run_id = t.run_id AND p.problem_id = t.problem_id
        JOIN rewards r ON r.trajectory_id = t.trajectory_id AND r.attempt = t.attempt
        WHERE t.run_id = '{run_id}' AND t.purpose = 'evaluate' AND t.is_current AND t.is_live
          AND r.target_event_id IS NULL AND NOT r.is_superseded
    )
    SELECT domain, step = 0 AS is_first, count(DISTINCT event_id) AS num_answers,
           count(DISTINCT event_id) FILTER (WHERE component.name = 'exact' AND component.value = 1) AS num_right
    FROM judged GROUP BY ALL ORDER BY domain, is_first
"""
# Of a run that was broken off and went on later, the pause is not counted.
_SECONDS = """
    WITH gaps AS (
        SELECT date_diff('millisecond', lag(recorded_at) OVER (ORDER BY recorded_at), recorded_at) AS gap
        FROM events WHERE run_id = '{run_id}'
    )
    SELECT sum(least(gap, {longest_gap_ms})) / 1e3 FROM gaps WHERE gap IS NOT NULL
"""
_LONGEST_GAP_MS = 60_000
CURVE_POINTS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run. Shares are of held-out problems answered exactly right at temperature 0."""

    run_id: str
    seed: int
    before: Mapping[str, float]
    """By domain, version 0."""
    after: Mapping[str, float]
    """By domain, the last version."""
    num_steps: int
    seconds: float
    """From the run's first event to its last, starts of its processes included; silence counts a minute at most."""
    trusted_share: float | None
    """Of all action tokens that were trained on; None: none were."""
    curve: tuple[float, ...] = ()
    """Share of exact answers among the rollouts of each ``1/CURVE_POINTS`` of the steps, in order."""

    def mean_after(self) -> float:
        """Mean over the domains."""
        return sum(self.after.values()) / len(self.after)

    def mean_before(self) -> float:
        """Mean over the domains."""
        return sum(self.before.values()) / len(self.before)


def is_complete(lake: Lake, run_id: str) -> bool:
    """Whether the run has ended and its last version was evaluated on the held-out problems."""
    try:
        history = RunHistory.read(lake, run_id)
    except ReplayError:
        return False
    if not history.steps:
        return False
    last = history.steps[history.last_step]
    evaluated = lake.read("evaluation_completed", run_id=run_id)["evaluation_completed"].to_pylist()
    is_final = metric_values(last).get("final") == 1.0
    return is_final and last["version_out"] in {row["version"] for row in evaluated}


def figures_of(lake: Lake, run_id: str) -> Figures:
    """Read the figures of a complete run from its tape."""
    history = RunHistory.read(lake, run_id)
    quoted = run_id.replace("'", "''")
    found = lake.sql(_HELDOUT.format(run_id=quoted)).arrow().to_pylist()
    before, after = before_and_after(found)
    seconds = lake.sql(_SECONDS.format(run_id=quoted, longest_gap_ms=_LONGEST_GAP_MS)).arrow().column(0)[0].as_py()
    return Figures(
        run_id=run_id,
        seed=history.started["seed"],
        before=before,
        after=after,
        num_steps=history.last_step,
        seconds=float(seconds),
        trusted_share=_trusted(history),
        curve=curve_of([metric_values(row).get("reward_component/exact") for row in history.steps.values()]),
    )


def before_and_after(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Share of right answers by domain, of version 0 and of the last version.

    A run that ended while its critic alone was trained has one version, evaluated once: it is both.

    >>> before_and_after([{"domain": "d", "is_first": True, "num_right": 1, "num_answers": 4}])
    ({'d': 0.25}, {'d': 0.25})
    """
    before, after = (
        {row["domain"]: row["num_right"] / row["num_answers"] for row in rows if row["is_first"] == is_first}
        for is_first in (True, False)
    )
    return before, after or before


def curve_of(shares: Sequence[float | None]) -> tuple[float, ...]:
    """Means of ``CURVE_POINTS`` stretches of equal length; fewer where there are fewer steps. None is left out.

    >>> curve_of([0.0, None, 0.5])
    (0.0, 0.5)
    """
    known = [share for share in shares if share is not None]
    num_points = min(len(known), CURVE_POINTS)
    ends = [len(known) * point // num_points for point in range(num_points + 1)] if num_points else []
    return tuple(fmean(known[first:end]) for first, end in pairwise(ends))


def _trusted(history: RunHistory) -> float | None:
    steps = [metric_values(row) for row in history.steps.values()]
    total = sum(metrics.get("action_tokens", 0.0) for metrics in steps)
    return sum(metrics.get("trusted_tokens", 0.0) for metrics in steps) / total if total else None
