"""Named crash windows: places where a fault-injection test may kill the process.

``ROLLTAPE_CRASH="after_commit:3:marks/after_commit,…"`` kills the process with SIGKILL at the third passage of
``after_commit``, once: the mark file is created first, and where it exists nothing happens. Unset, a passage costs one
dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from typing import Final, Literal

CrashWindow = Literal[
    "data_file_written",
    "after_commit",
    "after_checkpoint",
    "after_step_event",
    "after_staged",
    "after_committed",
]

_PLAN: Final[dict[str, tuple[int, str]]] = {}
_PASSED: Final[dict[str, int]] = {}

for _entry in filter(None, os.environ.get("ROLLTAPE_CRASH", "").split(",")):
    _name, _count, _mark = _entry.split(":", 2)
    _PLAN[_name] = (int(_count), _mark)


def crash_window(name: CrashWindow) -> None:
    """Die here with SIGKILL if the environment says so."""
    if name not in _PLAN:
        return
    _PASSED[name] = _PASSED.get(name, 0) + 1
    count, mark = _PLAN[name]
    if _PASSED[name] < count:
        return
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
