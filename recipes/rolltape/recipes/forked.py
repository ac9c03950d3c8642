"""Processes forked by a server that has imported what they need, rather than started one by one.

Importing torch and transformers costs a core four seconds, for every process of a run and every restart. The server
pays once. What it forks is a process like any other: its own pid, arguments in ``ps``, log, signals and exit status; a
test or a user may kill it, or the server, with any signal. Server and processes end with their owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

FORK_VARIABLE: Final = "ROLLTAPE_FORK"
"""Set to ``0``, every process is started by itself: for drivers that do not survive a fork after their import."""

MESSAGE_BYTES: Final = 1 << 20
LONGEST_COMMAND: Final = 2000
"""Characters of a process's arguments that ``ps`` shows."""

_POLL_S: Final = 0.01
_NOT_STARTED: Final = 255


def is_available() -> bool:
    """Whether processes are forked here."""
    return sys.platform == "linux" and os.environ.get(FORK_VARIABLE) != "0"


class Forked:
    """A process that the server forked: the part of :class:`subprocess.Popen` that a supervisor needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        """Use :meth:`ForkServer.start`."""
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit status, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self._server.look()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The owner's side, a context manager that threads may share. It starts with the first process asked of it."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._running: dict[int, Forked] = {}

    def start(self, arguments: list[str], log: int, environment: Mapping[str, str]) -> Forked:
        """Fork ``rolltape ARGUMENTS`` with just this environment, in the current folder.

        Where that fails, the process that is returned has ended, and the log says why.

        Args:
            arguments: of the command line.
            log: open file that standard output and error go to.
            environment: all variables of the process.
        """
        request = {"arguments": arguments, "environment": dict(environment), "folder": str(Path.cwd())}
        with self._lock:
            forked = Forked(self, 0)
            connection = self._connection or self._begin(log)
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], [log])
                while not forked.pid and self._connection is not None:
                    self._receive(connection, forked)
            except OSError:
                self._lose()
            if not forked.pid:
                forked.returncode = _NOT_STARTED
        return forked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def look(self) -> None:
        """Take in which processes have ended."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._connection is not None:
                self._receive(self._connection, None, socket.MSG_DONTWAIT)

    def stop(self) -> None:
        """End the server and what it forked. Idempotent, and a later start begins anew."""
        with self._lock:
            self._lose()

    def _begin(self, log: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # What it forks writes its own arguments over these: the blanks are room for them.
            command = [
                sys.executable,
                "-m",
                "rolltape.recipes.fork_server",
                str(theirs.fileno()),
                " " * LONGEST_COMMAND,
            ]
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
            )
        self._connection = ours
        return ours

    def _receive(self, connection: socket.socket, starting: Forked | None, flags: int = 0) -> None:
        """One message: the pid of what was to be started, or the status of what has ended."""
        message = connection.recv(MESSAGE_BYTES, flags)
        if not message:
            self._lose()
            return
        told: dict[str, int] = json.loads(message)
        if "status" in told:
            self._running.pop(told["pid"]).returncode = told["status"]
        elif starting is not None:
            starting.pid = told["pid"]
            self._running[starting.pid] = starting

    def _lose(self) -> None:
        """Without a server nobody would tell how its processes end, so they end now."""
        for forked in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(forked.pid, signal.SIGKILL)
            forked.returncode = -signal.SIGKILL
        self._running.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.wait()
            self._process = None
