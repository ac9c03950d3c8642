"""kill -9 of trainer, workers and committer, at random and in every named window: the run's bits do not change."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HARNESS = Path(__file__).with_name("crash_rounds.py")
NUM_ROUNDS = 20


def harness() -> ModuleType:
    """The harness beside this file, which is also a program."""
    spec = importlib.util.spec_from_file_location("crash_rounds", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_twenty_rounds_of_kills_end_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    rounds = harness()
    results, hits = rounds.rounds(NUM_ROUNDS, 20261130, tmp_path)
    assert [(r.number, r.problems) for r in results if r.problems] == []
    assert set(hits) == set(rounds.WINDOWS), f"every crash window must be hit at least once, got {dict(hits)}"
    assert sum(r.kills.total() for r in results) >= NUM_ROUNDS, "random kills must have struck"
    # What was killed was also started again, so the run did not end by luck.
    assert all(sum(r.restarts.values()) >= len(r.windows_hit) for r in results)
