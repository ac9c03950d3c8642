"""Memory that is free goes back to the system, so that the size of a sink shows what it holds.

Threads that come and go (Parquet, maintenance, the client) leave free memory behind in glibc's arenas, one a thread; in
minutes that took a sink from 170 to 420 MiB, most of it free. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import pyarrow as pa

_M_ARENA_MAX: Final = -8
"""The parameter of glibc's ``mallopt`` that bounds its arenas."""


@cache
def _libc() -> Any:
    """The C library of this process; None where it is not glibc."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # looked up on purpose: only glibc has it
    except (OSError, TypeError, AttributeError):
        return None
    return library


def limit_arenas(number: int = 2) -> None:
    """Let all threads of this process share ``number`` arenas from now on, and Arrow's buffers lie in them too.

    Arrow's own pool keeps what each thread freed for that thread, and gives back what one of them holds.
    """
    library = _libc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, number)
        pa.set_memory_pool(pa.system_memory_pool())


def give_back() -> None:
    """Return what Arrow's pool and the C library hold free. Takes some milliseconds."""
    pa.default_memory_pool().release_unused()
    library = _libc()
    if library is not None:
        library.malloc_trim(0)
