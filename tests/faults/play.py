"""A row of the table as a test: one seed, told with the results at the end of the run; ``ROLLTAPE_SEED`` gives another.

The rows lie in two files, so that two processes of pytest-xdist play them side by side, each on brokers of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import pytest
from tests.faults.servers import Servers
from tests.faults.stage import StageError
from tests.faults.table import ROWS, Row, play_row
from tests.servers.apache_kafka import KafkaCluster

TABLE: Final = [row for row in ROWS if not row.soak_only]
SEED: Final = int(os.environ.get("ROLLTAPE_SEED", "1130"))

Record = Callable[[str, object], None]

_FIXTURES: Final = {"toxiproxy": "toxiproxy", "s3": "s3_server"}
_OF_SERVERS: Final = ("brokers", "network", "storage")


def strikes_servers(row: Row) -> bool:
    """Whether the row strikes brokers, network or store, rather than our processes or what they write."""
    return row.play.__module__.rpartition(".")[2] in _OF_SERVERS


def parameters(rows: Iterable[Row]) -> list[pytest.ParameterSet]:
    """Rows that run where the servers are that they need beside the brokers."""
    return [
        pytest.param(row, id=row.name, marks=pytest.mark.needs(*(_FIXTURES[need] for need in sorted(row.needs))))
        for row in rows
    ]


def play(row: Row, cluster: KafkaCluster, request: pytest.FixtureRequest, folder: Path, record: Record) -> None:
    """Play a row, and fail with what it found."""
    beside = {need: request.getfixturevalue(_FIXTURES[need]) for need in row.needs}
    try:
        result = play_row(row, Servers(cluster=cluster, **beside), folder, SEED)
    except StageError as error:
        error.add_note(f"row {row.name}, seed {SEED}")
        raise
    # The summary prints it, also when another process ran this.
    record("fault", result.to_json())
    assert result.ok, f"seed {SEED}: " + "\n".join(result.problems)
