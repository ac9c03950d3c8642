"""What the tests read a tape with: all that is logged, however slowly it comes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rolltape.ingest.log import Delivery, LogReader
from rolltape.ingest.memory import MemoryLog
from rolltape.ingest.recorder import Recorder
from rolltape.schema.cursor import Cursor

from .conftest import TapeReader


class Slow:
    """A reader whose every other poll finds nothing yet, as one of a broker may."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._num_polls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def poll(self, timeout_s: float) -> list[Delivery]:
        self._num_polls += 1
        return [] if self._num_polls % 2 else self._reader.poll(timeout_s)


class SlowLog(MemoryLog):
    """The in-memory log, read slowly."""

    def reader(
        self, start: Cursor, topics: Collection[str] | None = None, kinds: Collection[str] | None = None
    ) -> Any:  # of the protocol's shape
        return Slow(super().reader(start, topics, kinds))


def test_an_empty_poll_is_not_the_end_of_a_log() -> None:
    log = SlowLog()
    tape = TapeReader(log)
    assert tape.rows("alarm_raised") == []
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        for number in range(3):
            recorder.record("alarm_raised", alarm=f"a{number}", severity="error")
            recorder.flush("logged")
        assert [row["alarm"] for row in tape.rows("alarm_raised")] == ["a0", "a1", "a2"]
