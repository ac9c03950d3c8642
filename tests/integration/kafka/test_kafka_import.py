"""Files come onto a Kafka log by the same command, and onto it once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from tests.servers.fixtures import Broker

from rolltape.ingest.kafka.client import KafkaClient
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.recipes.cli import main
from rolltape.store import Lake
from rolltape.store.verify import verify

FILE = Path(__file__).parents[2] / "data" / "nemogym" / "cc_rollouts_with_logprobs.jsonl"


def test_a_file_is_imported_through_the_log_and_adds_nothing_the_second_time(
    noida_broker: Broker,
    topic_prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url, lake = f"kafka://{noida_broker.bootstrap}/{topic_prefix}", str(tmp_path / "lake")
    with contextlib.closing(KafkaClient(KafkaConfig.from_url(url, {})).admin()) as admin:
        ensure_topics(admin, TopicPlan(), create=True)
    new = []
    for _ in range(2):
        assert main(["import", "--lake", lake, "--log", url, str(FILE)]) == 0
        new.append(json.loads(capsys.readouterr().out)["num_new"])
        assert main(["sink", "--once", "--lake", lake, "--log", url]) == 0
        capsys.readouterr()
    assert new[0] > 0
    assert new[1] == 0
    opened = Lake.open(lake, read_only=True)
    assert sum(file.num_rows for file in opened.snapshot().files) == new[0]
    assert verify(opened).ok
