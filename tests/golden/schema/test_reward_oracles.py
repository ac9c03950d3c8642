"""Reward scalarisation against the worked numbers of algorithms.md §4.13."""

from __future__ import annotations

import pytest

from rolltape.schema.reward import RewardComponent, scalarise

RULE = RewardComponent(name="rule", source="rule", value=1.0, weight=0.5, required=True)
ORM = RewardComponent(name="orm", source="orm", value=0.8, weight=0.3, required=True)
GRM = RewardComponent(name="grm", source="grm", value=0.6, weight=0.2)
GRM_MISSING = RewardComponent(name="grm", source="grm", value=None, weight=0.2, status="timeout")
PENALTY = RewardComponent(name="length", source="penalty", value=0.25, weight=0.1)


def test_all_components_present() -> None:
    result = scalarise([RULE, ORM, GRM, PENALTY])
    assert result.scalar == pytest.approx(0.835, abs=1e-15)
    assert (result.state, result.flags) == ("earned", ())


def test_a_missing_optional_component_is_renormalised_and_flagged() -> None:
    result = scalarise([RULE, ORM, GRM_MISSING, PENALTY])
    assert result.scalar == pytest.approx(0.900, abs=1e-15)
    assert result.scalar != pytest.approx(0.715, abs=1e-3)  # what counting it as 0 would give
    assert (result.state, result.flags) == ("earned", ("renormalised",))


def test_a_missing_required_component_is_no_zero() -> None:
    required = RewardComponent(name="grm", source="grm", value=None, weight=0.2, required=True, status="parse_error")
    result = scalarise([RULE, ORM, required, PENALTY])
    assert (result.scalar, result.state, result.flags) == (None, "invalid", ("required_missing",))
