"""Planted errors, each of which must make a test fail: ``make mutants``.

A mutant is a small edit of the product: a sign, a missing detach, an open end closed, a shifted mask. They are listed
in ``mutants.toml``. For each, the room that it lies in is copied to a temporary folder, the copy is edited and put
first on the import path, and the tests named with the mutant run in a process of their own. A test that fails kills the
mutant. The unedited copy goes first: if a test fails there, no mutant can be judged.

Exits 1 if a mutant survives, if its edit no longer fits the source, or if the unedited copy fails.

    python tests/mutants.py             all of them
    python tests/mutants.py dis clip    those with one of these words in their name
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

# One thread each: before torch is imported, which reads it once.
os.environ["OMP_NUM_THREADS"] = "1"

ROOT: Final = Path(__file__).resolve().parent.parent
MAX_WORKERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted error."""

    name: str
    module: str
    """``room/module`` without suffix, as ``trainers/gates``."""
    before: str
    """Text that occurs exactly once in the module."""
    after: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The room that is copied."""
        return self.module.partition("/")[0]

    @property
    def file(self) -> Path:
        """Its file, relative to the room's package."""
        return Path(self.module.partition("/")[2] + ".py")


def read_mutants(path: Path) -> tuple[Mutant, ...]:
    """The list, in the order of the file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return tuple(Mutant(**{**entry, "tests": tuple(f"tests/{test}" for test in entry["tests"])}) for entry in entries)


@dataclass(slots=True)
class Outcome:
    """What the tests said about one edit."""

    killed: bool
    failed: list[str] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0


class _FirstFailure:
    """A pytest plugin that notes which tests failed, and which were run."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.num_passed = 0

    def pytest_runtest_logreport(self, report: object) -> None:
        """Called by pytest for each phase of each test."""
        if getattr(report, "failed", False):
            self.failed.append(str(getattr(report, "nodeid", "")))
        elif getattr(report, "when", "") == "call" and getattr(report, "passed", False):
            self.num_passed += 1

    def pytest_collectreport(self, report: object) -> None:
        """A module that cannot be imported counts as failed."""
        if getattr(report, "failed", False):
            reason = str(getattr(report, "longreprtext", "")).strip().rpartition("\n")[2]
            self.failed.append(f"{getattr(report, 'nodeid', '')}: {reason}")


def copy_room(room: str, folder: Path) -> Path:
    """Copy one room's package under ``folder``; returns the copy. The other rooms are still found where they are.

    What is compiled already is copied too: it stays valid, as the copies keep the times of their sources.
    """
    return Path(shutil.copytree(ROOT / room / "rolltape" / room, folder / "rolltape" / room))


def plant(mutant: Mutant, package: Path) -> str:
    """Edit the copy; returns what is wrong with the mutant, or nothing."""
    path = package / mutant.file
    source = path.read_text(encoding="utf-8")
    count = source.count(mutant.before)
    if count != 1:
        return f"its text occurs {count} times in {mutant.module}, expected once; update the mutant"
    path.write_text(source.replace(mutant.before, mutant.after), encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    return ""


def _run_tests(folder: str, tests: tuple[str, ...], connection: Connection) -> None:
    """In a forked process: run the tests against the copy and send the failures back."""
    import pytest
    from hypothesis import Phase, settings

    # That an example fails is enough: it is made no smaller, and not kept for runs of the true source.
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("mutants")
    # The copy first; the root, because tests name each other from there.
    sys.path[:0] = [folder, str(ROOT)]
    sys.dont_write_bytecode = True
    plugin = _FirstFailure()
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    # What is loaded here already cannot have its assertions rewritten; the tests themselves are not loaded.
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main([*options, *tests], plugins=[plugin])
    connection.send((int(code), plugin.failed, plugin.num_passed))
    connection.close()
    os._exit(0)


def judge(folder: Path, tests: tuple[str, ...], timeout_s: float = 120.0) -> Outcome:
    """Run tests against the copy in ``folder``. A run that dies kills the mutant; one that hangs proves nothing."""
    start = time.monotonic()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(str(folder), tests, sender))
    process.start()
    sender.close()
    failed: list[str] = []
    problem = ""
    try:
        if receiver.poll(timeout_s):
            code, failed, num_passed = receiver.recv()
            if not failed and (code != 0 or num_passed == 0):
                problem = f"pytest ended with {code} and {num_passed} passed tests: nothing was judged"
        else:
            problem = f"no answer within {timeout_s:.0f} s"
    except EOFError:
        failed = ["(the process died)"]
    process.kill()
    process.join()
    return Outcome(killed=bool(failed), failed=failed, problem=problem, seconds=time.monotonic() - start)


def preload() -> None:
    """Import what every run needs once, so that a fork costs nothing; never a room that may be mutated."""
    import confluent_kafka.admin
    import deltalake
    import duckdb
    import hypothesis
    import kafka
    import pandas as pd
    import pyarrow.compute
    import pyarrow.fs
    import pytest
    import torch
    import transformers.models.gpt_bigcode.modeling_gpt_bigcode
    import trustme

    assert all((confluent_kafka, deltalake, duckdb, hypothesis, kafka, pd))
    assert all((pyarrow, pytest, torch, transformers, trustme))
    loaded = sorted(name for name in sys.modules if name.startswith("rolltape."))
    assert not loaded, f"imported before they could be mutated: {loaded}"
    # pytest collects garbage at its end: it need not look through all of this each time.
    gc.freeze()


def check_unedited(mutants: tuple[Mutant, ...]) -> Outcome:
    """All tests of the mutants against unedited copies: each must pass."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for room in sorted({mutant.room for mutant in mutants}):
            copy_room(room, folder)
        return judge(folder, tuple(sorted({test for mutant in mutants for test in mutant.tests})), timeout_s=600.0)


def check(mutant: Mutant) -> Outcome:
    """Plant one mutant and run its tests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = plant(mutant, copy_room(mutant.room, folder))
        return Outcome(killed=False, problem=problem) if problem else judge(folder, mutant.tests)


def describe(mutant: Mutant, outcome: Outcome) -> str:
    """One line of the table: verdict, time, place, name, and the test that failed or what is wrong."""
    verdict = "killed  " if outcome.killed else "SURVIVED"
    detail = outcome.failed[0].removeprefix("tests/") if outcome.failed else outcome.problem or " ".join(mutant.tests)
    return f"{verdict} {outcome.seconds:5.1f} s  {mutant.module:<20} {mutant.name:<40} {detail}"


def main(words: list[str]) -> int:
    """Judge the mutants and print a table."""
    start = time.monotonic()
    os.chdir(ROOT)
    chosen = tuple(
        mutant
        for mutant in read_mutants(ROOT / "tests" / "mutants.toml")
        if not words or any(word in mutant.name for word in words)
    )
    if not chosen:
        print(f"no mutant has {' or '.join(words)} in its name")
        return 1
    preload()
    unedited = check_unedited(chosen)
    if unedited.killed or unedited.problem:
        print(f"the unedited source fails: {unedited.problem or unedited.failed[0]}")
        return 1
    survivors = 0
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        for mutant, outcome in zip(chosen, pool.map(check, chosen), strict=True):
            survivors += not outcome.killed
            print(describe(mutant, outcome), flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed in {time.monotonic() - start:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
