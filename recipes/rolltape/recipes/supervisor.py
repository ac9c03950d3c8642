"""Starting a run's processes on one machine, and starting again those that die.

A committer or sink, a trainer and rollout workers are separate processes that share nothing but the lake and the log.
Whatever dies comes back and continues from the tape, so a supervisor needs no knowledge of what they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

from rolltape.recipes.cli import PARENT_VARIABLE
from rolltape.recipes.forked import Forked, ForkServer, is_available
from rolltape.schema.errors import ChildFailedError

_GRACE_S: Final = 20.0


@dataclass(slots=True, kw_only=True)
class Child:
    """One process of the run."""

    name: str
    arguments: list[str]
    log_path: Path
    environment: Mapping[str, str]
    server: ForkServer | None = None
    """Forks it, where that is possible; None: it is started by itself."""
    process: subprocess.Popen[bytes] | Forked | None = None
    starts: int = 0
    done: bool = False
    _log: IO[bytes] | None = None

    def start(self) -> None:
        """Start (again)."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._log is None:
            self._log = self.log_path.open("ab")
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **self.environment}
        if self.server is not None and is_available():
            self.process = self.server.start(self.arguments, self._log.fileno(), environment)
        else:
            command = [sys.executable, "-m", "rolltape.recipes.cli", *self.arguments]
            self.process = subprocess.Popen(  # noqa: S603 - our own program with our own arguments
                command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, env=environment
            )
        self.starts += 1

    def stop(self) -> None:
        """Ask to end, then kill; idempotent."""
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines it wrote."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-num_lines:])


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Within it SIGTERM ends this program as Ctrl-C does, by unwinding it, so that its children are stopped too.

    Only the main thread may ask for signals; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # children are being stopped from here on
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class Supervisor:
    """Runs children until the last of those that end by themselves has ended.

    ``services`` (the committer, or the sink of a Kafka log) never end by themselves and are stopped last.
    """

    services: list[Child]
    workers: list[Child]
    max_restarts: int = 3
    restarts: dict[str, int] = field(default_factory=dict)

    def run(
        self,
        *,
        on_tick: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
        tick_s: float = 0.1,
    ) -> None:
        """Start all, restart what dies, return when all workers have ended well.

        ``at_end`` is called once they have, while the services still run.

        Raises:
            ChildFailedError: a process died more than ``max_restarts`` times.
        """
        try:
            for child in (*self.services, *self.workers):
                if child.process is None:
                    child.start()
            while not all(child.done for child in self.workers):
                on_tick()
                self.look_after()
                time.sleep(tick_s)
            on_tick()
            at_end()
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop everything, services last so that what was spooled is still committed."""
        for child in (*self.workers, *self.services):
            child.stop()

    def look_after(self) -> None:
        """Start again what died.

        Raises:
            ChildFailedError: a process died more than ``max_restarts`` times.
        """
        for child in (*self.services, *self.workers):
            if child.done or child.process is None:
                continue
            status = child.process.poll()
            if status is None:
                continue
            if status == 0 and child in self.workers:
                child.done = True
                continue
            self.restarts[child.name] = self.restarts.get(child.name, 0) + 1
            if self.restarts[child.name] > self.max_restarts:
                raise ChildFailedError(
                    f"{child.name} ended with status {status} for the {self.restarts[child.name]}th time; "
                    f"its log {child.log_path} ends with:\n{child.log_tail()}"
                )
            child.start()


def children_of(
    lake_url: str,
    run_id: str,
    num_workers: int,
    log_folder: Path,
    *,
    log_url: str = "",
    teachers: bool = False,
    server: ForkServer | None = None,
) -> tuple[list[Child], list[Child]]:
    """The services and workers of a run; with ``log_url`` (Kafka) a sink archives it, else a committer the spools.

    With ``teachers`` their scoring service is one of the workers: it ends with the run. ``server`` forks the workers;
    services import no torch and start by themselves.
    """

    def child(name: str, *arguments: str) -> Child:
        own = None if name in ("sink", "committer") else server
        return Child(
            name=name, arguments=list(arguments), log_path=log_folder / f"{name}.log", environment={}, server=own
        )

    log = ("--log", log_url) if log_url else ()
    lake = ("--lake", lake_url)
    run = (*lake, *log, "--run", run_id)
    service = child("sink", "sink", *lake, *log) if log_url else child("committer", "committer", *lake)
    workers = [child(f"worker-{i}", "worker", *run, "--index", str(i)) for i in range(num_workers)]
    scoring = [child("teacher", "teacher", *run)] if teachers else []
    return [service], [child("trainer", "trainer", *run), *scoring, *workers]
