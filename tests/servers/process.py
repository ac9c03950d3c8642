"""A server of the tests as a process that this process owns: started, watched, struck and ended by its own pid."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Ports below those that the system gives to outgoing connections: a client that tries the port of a dead server again
# and again would otherwise be given that very port some day, and talk to itself.
_PORTS = range(12_000, 32_000)

# Ends what a test run that was itself killed left behind. Each line names a pid to watch (+) or to forget (-).
_REAPER = """
import os, signal, sys
watched = {}
for line in sys.stdin:
    pid = int(line[1:])
    if line[0] == "+":
        try:
            watched[pid] = os.pidfd_open(pid)
        except OSError:
            pass
    elif pid in watched:
        os.close(watched.pop(pid))
for descriptor in watched.values():
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class ServerError(RuntimeError):
    """A server of the tests did not start, or did not answer."""


def free_port() -> int:
    """A port of this machine that nobody listens on, and that no outgoing connection is given."""
    for _ in range(200):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError(f"expected a free port in {_PORTS}, got none in 200 tries")


def is_open(port: int) -> bool:
    """Whether somebody listens on this port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class _Reaper:
    """A process that outlives this one just long enough to end its servers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._pipe = -1

    def tell(self, line: str) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        with self._lock:
            if self._owner != os.getpid():
                self._begin()
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, f"{line}\n".encode())

    def _begin(self) -> None:
        # Its input ends with this process, and so does it: nobody waits for it.
        reading, self._pipe = os.pipe()
        self._owner = os.getpid()
        process = subprocess.Popen([sys.executable, "-c", _REAPER], stdin=reading, start_new_session=True)
        process.returncode = 0
        os.close(reading)


_reaper = _Reaper()


class ServerProcess:
    """One program; it may be started again after its end. What it says goes to ``log``."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None):
        """Nothing runs before :meth:`start`. ``environment`` is added to this process's own."""
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that runs now.

        Raises:
            ServerError: none does.
        """
        if self._process is None:
            raise ServerError(f"expected {self.name} to run, got one that was never started")
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is paused."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it unless it runs. It may need a moment before it answers."""
        if self.is_alive:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _reaper.tell(f"+{self._process.pid}")

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._end(signal.SIGKILL, 30)

    def terminate(self, timeout_s: float = 30) -> None:
        """SIGTERM, and wait for its end; SIGKILL when that does not come in time."""
        self._end(signal.SIGTERM, timeout_s)

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def wait_until(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        """The first true value of ``condition``.

        Raises:
            ServerError: the process ended, or the time did.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if not self.is_alive:
                raise ServerError(f"expected {self.name} to start, got its end. It said:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"expected {self.name} to answer within {timeout_s} s, got nothing. It said:\n{self.last_words()}"
                )
            time.sleep(0.02)
        return value

    def last_words(self, num_bytes: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace") if self.log.exists() else ""

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            # A paused process takes no other signal than SIGKILL before it goes on.
            os.kill(self._process.pid, signal.SIGCONT)
            os.kill(self._process.pid, number)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        _reaper.tell(f"-{self._process.pid}")


class Server(ABC):
    """A server of one process; as a context manager it runs within the context.

    Attributes:
        process: the process.
    """

    process: ServerProcess

    @abstractmethod
    def start(self) -> None:
        """Start it, or start it again on its data; returns once it answers."""

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay, answers do not come."""
        self.process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self.process.resume()

    def stop(self) -> None:
        """Graceful end."""
        self.process.terminate()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
