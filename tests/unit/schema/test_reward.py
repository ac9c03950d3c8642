"""Reward scalarisation: earned, missing and invalid are three different things."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rolltape.schema.errors import ValidationError
from rolltape.schema.kinds import kind_named
from rolltape.schema.reward import RewardComponent, Scalarised, scalarise


def part(name: str = "a", value: float | None = 1.0, **fields: Any) -> RewardComponent:
    return RewardComponent(**{"name": name, "source": "rule", "value": value, "weight": 1.0, **fields})


MISSING = Scalarised(scalar=None, state="missing")


def test_nothing_scored_is_missing() -> None:
    assert scalarise([]) == MISSING
    assert scalarise([part(value=None, status="missing")]) == MISSING
    assert scalarise([part(source="penalty")]) == MISSING


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_invalid_never_coerced(value: float) -> None:
    assert scalarise([part(), part("b", value)]) == Scalarised(scalar=None, state="invalid", flags=("non_finite",))
    assert scalarise([part(), part("b", value, source="penalty")]).state == "invalid"


@pytest.mark.parametrize(
    ("value", "state"), [(0.0, "earned"), (1.0, "earned"), (1.0000001, "invalid"), (-0.1, "invalid")]
)
def test_bounds_are_inclusive(value: float, state: str) -> None:
    result = scalarise([part(value=value, lower=0.0, upper=1.0)])
    assert result.state == state
    assert result.flags == (() if state == "earned" else ("out_of_bounds",))


def test_a_sum_that_overflows_is_invalid() -> None:
    assert scalarise([part(value=1e308), part("b", 1e308)]).flags == ("non_finite",)


def test_weights_are_finite_and_keys_unique() -> None:
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValidationError, match="weight"):
            scalarise([part(weight=weight)])
    with pytest.raises(ValidationError, match="twice"):
        scalarise([part(), part(value=0.0)])
    assert scalarise([part(dimension="x"), part(dimension="y")]).scalar == 2.0


def test_a_missing_penalty_is_left_out() -> None:
    assert scalarise([part(), part("p", None, source="penalty", status="timeout")]).scalar == 1.0


def test_only_zero_weights_present_with_one_missing() -> None:
    """There is nothing to scale up: no division by zero becomes a reward."""
    result = scalarise([part(weight=0.0), part("b", None, status="missing")])
    assert result == MISSING


def test_a_component_is_stored_with_all_its_fields() -> None:
    columns = {spec.name: spec.type for spec in kind_named("reward_assigned").columns}
    stored = [field.name for field in columns["components"].value_type.fields]
    component = part(dimension="d", scorer="s", latency_s=0.5)
    assert sorted(component.to_row()) == sorted(stored)
    assert RewardComponent.from_row(component.to_row()) == component
    assert RewardComponent.from_row({"name": "a", "source": "rule"}) == part(value=None)
