"""Which versions an engine holds and which it serves: the order of design §8, shared by all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

from rolltape.rollout.engine import ActivationHook, PolicyVersion
from rolltape.schema.errors import EngineError

W = TypeVar("W")


class VersionSlots(Generic[W]):
    """Staged versions, the active one, and the switch between them.

    ``W`` is what the engine keeps of a staged version. While a batch is being generated an activation waits for the
    engine to call :meth:`switch_if_asked` between two decode steps; otherwise it takes effect at once. Safe to use from
    two threads: one that generates, one that stages and activates.

    Args:
        put_in_place: makes the model compute with a staged version's weights.
        on_activated: records the activation; only after it returns does the version count as active.
        clock: seconds, for the duration of the switch.
    """

    def __init__(
        self, put_in_place: Callable[[W], None], on_activated: ActivationHook, clock: Callable[[], float]
    ) -> None:
        self._put_in_place = put_in_place
        self._on_activated = on_activated
        self._clock = clock
        self._lock = Lock()
        self._active: PolicyVersion | None = None
        self._newest: tuple[int, int] = (-1, -1)
        self._staged: dict[tuple[int, int], tuple[PolicyVersion, W]] = {}
        self._asked: PolicyVersion | None = None
        self._generating = False

    @property
    def active(self) -> PolicyVersion | None:
        """The version that serves; None before the first and after a switch that failed."""
        return self._active

    def holds(self, version: PolicyVersion) -> bool:
        """Whether the version is staged or active.

        Raises:
            EngineError: it is, with another digest.
        """
        with self._lock:
            return self._holds(version)

    def hold(self, version: PolicyVersion, weights: W) -> None:
        """Keep a staged version, unless a newer one was served already."""
        with self._lock:
            if not self._holds(version) and version.key > self._newest:
                self._staged[version.key] = (version, weights)

    def activate(self, version: PolicyVersion) -> None:
        """Switch now, or ask the running generation to.

        Raises:
            EngineError: not staged, or older than what was served before.
        """
        with self._lock:
            if self._active is not None and self._active.key == version.key and self._holds(version):
                return
            if version.key <= self._newest:
                raise EngineError(
                    f"version {version.key} of {version.policy_id}: expected one newer than {self._newest}, which this "
                    "engine has served; activation goes forward only"
                )
            if not self._holds(version):
                raise EngineError(
                    f"version {version.key} of {version.policy_id} was never staged here; "
                    "stage it before it is activated"
                )
            self._asked = version
            if not self._generating:
                self._switch()

    @contextmanager
    def generation(self) -> Iterator[PolicyVersion]:
        """A generation runs in this block; gives the version that serves it at first.

        An activation that came too late for it takes effect at its end.

        Raises:
            EngineError: nothing is active, or a generation is running.
        """
        with self._lock:
            if self._generating:
                raise EngineError("expected one batch at a time, got a second generate() while one is running")
            if self._active is None:
                raise EngineError("no version is active: stage and activate one before generating")
            self._generating = True
            version = self._active
        try:
            yield version
        finally:
            with self._lock:
                self._generating = False
                if self._asked is not None:
                    self._switch()

    def switch_if_asked(self) -> PolicyVersion | None:
        """Between two decode steps: take what was asked for. Returns the new version, or None where nothing changed."""
        with self._lock:
            if self._asked is None:
                return None
            return self._switch()

    def _holds(self, version: PolicyVersion) -> bool:
        held = self._staged.get(version.key)
        known = held[0] if held is not None else self._active
        if known is None or known.key != version.key:
            return False
        if known.weights_digest != version.weights_digest:
            raise EngineError(
                f"version {version.key} of {version.policy_id}: expected digest {known.weights_digest} as staged "
                f"before, got {version.weights_digest}; a version never changes its bytes"
            )
        return True

    def _switch(self) -> PolicyVersion:
        assert self._asked is not None
        version, weights = self._staged[self._asked.key]
        self._active, self._asked = None, None
        started = self._clock()
        self._put_in_place(weights)
        self._newest = version.key
        self._staged = {key: held for key, held in self._staged.items() if key > version.key}
        self._on_activated(version, self._clock() - started)
        self._active = version
        return version
