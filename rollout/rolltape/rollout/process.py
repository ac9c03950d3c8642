"""What the processes of this room share: how they open a run's log, how they are asked to leave, how they end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from rolltape.ingest.log import EventLog, open_log

DONE: Final = 0
"""Exit status: the run has ended."""
TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status: it was asked to leave."""


def open_run_log(log: str, lake: str) -> EventLog:
    """The log of a run by its URL; empty: the lake itself is the log. What archives it runs elsewhere."""
    if log:
        return open_log(log, lake=lake, committer="external")
    return open_log(lake, committer="external")


def on_sigterm(stop: Callable[[], None]) -> None:
    """Call ``stop`` on SIGTERM, to leave in good order; only the main thread may ask for signals."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        stop()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
