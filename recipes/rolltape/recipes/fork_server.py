"""The server of :mod:`rolltape.recipes.forked`: imports, starts no thread, touches no device, and forks.

Requests and answers are JSON messages over the socket that the owner hands down: a request has the arguments of a
command, its environment and folder, and the file that it writes to; an answer is the pid of a process that was forked,
or of one that ended, with its status.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from rolltape.recipes import cli
from rolltape.recipes.forked import MESSAGE_BYTES

Request = dict[str, Any]


def main() -> int:
    """The server; in each process that it forked, the command that was asked for."""
    # Ctrl-C is for the processes of the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _import_all()
        request = _serve(connection)
    return 0 if request is None else cli.main(request["arguments"])


def _import_all() -> None:
    """What trainers and workers import. Of what happens at import nothing may depend on a process's environment."""
    import pyarrow as pa

    import rolltape.ingest.embedded
    import rolltape.recipes.runs
    import rolltape.recipes.teachers
    import rolltape.rollout.worker
    import rolltape.trainers.loop  # noqa: F401
    from rolltape.numerics.models import import_library

    import_library()
    pa.array([0])  # imports pandas, where that is installed
    # All of this lives as long as any process: a collection that looked at it would copy its pages.
    gc.collect()
    gc.freeze()


def _serve(connection: socket.socket) -> Request | None:
    """Fork what is asked for until the owner is gone; the request within a forked process, None in the server."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, waking = socket.socketpair()
    with woken, waking, selectors.DefaultSelector() as selector:
        for end in (woken, waking):
            end.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        for end in (connection, woken):
            selector.register(end, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                _tell_ended(connection, woken)
            if connection in ready:
                message, logs, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
                if not message:
                    return None
                request: Request = json.loads(message)
                if _fork(connection, request, logs[0]):
                    return request


def _tell_ended(connection: socket.socket, woken: socket.socket) -> None:
    """Tell the owner of each process that ended."""
    with contextlib.suppress(BlockingIOError):
        while woken.recv(4096):
            pass
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            connection.send(json.dumps({"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}).encode())


def _fork(connection: socket.socket, request: Request, log: int) -> bool:
    """Whether this is the new process."""
    server = os.getpid()
    if pid := os.fork():
        os.close(log)
        with contextlib.suppress(BrokenPipeError):
            connection.send(json.dumps({"pid": pid}).encode())
        return False
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**request["environment"], cli.PARENT_VARIABLE: str(server)})
    sys.argv = [cli.__file__, *request["arguments"]]
    _rename([sys.executable, "-m", cli.__name__, *request["arguments"]])
    return True


def _rename(words: list[str]) -> None:
    """Have ``ps`` and ``/proc`` say what runs here: write it over the arguments that the server was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    room = end - start
    text = b"\0".join(map(os.fsencode, words))[: room - 1].ljust(room, b"\0")
    ctypes.memmove(start, text, room)


if __name__ == "__main__":
    sys.exit(main())
