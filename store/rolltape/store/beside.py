"""Work beside the caller: writes and syncs that wait for the disk, several at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Threads:
    """The threads of this process."""

    def __init__(self) -> None:
        self.pool = self._new()
        # A forked child has none of its parent's threads.
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.pool = self._new()

    @staticmethod
    def _new() -> ThreadPoolExecutor:
        # Syncs and requests wait for a disk or a network, not for a processor: more of them than processors go at once.
        return ThreadPoolExecutor(max_workers=8, thread_name_prefix="rolltape-store")


_THREADS: Final = _Threads()


def beside(act: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
    """Start ``act`` in another thread; here and now where the interpreter shuts down and takes no new work."""
    try:
        return _THREADS.pool.submit(act, *args, **kwargs)
    except RuntimeError:
        done: Future[_R] = Future()
        try:
            done.set_result(act(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (the future carries it to whoever asks)
            done.set_exception(error)
        return done
