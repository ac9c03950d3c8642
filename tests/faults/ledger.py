"""What a writer began and what was acknowledged to it: two files a producer that survive its death.

``<producer>.begun`` has a line for each call of the recorder, written before the call, so that whatever is in the log
was begun. ``<producer>.acknowledged`` has a line for each event id, synced after the log acknowledged it. The strike
reads both while the writer lives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from tests.faults.workload import ID_WIDTH, NUM_ROWS

_CALL_WIDTH: Final = len("00000 000\n")
_ID_LINE: Final = ID_WIDTH + 1
_GATE_S: Final = 0.02


class Ledger:
    """The files of one producer, for its writer."""

    def __init__(self, folder: Path, producer_id: str) -> None:
        self._begun = _begun(folder, producer_id)
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._begun_fd = os.open(self._begun, flags)
        self._acknowledged_fd = os.open(_acknowledged(folder, producer_id), flags)
        # A kill in the middle of a write leaves half a line, which was acknowledged to nobody.
        os.ftruncate(self._acknowledged_fd, os.fstat(self._acknowledged_fd).st_size // _ID_LINE * _ID_LINE)

    def next_block(self) -> int:
        """The first block of which nothing was begun."""
        calls = _calls(self._begun)
        return calls[-1][0] + 1 if calls else 0

    def begin(self, block: int, call: int) -> None:
        os.write(self._begun_fd, f"{block:05d} {call:03d}\n".encode())

    def acknowledge(self, event_ids: Iterable[str]) -> None:
        """Enter ids; they are on disk when this returns."""
        lines = "".join(f"{event_id}\n" for event_id in event_ids).encode()
        if len(lines) % _ID_LINE:
            raise AssertionError(f"expected ids of {ID_WIDTH} characters, got {lines[:60]!r}")
        os.write(self._acknowledged_fd, lines)
        os.fsync(self._acknowledged_fd)


class Standing(NamedTuple):
    """How far a producer is, in events. ``handed_over`` leaves out the call that may just be going on."""

    handed_over: int
    acknowledged: int


def standing(folder: Path, producer_ids: Iterable[str]) -> Standing:
    """Where the producers stand together, from the sizes of their files. What was handed over is read first."""
    ids = list(producer_ids)
    calls = [_size(_begun(folder, producer_id)) // _CALL_WIDTH for producer_id in ids]
    handed_over = sum(max(0, count - 1) for count in calls) * NUM_ROWS
    return Standing(handed_over, sum(_size(_acknowledged(folder, producer_id)) // _ID_LINE for producer_id in ids))


def acknowledged_ids(folder: Path, producer_id: str) -> list[str]:
    """Every id of the ledger. A line that a kill cut short was not acknowledged to anybody."""
    content = _read(_acknowledged(folder, producer_id))
    return content[: len(content) // _ID_LINE * _ID_LINE].split()


class RefusedEvent(NamedTuple):
    """An event whose record was damaged on purpose, and its place in the lane."""

    event_id: str
    partition: int
    lane_seq: int


def enter_refused(folder: Path, producer_id: str, events: Iterable[RefusedEvent]) -> None:
    """Enter events that are damaged now."""
    _append(folder / f"{producer_id}.refused", "".join(f"{e.event_id} {e.partition} {e.lane_seq}\n" for e in events))


def refused_events(folder: Path, producer_id: str) -> list[RefusedEvent]:
    """What was damaged on purpose."""
    lines = [line.split() for line in _read(folder / f"{producer_id}.refused").splitlines()]
    return [RefusedEvent(event_id, int(partition), int(seq)) for event_id, partition, seq in lines]


def enter_stranger(folder: Path, producer_id: str) -> None:
    """Enter one message that is none of ours."""
    _append(folder / f"{producer_id}.strangers", "1\n")


def count_strangers(folder: Path, producer_id: str) -> int:
    """How many of those were sent."""
    return len(_read(folder / f"{producer_id}.strangers").splitlines())


def begun_calls(folder: Path, producer_id: str) -> list[tuple[int, int]]:
    """Block and call of everything that the writer began."""
    return _calls(_begun(folder, producer_id))


def no_longer_waits(folder: Path, producer_id: str) -> None:
    """Forget what an earlier start of a writer waited for."""
    (folder / f"{producer_id}.waits").unlink(missing_ok=True)


def _begun(folder: Path, producer_id: str) -> Path:
    return folder / f"{producer_id}.begun"


def _acknowledged(folder: Path, producer_id: str) -> Path:
    return folder / f"{producer_id}.acknowledged"


def open_gate(folder: Path, num_blocks: int) -> None:
    """Let writers begin blocks below ``num_blocks`` and no other. Where there is no gate, nobody waits."""
    _write(folder / "gate", str(num_blocks))


def gate_of(folder: Path) -> int:
    """The first block that may not be begun."""
    return int((folder / "gate").read_text())


def wait_for_gate(folder: Path, producer_id: str, block: int) -> None:
    """Return once ``block`` may be begun; meanwhile say that this writer waits for it."""
    gate = folder / "gate"
    while gate.exists() and block >= int(gate.read_text()):
        _write(folder / f"{producer_id}.waits", str(block))
        time.sleep(_GATE_S)


def waits_for(folder: Path, producer_id: str) -> int:
    """The block that a writer waits for, or waited for last."""
    return int(_read(folder / f"{producer_id}.waits") or -1)


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    staged = path.with_name(f"{path.name}.new")
    staged.write_text(text)
    staged.replace(path)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _calls(path: Path) -> list[tuple[int, int]]:
    return [(int(line[:5]), int(line[6:])) for line in _read(path).splitlines()]
