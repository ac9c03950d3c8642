"""The table of faults over three real brokers: nothing acknowledged is lost, nothing doubled, nothing changed.

One seed a row, printed with the results at the end of the run; ``ROLLTAPE_SEED`` gives another. ``make soak`` plays
many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.servers import Servers
from tests.faults.stage import StageError
from tests.faults.table import ROWS, Row, play_row
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.s3_server import S3Server
from tests.servers.toxiproxy import Toxiproxy

TABLE = [row for row in ROWS if not row.soak_only]
SEED = int(os.environ.get("ROLLTAPE_SEED", "1130"))

Record = Callable[[str, object], None]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def rows(*needs: str) -> list[pytest.ParameterSet]:
    """Rows that need exactly these servers beside the brokers."""
    return [pytest.param(row, id=row.name) for row in TABLE if row.needs == frozenset(needs)]


def run(row: Row, servers: Servers, folder: Path, record: Record) -> None:
    try:
        result = play_row(row, servers, folder, SEED)
    except StageError as error:
        error.add_note(f"row {row.name}, seed {SEED}")
        raise
    # The summary prints it, also when another process ran this.
    record("fault", result.to_json())
    assert result.ok, f"seed {SEED}: " + "\n".join(result.problems)


@pytest.mark.parametrize("row", rows())
def test_fault(row: Row, kafka_cluster3: KafkaCluster, tmp_path: Path, record_property: Record) -> None:
    run(row, Servers(cluster=kafka_cluster3), tmp_path, record_property)


@pytest.mark.parametrize("row", rows("toxiproxy"))
def test_network_fault(
    row: Row, kafka_cluster3: KafkaCluster, toxiproxy: Toxiproxy, tmp_path: Path, record_property: Record
) -> None:
    run(row, Servers(cluster=kafka_cluster3, toxiproxy=toxiproxy), tmp_path, record_property)


@pytest.mark.parametrize("row", rows("s3"))
def test_object_store_fault(
    row: Row, kafka_cluster3: KafkaCluster, s3_server: S3Server, tmp_path: Path, record_property: Record
) -> None:
    run(row, Servers(cluster=kafka_cluster3, s3=s3_server), tmp_path, record_property)


@pytest.mark.parametrize("row", rows("s3", "toxiproxy"))
def test_slow_object_store(
    row: Row,
    kafka_cluster3: KafkaCluster,
    s3_server: S3Server,
    toxiproxy: Toxiproxy,
    tmp_path: Path,
    record_property: Record,
) -> None:
    run(row, Servers(cluster=kafka_cluster3, s3=s3_server, toxiproxy=toxiproxy), tmp_path, record_property)


def test_every_row_is_played() -> None:
    kinds = [rows(), rows("toxiproxy"), rows("s3"), rows("s3", "toxiproxy")]
    assert sum(map(len, kinds)) == len(TABLE)
    assert len({row.name for row in ROWS}) == len(ROWS)
