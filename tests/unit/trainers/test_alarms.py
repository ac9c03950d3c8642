"""Alarms over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rolltape.trainers.alarms import Alarms
from rolltape.trainers.config import TrainerConfig

NAN = float("nan")


def alarms(**limits: Any) -> Alarms:
    return Alarms(TrainerConfig(**limits))


def raised(of: Alarms, *steps: Mapping[str, float], first: int = 1) -> list[tuple[str, int]]:
    return [(alarm.alarm, alarm.step) for alarm in of.fold(enumerate(steps, first))]


def test_none_without_limits() -> None:
    assert raised(alarms(), {"entropy_mean": 0.0, "trusted_frac": 0.0, "mismatch_abs_mean": 9.0}) == []


@pytest.mark.parametrize(
    ("limit", "name", "metric", "good", "bad"),
    [
        ({"alarm_entropy_below": 0.5}, "entropy_collapse", "entropy_mean", 1.0, 0.0),
        ({"alarm_trusted_below": 0.5}, "trusted_share", "trusted_frac", 1.0, 0.0),
        ({"alarm_mismatch_above": 0.5}, "mean_abs_delta", "mismatch_abs_mean", 0.0, 1.0),
    ],
)
def test_a_limit_on_the_moving_average(
    limit: dict[str, float], name: str, metric: str, good: float, bad: float
) -> None:
    """With half of the past and a good value of 1: 1, 0.5 (the limit), 0.25 (passed), 0.125, 0.56, 0.78, 0.39, 0.2."""
    watched = alarms(**limit, alarm_ema=0.5)
    steps = [{metric: value} for value in (good, bad, bad, bad, good, good, bad, bad)]
    assert raised(watched, *steps) == [(name, 3), (name, 7)]


def test_one_odd_batch_is_no_alarm() -> None:
    watched = alarms(alarm_entropy_below=0.5, alarm_ema=0.9)
    values = [1.0] * 5 + [0.0] + [1.0] * 5
    assert raised(watched, *({"entropy_mean": value} for value in values)) == []


def test_steps_without_the_metric_or_a_number_count_nothing() -> None:
    watched = alarms(alarm_trusted_below=0.5, alarm_ema=0.0)
    assert raised(watched, {"trusted_frac": 1.0}, {}, {"trusted_frac": NAN}, {"trusted_frac": 0.4}) == [
        ("trusted_share", 4)
    ]


def test_the_values_that_are_told() -> None:
    (alarm,) = alarms(alarm_entropy_below=0.5, alarm_ema=0.5).step(7, {"entropy_mean": 0.25})
    assert (alarm.step, alarm.value, alarm.threshold) == (7, 0.25, 0.5)
    fields = alarm.fields("run", 1)
    assert (fields["alarm"], fields["severity"], fields["value"]) == ("entropy_collapse", "warning", 0.25)
    assert "step 7: expected a mean entropy" in fields["detail"]


def domain(name: str, kl: float | None, tokens: float = 8.0) -> dict[str, float]:
    found = {f"domain/{name}/tokens": tokens, f"domain/{name}/gap_abs": 1.0}
    return found if kl is None else {**found, f"domain/{name}/kl": kl}


def test_a_domain_is_looked_at_where_it_first_appears() -> None:
    watched = alarms(alarm_domain_kl_above=0.1)
    own, foreign = domain("own", 0.04), domain("foreign", 0.19)
    found = watched.fold([(1, own), (2, {**domain("own", 9.0), **foreign}), (3, foreign)])
    assert [(alarm.alarm, alarm.step, alarm.subject, alarm.value) for alarm in found] == [
        ("domain_kl", 2, "foreign", 0.19)
    ]


def test_a_domain_at_its_limit_is_none_and_one_without_a_number_is_one() -> None:
    watched = alarms(alarm_domain_kl_above=0.1)
    found = watched.step(1, {**domain("at", 0.1), **domain("none", None), **domain("nan", NAN), **domain("not", 1, 0)})
    assert [(alarm.subject, alarm.value) for alarm in found] == [("nan", None), ("none", None)]
    assert [alarm.subject for alarm in watched.step(2, domain("not", 1.0))] == ["not"]


def test_a_domain_whose_tokens_nobody_scored_is_told_by_its_exact_divergence() -> None:
    """As under `opd_form` full: no log-prob of a sampled token is on the tape, so there is no estimate of it."""
    watched = alarms(alarm_domain_kl_above=0.1)
    near, far = {"domain/near/divergence": 0.04}, {"domain/far/divergence": 0.19}
    found = watched.step(1, {**domain("near", NAN), **near, **domain("far", None), **far})
    assert [(alarm.subject, alarm.value) for alarm in found] == [("far", 0.19)]


def test_a_resumed_run_goes_on_where_it_was_and_names_the_same_alarms() -> None:
    limits: dict[str, Any] = {"alarm_entropy_below": 0.5, "alarm_domain_kl_above": 0.1, "alarm_ema": 0.5}
    steps: list[dict[str, float]] = [{"entropy_mean": value, **domain("d", 0.3)} for value in (1, 0, 0, 0, 0, 1, 1, 0)]
    numbered: list[tuple[int, Mapping[str, float]]] = list(enumerate(steps, 1))
    whole = alarms(**limits).fold(numbered)
    for cut in range(len(steps)):
        resumed = alarms(**limits)
        past, later = resumed.fold(numbered[:cut]), resumed.fold(numbered[cut:])
        assert (*past, *later) == whole
    ids = [alarm.event_id("run", 1) for alarm in whole]
    assert len(set(ids)) == len(ids) == 3
    assert ids == [alarm.event_id("run", 1) for alarm in alarms(**limits).fold(numbered)]
    assert ids != [alarm.event_id("other", 1) for alarm in whole]
    again = [alarm.event_id("run", 2) for alarm in whole]
    assert not set(ids) & set(again), "a step that is trained again in another epoch may raise it with another value"
