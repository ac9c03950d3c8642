"""Faults of brokers, network and store: nothing acknowledged is lost, nothing doubled, nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.play import TABLE, Record, parameters, play, strikes_servers
from tests.faults.table import Row
from tests.servers.apache_kafka import KafkaCluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize("row", parameters(row for row in TABLE if strikes_servers(row)))
def test_fault(
    row: Row, kafka_cluster3: KafkaCluster, request: pytest.FixtureRequest, tmp_path: Path, record_property: Record
) -> None:
    play(row, kafka_cluster3, request, tmp_path, record_property)
