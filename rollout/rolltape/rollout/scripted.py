"""An engine that says what a script tells it to: the twin of the real ones, for tests without a model.

It keeps the same order of weight sync, so code that breaks it fails here too. It loads no bytes: staging believes the
manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rolltape.rollout.assembly import BatchAssembly
from rolltape.rollout.engine import (
    ActivationHook,
    EngineInfo,
    GenerationBatch,
    GenerationRequest,
    PolicyVersion,
    PublishedWeights,
    SamplingConfig,
)
from rolltape.rollout.slots import VersionSlots


class ScriptedToken(NamedTuple):
    """One token to be sampled, and the log-prob that it is said to have."""

    token_id: int
    log_prob: float


Script = Callable[[GenerationRequest, PolicyVersion, int], ScriptedToken]
"""(request, version that samples, place of the token in the generation) → the token."""


def fixed_script(answers: Mapping[tuple[int, ...], Sequence[ScriptedToken]]) -> Script:
    """A script that gives each context its own answer, whatever the version.

    >>> script = fixed_script({(5, 6): [ScriptedToken(6, -0.5), ScriptedToken(2, -0.1)]})
    """

    def script(request: GenerationRequest, _version: PolicyVersion, place: int) -> ScriptedToken:
        return answers[tuple(request.prompt_token_ids.tolist())][place]

    return script


class ScriptedEngine:
    """Follows a script; see :class:`rolltape.rollout.engine.Engine`.

    Args:
        script: what to say.
        engine_id: name of the engine on the tape.
        on_activated: records an activation.
        before_step: called before each decode step with its place, for example to activate a version there.
        interrupts: asked before each token of a request, with its place: whether the engine breaks it off there.
    """

    def __init__(
        self,
        script: Script,
        *,
        engine_id: str,
        on_activated: ActivationHook,
        before_step: Callable[[int], None] = lambda _place: None,
        interrupts: Callable[[GenerationRequest, int], bool] = lambda _request, _place: False,
    ) -> None:
        self._script = script
        self._before_step = before_step
        self._interrupts = interrupts
        self._slots = VersionSlots[None](lambda _weights: None, on_activated, time.perf_counter)
        self.engine_id: Final = engine_id

    @property
    def info(self) -> EngineInfo:
        """What it says of itself."""
        return EngineInfo(name="scripted", version="1", dtype="float32", device="cpu", capabilities=("version_runs",))

    @property
    def active_version(self) -> PolicyVersion | None:
        """The version that the next token will carry."""
        return self._slots.active

    def stage(self, published: PublishedWeights) -> None:
        """Hold a version. Raises EngineError where it was staged with another digest."""
        if not self._slots.holds(published.version):
            self._slots.hold(published.version, None)

    def activate(self, version: PolicyVersion) -> None:
        """Serve a staged version from the next decode step on. Raises EngineError as every engine does."""
        self._slots.activate(version)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> GenerationBatch:
        """Continue every request by the script, until a stop token or ``max_tokens``."""
        rows = np.arange(len(requests))
        with self._slots.generation() as version:
            assembly = BatchAssembly(requests, sampling, version)
            for place in range(sampling.max_tokens):
                self._before_step(place)
                switched = self._slots.switch_if_asked()
                if switched is not None:
                    assembly.switch(switched)
                rows = rows[assembly.unfinished(rows)]
                broken = np.array([self._interrupts(requests[row], place) for row in rows.tolist()], dtype=np.bool_)
                assembly.interrupt(rows[broken])
                rows = rows[~broken]
                if not len(rows):
                    break
                tokens = [self._script(requests[row], assembly.version, place) for row in rows.tolist()]
                token_ids = np.array([token.token_id for token in tokens])
                log_probs = np.array([token.log_prob for token in tokens], dtype=np.float32)
                assembly.append(rows, token_ids, log_probs, None)
        return assembly.finish()
