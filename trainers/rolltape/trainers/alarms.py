"""Alarms over a run's steps: what a person should look at while it trains (algorithms.md §4.9).

A pure fold over the metrics of completed steps, in order. Entropy, trusted share and mismatch are watched as moving
averages, so that one odd batch is no alarm. An alarm is raised when its limit is passed and not again before the
average has come back. A domain's divergence is looked at once, where the domain first appears: teachers of the
student's own origin begin near 0.04 nat per token, foreign ones near 0.19.

A run that is resumed folds the steps that its tape has, and records those alarms that are missing there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rolltape.schema.identity import derived_id
from rolltape.trainers.config import TrainerConfig

ENTROPY: Final = "entropy_collapse"
TRUSTED: Final = "trusted_share"
MISMATCH: Final = "mean_abs_delta"
DOMAIN_KL: Final = "domain_kl"

_DOMAIN: Final = "domain/"
_KL: Final = "/kl"
_DIVERGENCE: Final = "/divergence"  # the exact one, where no sampled token is scored
_TOKENS: Final = "/tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One alarm, raised after ``step``."""

    alarm: str
    step: int
    value: float | None
    """The moving average, or the divergence; None where it has no number."""
    threshold: float
    detail: str
    subject: str = ""
    """The domain, where it is one's."""

    def event_id(self, run_id: str, run_epoch: int) -> str:
        """The same for the same alarm of the same step, whoever raises it.

        ``run_epoch`` is the step's: a run that went back trains a step again, and may find another value there.
        """
        return derived_id(run_id, "alarm_raised", self.alarm, self.subject, run_epoch, self.step)

    def fields(self, run_id: str, run_epoch: int) -> dict[str, Any]:
        """The columns of ``alarm_raised``."""
        return {
            "event_id": self.event_id(run_id, run_epoch),
            "alarm": self.alarm,
            "severity": "warning",
            "value": self.value,
            "threshold": self.threshold,
            "detail": self.detail,
        }


@dataclass(slots=True)
class _Watch:
    """One metric's moving average and its limit."""

    alarm: str
    metric: str
    limit: float
    is_floor: bool
    what: str
    average: float | None = None
    is_raised: bool = False

    def step(self, step: int, metrics: Mapping[str, float], keep: float) -> Alarm | None:
        value = metrics.get(self.metric)
        if value is None or math.isnan(value):
            return None
        self.average = value if self.average is None else keep * self.average + (1.0 - keep) * value
        was, self.is_raised = self.is_raised, self.average < self.limit if self.is_floor else self.average > self.limit
        if was or not self.is_raised:
            return None
        side = "at least" if self.is_floor else "at most"
        return Alarm(
            alarm=self.alarm,
            step=step,
            value=self.average,
            threshold=self.limit,
            detail=f"step {step}: expected {self.what} of {side} {self.limit:g} (moving average), got {self.average:g}",
        )


class Alarms:
    """The alarms of one run. Where the configuration sets no limit there is none."""

    def __init__(self, config: TrainerConfig) -> None:
        self._keep = config.alarm_ema
        self._kl_limit = config.alarm_domain_kl_above
        self._domains: set[str] = set()
        limits = (
            (ENTROPY, "entropy_mean", config.alarm_entropy_below, True, "a mean entropy (nat)"),
            (TRUSTED, "trusted_frac", config.alarm_trusted_below, True, "a share of trusted tokens"),
            (MISMATCH, "mismatch_abs_mean", config.alarm_mismatch_above, False, "a mean |trainer - rollout| (nat)"),
        )
        self._watches = [
            _Watch(alarm, metric, limit, is_floor, what)
            for alarm, metric, limit, is_floor, what in limits
            if limit is not None
        ]

    def step(self, step: int, metrics: Mapping[str, float]) -> tuple[Alarm, ...]:
        """The alarms that a completed step raises; call it once for each step, in order."""
        found = [watch.step(step, metrics, self._keep) for watch in self._watches]
        return (*(alarm for alarm in found if alarm is not None), *self._domain_alarms(step, metrics))

    def fold(self, steps: Iterable[tuple[int, Mapping[str, float]]]) -> tuple[Alarm, ...]:
        """The alarms of all steps that a run has completed: those that its tape lacks are to be recorded now."""
        return tuple(alarm for step, metrics in steps for alarm in self.step(step, metrics))

    def _domain_alarms(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Domains that appear for the first time, too far from their teacher, or at no number at all."""
        if self._kl_limit is None:
            return []
        names = sorted(
            name.removeprefix(_DOMAIN).removesuffix(_TOKENS)
            for name, value in metrics.items()
            if name.startswith(_DOMAIN) and name.endswith(_TOKENS) and value > 0
        )
        found = []
        for name in names:
            if name in self._domains:
                continue
            self._domains.add(name)
            value = _first_number(metrics, (f"{_DOMAIN}{name}{_KL}", f"{_DOMAIN}{name}{_DIVERGENCE}"))
            if value is not None and value <= self._kl_limit:
                continue
            shown = "no number" if value is None else f"{value:g}"
            found.append(
                Alarm(
                    alarm=DOMAIN_KL,
                    step=step,
                    value=value,
                    threshold=self._kl_limit,
                    detail=f"step {step}: expected domain {name!r} to begin at most {self._kl_limit:g} nat per token "
                    f"from its teacher, got {shown}; is the teacher of another origin?",
                    subject=name,
                )
            )
        return found


def _first_number(metrics: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The first of these metrics that is a number."""
    return next((metrics[name] for name in names if not math.isnan(metrics.get(name, math.nan))), None)
