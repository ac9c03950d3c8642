"""Work beside the caller: writes and syncs that wait for the disk, several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Syncs wait for the disk, not for a processor: more of them than processors go at once.
_THREADS: Final = ThreadPoolExecutor(max_workers=8, thread_name_prefix="rolltape-store")


def beside(act: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
    """Start ``act`` in another thread; here and now where the interpreter shuts down and takes no new work."""
    try:
        return _THREADS.submit(act, *args, **kwargs)
    except RuntimeError:
        done: Future[_R] = Future()
        try:
            done.set_result(act(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (the future carries it to whoever asks)
            done.set_exception(error)
        return done
