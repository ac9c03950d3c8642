"""Free memory goes back to the system."""

from __future__ import annotations

import threading

import psutil
import pytest

from rolltape.ingest.kafka import footprint


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_what_threads_left_free_is_given_back() -> None:
    footprint.limit_arenas()

    def work() -> None:
        kept.append([bytes(2_000) for _ in range(20_000)])

    kept: list[list[bytes]] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    full = resident()
    last = kept[0][-1]
    kept.clear()
    footprint.give_back()
    assert full - resident() > 50 << 20
    assert len(last) == 2_000


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_libc", lambda: None)
    footprint.limit_arenas()
    footprint.give_back()
