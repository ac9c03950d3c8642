"""The order of weight sync inside an engine."""

from __future__ import annotations

import itertools

import pytest

from rolltape.rollout.engine import PolicyVersion
from rolltape.rollout.slots import VersionSlots
from rolltape.schema.errors import EngineError


def version(number: int, *, epoch: int = 1, digest: str | None = None) -> PolicyVersion:
    return PolicyVersion("actor", epoch, number, digest or f"sha256:{epoch}/{number}")


class Bench:
    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fail_recording = False
        ticks = itertools.count()
        self.slots = VersionSlots[str](self._put, self._record, lambda: float(next(ticks)))

    def _put(self, weights: str) -> None:
        assert self.slots.active is None, "nothing may serve while weights are put in place"
        self.happened.append(f"put {weights}")

    def _record(self, version: PolicyVersion, duration_s: float) -> None:
        assert self.slots.active is None, "the version may not serve before its activation is recorded"
        assert duration_s == 1.0
        if self.fail_recording:
            raise OSError("disk full")
        self.happened.append(f"recorded {version.version}")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_version_serves_after_it_was_put_in_place_and_recorded(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    assert bench.slots.active is None
    bench.slots.activate(version(0))
    assert bench.slots.active == version(0)
    assert bench.happened == ["put w0", "recorded 0"]


def test_what_was_not_staged_is_not_activated(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    with pytest.raises(EngineError, match="never staged"):
        bench.slots.activate(version(1))
    assert bench.happened == []


def test_nothing_is_generated_before_the_first_activation(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    with pytest.raises(EngineError, match="no version is active"), bench.slots.generation():
        pass


def test_activation_goes_forward_only(bench: Bench) -> None:
    for number in (0, 1):
        bench.slots.hold(version(number), f"w{number}")
    bench.slots.activate(version(1))
    with pytest.raises(EngineError, match="forward only"):
        bench.slots.activate(version(0))
    bench.slots.hold(version(1, epoch=2), "w1 of the next epoch")
    bench.slots.activate(version(1, epoch=2))
    assert bench.slots.active == version(1, epoch=2)


def test_activating_the_active_version_again_changes_nothing(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    bench.slots.activate(version(0))
    bench.slots.activate(version(0))
    assert bench.happened == ["put w0", "recorded 0"]


def test_one_version_never_has_two_digests(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    for refused in (bench.slots.holds, bench.slots.activate, lambda v: bench.slots.hold(v, "x")):
        with pytest.raises(EngineError, match="never changes its bytes"):
            refused(version(0, digest="sha256:other"))
    bench.slots.activate(version(0))
    with pytest.raises(EngineError, match="never changes its bytes"):
        bench.slots.holds(version(0, digest="sha256:other"))


def test_during_a_generation_the_switch_waits_for_a_decode_step(bench: Bench) -> None:
    for number in (0, 1):
        bench.slots.hold(version(number), f"w{number}")
    bench.slots.activate(version(0))
    with bench.slots.generation() as served:
        assert served == version(0)
        bench.slots.activate(version(1))
        assert bench.slots.active == version(0)
        assert bench.slots.switch_if_asked() == version(1)
        assert bench.slots.switch_if_asked() is None
    assert bench.slots.active == version(1)
    assert bench.happened == ["put w0", "recorded 0", "put w1", "recorded 1"]


def test_an_activation_that_came_too_late_takes_effect_at_the_end(bench: Bench) -> None:
    for number in (0, 1):
        bench.slots.hold(version(number), f"w{number}")
    bench.slots.activate(version(0))
    with bench.slots.generation():
        bench.slots.activate(version(1))
    assert bench.slots.active == version(1)


def test_where_the_recording_fails_nothing_serves_any_more(bench: Bench) -> None:
    for number in (0, 1):
        bench.slots.hold(version(number), f"w{number}")
    bench.slots.activate(version(0))
    bench.fail_recording = True
    with pytest.raises(OSError, match="disk full"):
        bench.slots.activate(version(1))
    assert bench.slots.active is None
    with pytest.raises(EngineError, match="no version is active"), bench.slots.generation():
        pass


def test_one_batch_at_a_time(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    bench.slots.activate(version(0))
    with bench.slots.generation(), pytest.raises(EngineError, match="one batch at a time"), bench.slots.generation():
        pass


def test_a_generation_that_failed_is_over(bench: Bench) -> None:
    bench.slots.hold(version(0), "w0")
    bench.slots.activate(version(0))
    with pytest.raises(ZeroDivisionError), bench.slots.generation():
        raise ZeroDivisionError
    with bench.slots.generation() as served:
        assert served == version(0)
