"""Named crash windows: places where a fault-injection test may kill the process.

``ROLLTAPE_CRASH="after_commit:3:marks/after_commit,…"`` kills the process with SIGKILL at the third passage of
``after_commit``, once: the mark file is created first, and where it exists nothing happens. Unset, a passage costs one
call and a dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import cache
from typing import Final, Literal

CrashWindow = Literal[
    "data_file_written",
    "after_commit",
    "after_checkpoint",
    "after_step_event",
    "after_staged",
    "after_committed",
]

_PASSED: Final[dict[str, int]] = {}


@cache
def _plan() -> Mapping[str, tuple[int, str]]:
    """Count and mark file by window. Read at the first passage: a forked process has an environment of its own."""
    entries = [entry.split(":", 2) for entry in os.environ.get("ROLLTAPE_CRASH", "").split(",") if entry]
    return {name: (int(count), mark) for name, count, mark in entries}


def crash_window(name: CrashWindow) -> None:
    """Die here with SIGKILL if the environment says so."""
    plan = _plan()
    if name not in plan:
        return
    _PASSED[name] = _PASSED.get(name, 0) + 1
    count, mark = plan[name]
    if _PASSED[name] < count:
        return
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
