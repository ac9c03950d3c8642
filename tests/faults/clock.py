"""A clock that jumps: ``python -m tests.faults.clock MODULE ARGUMENT…`` runs a program under one.

SIGUSR1 moves ``time.time`` and ``time.time_ns`` of the process ten minutes ahead, at the next signal ten minutes behind
the right time, then right again.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
from itertools import cycle
from typing import Any, Final

CLOCK_OFF_S: Final = 600


class Clock:
    """This process's clock."""

    def __init__(self) -> None:
        self._offset_s = 0
        self._steps = cycle((CLOCK_OFF_S, -CLOCK_OFF_S, 0))
        self._time, self._time_ns = time.time, time.time_ns

    def install(self) -> None:
        time.time = lambda: self._time() + self._offset_s
        time.time_ns = lambda: self._time_ns() + self._offset_s * 1_000_000_000
        signal.signal(signal.SIGUSR1, self._move)

    def _move(self, *_: Any) -> None:
        self._offset_s = next(self._steps)


if __name__ == "__main__":
    Clock().install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
