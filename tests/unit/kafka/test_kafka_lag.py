"""How far a sink is behind, as its metrics show it: also while it waits for the lake and gets to nothing else."""

from __future__ import annotations

import re

import pytest

from rolltape.ingest.kafka import metrics as module
from rolltape.ingest.kafka.lag import Lag
from rolltape.ingest.kafka.metrics import SinkMetrics
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import ConfigError

PLACE = Partition("rollout", 0)
OTHER = Partition("rollout", 1)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def metrics(clock: Clock) -> SinkMetrics:
    made = SinkMetrics()
    made.assign([PLACE, OTHER])
    return made


def shown(metrics: SinkMetrics, name: str, place: Partition = PLACE) -> float:
    labels = f'{{partition="{place.partition}",topic="{place.topic}"}}'
    (found,) = re.findall(rf"^rolltape_sink_{name}{re.escape(labels)} (\S+)$", metrics.text(), re.MULTILINE)
    return float(found)


def test_age_grows_while_nothing_is_reported(metrics: SinkMetrics, clock: Clock) -> None:
    lag = Lag(metrics)
    lag.start({PLACE: 5, OTHER: 0}, {PLACE: 5, OTHER: 0})
    assert shown(metrics, "age_seconds") == 0
    lag.read(PLACE, 999_000)
    lag.read(PLACE, 1_000_000)
    # The lake is away from here on: no commit, no report.
    clock.now_s += 600
    assert shown(metrics, "age_seconds") == 601
    assert shown(metrics, "age_seconds", OTHER) == 0
    # It lets itself be read again, and still takes no commit: the same record waits.
    lag.start({PLACE: 5, OTHER: 0}, {PLACE: 7, OTHER: 0})
    assert (shown(metrics, "age_seconds"), shown(metrics, "lag_records")) == (601, 2)
    lag.read(PLACE, 999_000)
    lag.read(PLACE, 1_000_000)
    lag.committed()
    lag.report({PLACE: 7, OTHER: 0}, {PLACE: 7, OTHER: 0})
    assert (shown(metrics, "age_seconds"), shown(metrics, "lag_records")) == (0, 0)


def test_what_comes_after_a_commit_is_younger_than_what_was_committed(metrics: SinkMetrics, clock: Clock) -> None:
    lag = Lag(metrics)
    lag.start({PLACE: 0}, {PLACE: 9})
    for time_ms in (900_000, 950_000):
        lag.read(PLACE, time_ms)
    lag.committed()
    lag.report({PLACE: 2}, {PLACE: 9})
    assert (shown(metrics, "age_seconds"), shown(metrics, "lag_records")) == (50, 7)


def test_a_record_behind_a_gap_is_as_old_as_it_is(metrics: SinkMetrics, clock: Clock) -> None:
    lag = Lag(metrics)
    lag.start({PLACE: 0}, {PLACE: 2})
    lag.report({PLACE: 0}, {PLACE: 2}, {PLACE: 400_000})
    assert shown(metrics, "age_seconds") == 600


def test_a_partition_that_went_is_not_shown_and_comes_back_as_new(metrics: SinkMetrics, clock: Clock) -> None:
    lag = Lag(metrics)
    lag.read(PLACE, 100_000)
    metrics.assign([OTHER])
    assert 'partition="0"' not in "".join(re.findall(r"rolltape_sink_age_seconds\{.*", metrics.text()))
    metrics.assign([PLACE, OTHER])
    assert shown(metrics, "age_seconds") == 0


@pytest.mark.parametrize("port", [70_000, -1])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--metrics-port: expected a free port, got {port}"):
        SinkMetrics().serve(port)
