"""The engine's side of weight sync: stage what was published, activate what was committed (design §8).

The client is driven by the state of the tape, not by single messages: it always heads for the newest live version, so
an engine that comes back skips what it missed, and a repeated or reordered message changes nothing. Whatever it does is
on the tape before any token rests on it.
"""

from __future__ import annotations

import time
from typing import Any

from rolltape.ingest.recorder import Recorder
from rolltape.numerics.weights import Manifest
from rolltape.rollout.engine import ActivationHook, Engine, PolicyVersion, PublishedWeights
from rolltape.rollout.tape import RunTape, VersionKey
from rolltape.schema.crash import crash_window
from rolltape.schema.errors import DigestMismatchError, EngineError
from rolltape.store.location import Location


def activation_hook(recorder: Recorder, engine_id: str) -> ActivationHook:
    """The hook that makes an activation durable before any token of the version leaves."""

    def on_activated(version: PolicyVersion, duration_s: float) -> None:
        recorder.record(
            "weights_activated",
            **version.fields,
            engine_id=engine_id,
            caches="dropped",
            duration_s=duration_s,
        )
        recorder.flush("spooled")

    return on_activated


class WeightClient:
    """Keeps one engine at the version that the tape has committed.

    Args:
        engine: made with :func:`activation_hook` of the same recorder.
        recorder: the one that also wrote the engine's ``engine_joined``: the producer's epoch is the incarnation.
        root: the lake, under which the shards lie.
    """

    def __init__(self, engine: Engine, recorder: Recorder, root: Location) -> None:
        self._engine = engine
        self._recorder = recorder
        self._root = root
        self._staged: set[VersionKey] = set()

    def serves(self, tape: RunTape, version: int | None) -> bool:
        """Whether the engine's next token carries the live version with this number (None: any live version)."""
        active = self._engine.active_version
        if active is None or active.key not in tape.live_versions:
            return False
        return version is None or active.version == version

    def reconcile(self, tape: RunTape) -> None:
        """Bring the engine to where the tape is.

        Raises:
            DigestMismatchError, EngineError: a version cannot be served here; the engine has left, on the tape too.
        """
        active = self._engine.active_version
        served = active.key if active is not None else (-1, -1)
        newer = {key: row for key, row in tape.live_versions.items() if key > served}
        committed = max((key for key in newer if key in tape.committed), default=None)
        if committed is not None:
            version = self._stage(newer[committed])
            self._engine.activate(version)
        newest = max(newer, default=None)
        if newest is not None and (committed is None or newest > committed):
            self._stage(newer[newest])

    def _stage(self, row: dict[str, Any]) -> PolicyVersion:
        version = PolicyVersion(row["policy_id"], row["policy_run_epoch"], row["version"], row["weights_digest"])
        if version.key in self._staged:
            return version
        started = time.perf_counter()
        try:
            self._engine.stage(self._published(version, row))
        except (DigestMismatchError, EngineError) as error:
            self._leave(error)
            raise
        self._recorder.record(
            "weights_staged",
            **version.fields,
            engine_id=self._engine.engine_id,
            duration_s=time.perf_counter() - started,
        )
        self._recorder.flush("spooled")
        self._staged.add(version.key)
        crash_window("after_staged")
        return version

    def _published(self, version: PolicyVersion, row: dict[str, Any]) -> PublishedWeights:
        if row["payload"] != "full":
            raise EngineError(f"version {version.key}: expected a full payload, got {row['payload']!r}")
        location = self._root.child(*row["path"].split("/"))
        return PublishedWeights(version=version, location=location, manifest=Manifest.from_fields(row))

    def _leave(self, error: Exception) -> None:
        reason = "digest_mismatch" if isinstance(error, DigestMismatchError) else "failed"
        self._recorder.record("engine_left", engine_id=self._engine.engine_id, reason=reason)
        self._recorder.flush("spooled")
