"""File locks that die with their process and are not inherited by forks."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Final, Self

_HELD: Final[weakref.WeakSet[FileLock]] = weakref.WeakSet()


class FileLock:
    """An exclusive advisory lock on a file, held until :meth:`release` or the end of the process.

    A forked child does not keep it: the child closes its copy of the descriptor.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Use :meth:`acquire`."""
        self._path = path
        self._fd: int | None = fd
        _HELD.add(self)

    @classmethod
    def acquire(cls, path: Path, *, wait_s: float = 0.0) -> Self | None:
        """The lock, or None if another holds it still after ``wait_s``."""
        deadline = time.monotonic() + wait_s
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return None
                time.sleep(0.005)
            except BaseException:
                os.close(fd)
                raise
            else:
                return cls(path, fd)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptor and leave the lock to whoever else holds one (a fork's parent)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock now (a missing file is not locked)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
