"""Reward scalarisation: R = Σ w_k R_k − Σ λ_j P_j, in one fixed order (algorithms.md §4.13).

The components are kept beside the scalar, so that the scalar can be computed again from them, bit for bit. Sums come
before any normalisation over a group. A required component that is missing makes the sample invalid (infrastructure),
never zero; a missing optional one is left out, the present weights are scaled up, and that is flagged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from rolltape.schema.errors import ValidationError

SCALARISER_VERSION: Final = "weighted-sum-1"
"""Changes whenever the same components would give another scalar."""

Source = Literal["rule", "orm", "grm", "penalty"]
Status = Literal["ok", "missing", "parse_error", "timeout"]
State = Literal["earned", "missing", "invalid"]

RENORMALISED: Final = "renormalised"
NON_FINITE: Final = "non_finite"
OUT_OF_BOUNDS: Final = "out_of_bounds"
REQUIRED_MISSING: Final = "required_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """One component of a reward; the fields are those of ``reward_assigned.components``.

    ``weight`` is w_k, or λ_j for a penalty. ``value`` is null unless ``status`` is ok. ``lower`` and ``upper`` bound a
    valid value (null: unbounded). ``required`` says whether the sample is invalid without it.

    Example: ``RewardComponent(name="exact", source="rule", value=1.0, weight=0.5, required=True)``.
    """

    name: str
    source: Source
    value: float | None
    weight: float
    required: bool = False
    status: Status = "ok"
    dimension: str | None = None
    scorer: str | None = None
    scorer_version: str | None = None
    latency_s: float | None = None
    reason: str | None = None
    lower: float | None = None
    upper: float | None = None

    @property
    def is_present(self) -> bool:
        """Whether it was scored."""
        return self.status == "ok" and self.value is not None

    def to_row(self) -> dict[str, Any]:
        """The form that ``reward_assigned.components`` stores."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RewardComponent:
        """The inverse of :meth:`to_row`; a null weight counts as 1, a null ``required`` as false."""
        given = {name: value for name, value in row.items() if value is not None}
        return cls(**{"value": None, "weight": 1.0, **given})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalarised:
    """A scalar (null unless earned), its state, and named flags in alphabetical order."""

    scalar: float | None
    state: State
    flags: tuple[str, ...] = ()


def scalarise(components: Iterable[RewardComponent]) -> Scalarised:
    """The scalar of ``components``, whatever their order: they are summed by (name, dimension, source).

    * no component with any weight present, penalties aside: ``missing``;
    * a required one missing, or any present value NaN, infinite or out of its bounds: ``invalid`` (never coerced);
    * otherwise ``earned``: Σ w_k R_k · (Σ all w / Σ present w) − Σ λ_j P_j in float64, left to right.

    Raises:
        ValidationError: a weight is not finite or is negative, or two components have the same key.
    """
    ordered = _ordered(components)
    if flags := _invalidity(ordered):
        return Scalarised(scalar=None, state="invalid", flags=flags)
    gains = [component for component in ordered if component.source != "penalty"]
    present = [component for component in gains if component.is_present]
    if not present:
        return Scalarised(scalar=None, state="missing")
    total = _weighted_sum(present)
    complete = len(present) == len(gains)
    if not complete:
        present_weight = _sum(gain.weight for gain in present)
        if present_weight == 0.0:
            return Scalarised(scalar=None, state="missing")
        total *= _sum(gain.weight for gain in gains) / present_weight
    scalar = total - _weighted_sum([part for part in ordered if part.source == "penalty" and part.is_present])
    if not math.isfinite(scalar):
        return Scalarised(scalar=None, state="invalid", flags=(NON_FINITE,))
    return Scalarised(scalar=scalar, state="earned", flags=() if complete else (RENORMALISED,))


def _ordered(components: Iterable[RewardComponent]) -> list[RewardComponent]:
    ordered = sorted(components, key=_key)
    for one, other in pairwise(ordered):
        if _key(one) == _key(other):
            raise ValidationError(
                f"expected one reward component for each (name, dimension, source), got {_key(one)} twice"
            )
    for component in ordered:
        if not math.isfinite(component.weight) or component.weight < 0:
            raise ValidationError(
                f"expected a finite weight of 0 or more for reward component {component.name}, got {component.weight}"
            )
    return ordered


def _key(component: RewardComponent) -> tuple[str, str, str]:
    return component.name, component.dimension or "", component.source


def _invalidity(components: list[RewardComponent]) -> tuple[str, ...]:
    flags = set()
    for component in components:
        if not component.is_present:
            flags |= {REQUIRED_MISSING} if component.required else set()
        elif component.value is None or not math.isfinite(component.value):
            flags.add(NON_FINITE)
        elif not _within(component.value, component.lower, component.upper):
            flags.add(OUT_OF_BOUNDS)
    return tuple(sorted(flags))


def _within(value: float, lower: float | None, upper: float | None) -> bool:
    return (lower is None or value >= lower) and (upper is None or value <= upper)


def _weighted_sum(components: Iterable[RewardComponent]) -> float:
    return _sum(component.weight * (component.value or 0.0) for component in components)


def _sum(numbers: Iterable[float]) -> float:
    """Left to right in float64: ``sum`` compensates rounding from Python 3.12 on, which would change the bits."""
    total = 0.0
    for number in numbers:
        total += number
    return total
