"""The live line of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rolltape.schema.runline import RunLine

LINE = RunLine.from_pairs([(3, 8), (1, 0), (2, 12)])


def test_a_rewind_abandons_later_steps_of_all_older_epochs() -> None:
    assert LINE.epoch == 3
    assert [LINE.is_live_step(1, step) for step in (8, 9)] == [True, False]
    assert [LINE.is_live_step(2, step) for step in (8, 9, 13)] == [True, False, False]
    assert LINE.is_live_step(3, 100)


def test_a_dispatch_stays_live_for_the_first_step_of_the_new_epoch() -> None:
    assert [LINE.is_live_dispatch(2, step) for step in (9, 10)] == [True, False]


def test_a_run_that_has_not_started_has_epoch_zero() -> None:
    assert RunLine(()).epoch == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 60))
def test_every_step_is_live_in_the_newest_epoch_and_never_after_a_lower_bound(bounds: list[int], step: int) -> None:
    line = RunLine.from_pairs([(1, 0), *((epoch, bound) for epoch, bound in enumerate(bounds, 2))])
    assert line.is_live_step(line.epoch, step)
    for epoch in range(1, line.epoch):
        assert line.is_live_step(epoch, step) == (step <= min(bounds[epoch - 1 :]))
