"""The results of the rows, printed as a table at the end of the run."""

from __future__ import annotations

import pytest
from tests.faults.table import Result, lines

_RESULTS: list[Result] = []


@pytest.fixture(scope="session")
def fault_results() -> list[Result]:
    """Where a row's result goes."""
    return _RESULTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each fault, its seed and what came of it."""
    if _RESULTS:
        terminalreporter.section("faults over three Kafka brokers")
        for line in lines(_RESULTS):
            terminalreporter.write_line(line)
