"""A run's processes end with whoever started them, however that ended, and the next start goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolltape.store.lake import Lake

RECIPE = """
run_id = "small"
seed = 5
[rollout]
groups_per_step = 2
group_size = 4
[environment.options]
num_heldout = 20
[trainer]
max_steps = {max_steps}
checkpoint_every = 2
"""
COMMANDS = {"committer", "trainer", "worker"}

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")


def train(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rolltape.recipes.cli", "train", str(folder / "recipe.toml")]
    return subprocess.Popen([*command, "--lake", str(folder / "lake")], stdout=subprocess.PIPE, text=True)


def processes_of(folder: Path) -> set[str]:
    """Commands of the living processes that were started for the folder's lake."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
        except OSError:  # it has just ended
            continue
        if any(str(folder / "lake") in word for word in words):
            found |= COMMANDS & set(words)
    return found


def wait_for(folder: Path, wanted: set[str], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while processes_of(folder) != wanted:
        assert time.monotonic() < deadline, f"expected {wanted}, got {processes_of(folder)}"
        time.sleep(0.1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_children_end_with_their_supervisor(tmp_path: Path, number: signal.Signals, status: int) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(max_steps=10_000))
    with train(tmp_path) as running:
        assert running.stdout is not None
        running.stdout.readline()  # a first step
        wait_for(tmp_path, COMMANDS)
        os.kill(running.pid, number)
        running.stdout.read()
    assert running.returncode == status
    wait_for(tmp_path, set())


@pytest.mark.timeout(600)
def test_a_run_goes_on_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(max_steps=12))
    with train(tmp_path) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        first.stdout.read()
    wait_for(tmp_path, set())
    with train(tmp_path) as second:
        assert second.stdout is not None
        lines = second.stdout.read().splitlines()
    assert second.returncode == 0
    assert json.loads(lines[-1])["message"] == "run small ended"
    steps = Lake.open(tmp_path / "lake", read_only=True).sql("select step from steps order by step").arrow()
    assert steps["step"].to_pylist() == list(range(1, 13))
