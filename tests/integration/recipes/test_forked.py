"""What a fork server forks is a process like one that was started by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rolltape.recipes.forked import FORK_VARIABLE, Forked, ForkServer
from rolltape.recipes.supervisor import Child
from rolltape.store.lake import Lake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

TIMEOUT_S = 120.0


class Started:
    """Starts commands whose output goes to one file."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server = server
        self.log = folder / "log"

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Forked:
        with self.log.open("ab") as log:
            return self.server.start(list(arguments), log.fileno(), environment or os.environ)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def started(server: ForkServer, tmp_path: Path) -> Started:
    return Started(server, tmp_path)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_has_the_arguments_folder_environment_and_log_that_it_was_given(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lake.create(tmp_path / "lake")
    monkeypatch.chdir(tmp_path)
    committer = started.start("committer", "--lake", "lake")
    words = [sys.executable, "-m", "rolltape.recipes.cli", "committer", "--lake", "lake"]
    until(lambda: words_of(committer.pid) == words)
    assert Path(f"/proc/{committer.pid}/cwd").resolve() == tmp_path
    assert committer.poll() is None

    asked = started.start("sql", "--lake", "lake", "select 6 * 7 as answer")
    assert asked.wait(TIMEOUT_S) == 0
    assert json.loads(started.log.read_text()) == {"answer": 42}
    assert asked.pid != committer.pid
    refused = started.start("sql", "--lake", "nowhere", "select 1", environment={"ROLLTAPE_DEBUG": "1"})
    assert refused.wait(TIMEOUT_S) == 1
    assert "Traceback" in started.log.read_text()


def test_its_exit_status_is_told(started: Started, tmp_path: Path) -> None:
    refused = started.start("sql", "--lake", str(tmp_path / "nowhere"), "select 1", environment={})
    assert refused.wait(TIMEOUT_S) == 1
    assert started.log.read_text().startswith("rolltape sql: ")
    assert started.start("nonsense").wait(TIMEOUT_S) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_it_takes_signals(started: Started, tmp_path: Path, number: signal.Signals, status: int) -> None:
    committer, other = (
        started.start("committer", "--lake", Lake.create(tmp_path / name).location.url) for name in ("lake", "other")
    )
    until(lambda: _catches(committer.pid, signal.SIGTERM))
    with pytest.raises(subprocess.TimeoutExpired):
        committer.wait(0.05)
    committer.send_signal(number)
    assert committer.wait(TIMEOUT_S) == status
    assert not is_running(committer.pid)
    committer.kill()  # it has ended: nothing happens
    assert other.poll() is None
    assert is_running(other.pid)
    other.kill()


def _catches(pid: int, number: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_nothing_outlives_its_server(started: Started, tmp_path: Path) -> None:
    Lake.create(tmp_path / "lake")
    committer = started.start("committer", "--lake", str(tmp_path / "lake"))
    server = int(Path(f"/proc/{committer.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    assert committer.wait(TIMEOUT_S) == -signal.SIGKILL
    until(lambda: not is_running(committer.pid))
    again = started.start("sql", "--lake", str(tmp_path / "lake"), "select 1 as one")
    assert again.wait(TIMEOUT_S) == 0

    last = started.start("committer", "--lake", str(tmp_path / "lake"))
    started.server.stop()
    until(lambda: not is_running(last.pid))
    assert last.poll() == -signal.SIGKILL


def test_a_server_that_does_not_start_is_a_process_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    failed = Started(ForkServer(), tmp_path).start("sql")
    assert failed.poll() not in (None, 0)
    assert failed.wait(1.0) == failed.returncode


def test_it_is_started_by_itself_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORK_VARIABLE, "0")
    with ForkServer() as server:
        child = Child(name="asked", arguments=["nonsense"], log_path=tmp_path / "log", environment={}, server=server)
        child.start()
        assert isinstance(child.process, subprocess.Popen)
        assert child.process.wait(TIMEOUT_S) == 2
        child.stop()
