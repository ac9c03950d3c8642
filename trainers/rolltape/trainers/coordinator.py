"""The trainer's side of weight sync: publish, wait until every required engine has staged, commit (design §8).

The commit is the sole decision that a version serves. The coordinator is fenced by run epoch: a trainer that comes back
raises the epoch first, and continues from what the tape says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rolltape.ingest.log import EventLog
from rolltape.ingest.recorder import Recorder
from rolltape.schema.crash import crash_window
from rolltape.schema.errors import EngineError
from rolltape.schema.policy import PolicyVersion
from rolltape.store.lake import Lake

KINDS: Final = ("engine_joined", "engine_left", "weights_staged", "weights_committed", "weights_aborted")


@dataclass(slots=True)
class SyncState:
    """What weight-sync events say, folded.

    An engine's incarnation is the epoch of the producer that wrote its events, so the fold does not depend on the order
    in which the topics `control` and `weights` arrive: what an earlier incarnation staged died with it.
    """

    engines: dict[str, int] = field(default_factory=dict)  # registered engine -> producer epoch
    staged: dict[tuple[int, int], dict[str, tuple[int, str]]] = field(default_factory=dict)  # version -> engine -> …
    committed: set[tuple[int, int]] = field(default_factory=set)
    aborted: set[tuple[int, int]] = field(default_factory=set)

    def apply(self, kind: str, table: pa.Table) -> None:
        """Take over the rows of one kind, in log order."""
        rows = zip(
            table["event_id"].to_pylist(), table["producer_epoch"].to_pylist(), table[kind].to_pylist(), strict=True
        )
        for event_id, epoch, row in rows:
            if kind == "engine_joined":
                self.engines[row["engine_id"]] = epoch
            elif kind == "engine_left":
                self.engines.pop(row["engine_id"], None)
            else:
                self._apply_version(kind, event_id, epoch, row)

    def _apply_version(self, kind: str, event_id: str, epoch: int, row: Mapping[str, Any]) -> None:
        key = (row["policy_run_epoch"], row["version"])
        if kind == "weights_staged":
            staged = self.staged.setdefault(key, {})
            staged[row["engine_id"]] = max(staged.get(row["engine_id"], (0, "")), (epoch, event_id))
        elif kind == "weights_committed":
            self.committed.add(key)
        elif kind == "weights_aborted":
            self.aborted.add(key)

    def staged_by(self, key: tuple[int, int]) -> dict[str, str]:
        """Registered engines whose present incarnation staged version ``key``, with the event that says so."""
        return {
            engine: event_id
            for engine, (epoch, event_id) in self.staged.get(key, {}).items()
            if self.engines.get(engine) == epoch
        }


class Coordinator:
    """Brings published versions into effect, one at a time."""

    def __init__(
        self,
        lake: Lake,
        log: EventLog,
        recorder: Recorder,
        *,
        coordinator_id: str,
        run_id: str,
        min_engines: int,
        engine_timeout_s: float,
    ) -> None:
        self._recorder = recorder
        self._id = coordinator_id
        self._run_id = run_id
        self._min_engines = min_engines
        self._timeout_s = engine_timeout_s
        self.state = SyncState()
        # Weight-sync events are few and their order within a topic decides, so the whole history is read once.
        start = lake.cursor()
        history = lake.events(KINDS, run_id=run_id, as_of=start)
        for kind, rows in _in_log_order(history):
            self.state.apply(kind, rows)
        self._reader = log.reader(start, topics=("weights", "control"), kinds=KINDS)

    def poll(self, timeout_s: float) -> None:
        """Take in what came since the last call."""
        for delivery in self._reader.poll(timeout_s):
            table = delivery.table.filter(pa.compute.equal(delivery.table["run_id"], self._run_id))
            if table.num_rows:
                self.state.apply(delivery.kind, table)

    def bring_into_effect(
        self, *versions: PolicyVersion, waiting: Callable[[str], None] = lambda _: None
    ) -> PolicyVersion:
        """Commit the first of ``versions`` that every registered engine has staged, and return it.

        Returns at once where one of them is committed. Engines that stay silent for ``engine_timeout_s`` are
        deregistered before the commit.

        Args:
            versions: the newest first.
            waiting: told now and then what is waited for.

        Raises:
            EngineError: no engine is left, or a version was aborted.
        """
        deadline = time.monotonic() + self._timeout_s
        while (found := self.try_commit(*versions)) is None:
            if time.monotonic() > deadline:
                self._deregister_silent(versions[0])
                deadline = time.monotonic() + self._timeout_s
            newest = versions[0]
            num_staged = len(self.state.staged_by(newest.key))
            expected = max(len(self.state.engines), self._min_engines)
            waiting(f"version {newest.version}: {num_staged} of {expected} engines staged")
            self.poll(0.05)
        return found

    def try_commit(self, *versions: PolicyVersion) -> PolicyVersion | None:
        """The first of ``versions`` that is committed, or is now because every registered engine has staged it.

        Raises:
            EngineError: one of them was aborted.
        """
        required = sorted(self.state.engines)
        for version in versions:
            if version.key in self.state.committed:
                return version
            if version.key in self.state.aborted:
                raise EngineError(f"version {version.version} of {version.policy_id} was aborted; it never serves")
            staged = self.state.staged_by(version.key)
            if len(required) >= self._min_engines and all(engine in staged for engine in required):
                self._commit(version, {engine: staged[engine] for engine in required})
                return version
        return None

    def _commit(self, version: PolicyVersion, staged: Mapping[str, str]) -> None:
        self._recorder.record(
            "weights_committed",
            **version.fields,
            required_engines=list(staged),
            staged_event_ids=list(staged.values()),
            coordinator_id=self._id,
        )
        self._recorder.flush("spooled")
        self.state.committed.add(version.key)
        crash_window("after_committed")

    def _deregister_silent(self, version: PolicyVersion) -> None:
        required, staged = sorted(self.state.engines), self.state.staged_by(version.key)
        silent = [engine for engine in required if engine not in staged]
        if len(required) - len(silent) < 1:
            raise EngineError(
                f"no engine staged within {self._timeout_s:g} s (registered: {', '.join(required) or 'none'}); "
                "start a rollout worker, or raise trainer.engine_timeout_s"
            )
        self._min_engines = min(self._min_engines, len(required) - len(silent))
        for engine in silent:
            self._recorder.record("engine_left", engine_id=engine, reason="silent")
            self.state.engines.pop(engine, None)

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()


class Rollover:
    """Published versions on their way into effect while training goes on.

    Engines that are busy stage whichever version is the newest when they look, so one that is published may be skipped
    for the next. At most ``max_waiting`` are published beyond the newest that serves.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        serving: PolicyVersion,
        max_waiting: int = 1,
        *,
        live_versions: set[tuple[int, int]] | None = None,
    ) -> None:
        """``serving`` is in effect now; aborted versions are taken out of ``live_versions`` (run epoch, version)."""
        self.serving = serving
        self._live_versions = set() if live_versions is None else live_versions
        self._coordinator = coordinator
        self._max_waiting = max_waiting
        self._waiting: list[PolicyVersion] = []  # newest first

    def published(self, version: PolicyVersion) -> None:
        """A version is published; hold the caller back while too many are not in effect.

        Raises:
            EngineError: no engine is left, or a version was aborted.
        """
        if version not in self._waiting:
            self._waiting.insert(0, version)
        self.settle()
        while len(self._waiting) > self._max_waiting:
            self._serves(self._coordinator.bring_into_effect(*self._waiting))

    def settle(self) -> None:
        """Commit the newest version that every engine has staged, if there is one; never waits."""
        self._coordinator.poll(0.0)
        # What was sampled by one of them is refused from now on (D29), however it came to be sampled.
        self._live_versions -= self._coordinator.state.aborted
        found = self._coordinator.try_commit(*self._waiting)
        if found is not None:
            self._serves(found)

    def _serves(self, version: PolicyVersion) -> None:
        self.serving = version
        self._waiting = self._waiting[: self._waiting.index(version)]


def _in_log_order(history: Mapping[str, pa.Table]) -> list[tuple[str, pa.Table]]:
    """Single rows of all kinds in (topic, partition, offset) order; rows of one record keep theirs."""
    rows = [
        (topic, partition, offset, lane, kind, index)
        for kind, table in history.items()
        for index, (topic, partition, offset, lane) in enumerate(
            zip(
                table["log_topic"].to_pylist(),
                table["log_partition"].to_pylist(),
                table["log_offset"].to_pylist(),
                table["lane_seq"].to_pylist(),
                strict=True,
            )
        )
    ]
    # `control` sorts before `weights`: engines join and leave before what they stage is looked at.
    return [(kind, history[kind].slice(index, 1)) for *_, kind, index in sorted(rows)]
