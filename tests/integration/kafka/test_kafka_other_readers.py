"""What we write is plain Kafka and plain Delta: Kafka's own console consumer, kcat and SQL see the same events."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.fixtures import Broker, client_environment

from rolltape.ingest import Recorder, open_log
from rolltape.ingest.kafka.client import BrokerConsumer, KafkaClient
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.ingest.log import EventLog
from rolltape.schema.cursor import Partition
from rolltape.store import Lake

PARTITIONS = 3
GROUPS = 8


class Seen(NamedTuple):
    """One message of the rollout topic, as another program prints it."""

    partition: int
    offset: int
    key: str
    kind: str
    producer_id: str
    num_rows: int
    first_lane_seq: int


def make_topics(config: KafkaConfig) -> None:
    with contextlib.closing(KafkaClient(config).admin()) as admin:
        ensure_topics(admin, TopicPlan.of(partitions={"rollout": PARTITIONS}), create=True)


def record_group(recorder: Recorder, number: int) -> list[str]:
    """Two rollouts of one group, each one start, one action and one end; returns the event ids."""
    common: dict[str, Any] = {"attempt": 0, "group_id": f"group-{number % GROUPS}"}
    ids = []
    for member in range(2):
        attempt = {**common, "trajectory_id": f"t{number}-{member}"}
        ids.append(recorder.record("rollout_started", prompt_token_ids=[1, 2], **attempt))
        action = {"token_ids": [3, 4, number], "rollout_log_probs": [-0.1, -0.2, -0.3], "action_kind": "execution"}
        ids.append(recorder.record("action_sampled", **action, **attempt))
        ids.append(recorder.record("rollout_ended", status="completed", **attempt))
    return ids


def num_messages(log: EventLog) -> int:
    """Messages of the rollout topic: nothing was deleted, and nobody wrote transactions."""
    return sum(log.end()[Partition("rollout", number)] for number in range(PARTITIONS))


@pytest.fixture
def config(real_kafka: Broker, topic_prefix: str) -> KafkaConfig:
    """A log of several partitions on real brokers."""
    made = KafkaConfig.from_url(f"kafka://{real_kafka.bootstrap}/{topic_prefix}", client_environment(real_kafka))
    make_topics(made)
    return made


@pytest.fixture
def event_ids(config: KafkaConfig, tmp_path: Path) -> list[str]:
    """Ids of the events that lie in the rollout topic."""
    ids: list[str] = []
    with (
        open_log(config.url, spool=tmp_path / "spool") as log,
        Recorder(log, producer_id="worker", run_id="run") as recorder,
    ):
        for number in range(40):
            ids += record_group(recorder, number)
            if number % 10 == 0:
                recorder.flush()
        recorder.flush()
    return ids


def checked(seen: list[Seen], num_events: int) -> None:
    """Every event once, each lane in order, each group in one partition, and nothing decoded to know it."""
    assert sum(message.num_rows for message in seen) == num_events
    assert {message.kind for message in seen} == {"rollout_started", "action_sampled", "rollout_ended"}
    assert {message.producer_id for message in seen} == {"worker"}
    assert len({message.partition for message in seen}) > 1
    places = {(message.key, message.partition) for message in seen}
    assert Counter(key for key, _ in places) == dict.fromkeys((f"group-{number}" for number in range(GROUPS)), 1)
    for partition in range(PARTITIONS):
        lane = sorted((m for m in seen if m.partition == partition), key=lambda message: message.offset)
        expected = 0
        for message in lane:
            assert message.first_lane_seq == expected
            expected += message.num_rows


def header(name: str, text: str) -> str:
    found = re.search(rf"rt-{name}[:=]([\w.-]+)", text)
    assert found, text
    return found[1]


def seen_in(partition: str, offset: str, key: str, headers: str) -> Seen:
    return Seen(
        int(partition),
        int(offset),
        key,
        header("kind", headers),
        header("producer", headers),
        int(header("rows", headers)),
        int(header("first-seq", headers)),
    )


def test_the_console_consumer_of_kafka_reads_keys_and_headers(
    apache_kafka: KafkaCluster, topic_prefix: str, tmp_path: Path
) -> None:
    config = KafkaConfig.from_url(f"kafka://{apache_kafka.bootstrap}/{topic_prefix}", {})
    make_topics(config)
    with (
        open_log(config.url, spool=tmp_path / "spool") as log,
        Recorder(log, producer_id="worker", run_id="run") as recorder,
    ):
        ids = [event_id for number in range(40) for event_id in record_group(recorder, number)]
        recorder.flush()
        count = num_messages(log)
    shown = ("print.partition=true", "print.offset=true", "print.key=true", "print.headers=true", "print.value=false")
    text = apache_kafka.tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", apache_kafka.bootstrap, "--topic", config.broker_topic("rollout"), "--from-beginning"),
        *("--max-messages", str(count), "--timeout-ms", "20000"),
        *(part for setting in shown for part in ("--formatter-property", setting)),
    )
    found = re.findall(r"^Partition:(\d+)\tOffset:(\d+)\t(.*)\t(\S+)$", text, re.MULTILINE)
    checked([seen_in(partition, offset, key, headers) for partition, offset, headers, key in found], len(ids))


def test_kcat_reads_keys_headers_and_events(kcat: str, config: KafkaConfig, event_ids: list[str]) -> None:
    common = [kcat, "-C", "-q", "-e", "-b", ",".join(config.bootstrap), "-t", config.broker_topic("rollout")]
    text = subprocess.run(
        [*common, "-o", "beginning", "-f", r"%p\t%o\t%k\t%h\n"], capture_output=True, text=True, check=True
    ).stdout
    seen = [seen_in(*line.split("\t")) for line in text.splitlines()]
    checked(seen, len(event_ids))
    found: list[str] = []
    for message in seen[:8]:
        place = ["-p", str(message.partition), "-o", str(message.offset), "-c", "1", "-f", "%s"]
        payload = subprocess.run([*common, *place], capture_output=True, check=True).stdout
        table = pa.ipc.open_stream(payload).read_all()
        assert table["kind"].unique().to_pylist() == [message.kind]
        found += table["event_id"].to_pylist()
    assert len(found) == sum(message.num_rows for message in seen[:8])
    assert set(found) <= set(event_ids)


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.needs("s3_bucket"))])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    """A lake on disk, and one in an object store."""
    if request.param == "disk":
        return Lake.create(tmp_path / "lake")
    bucket = request.getfixturevalue("s3_bucket")
    return Lake.create(f"{bucket.url}/lake", options=bucket.options)


@contextlib.contextmanager
def archiving(config: KafkaConfig, lake: Lake) -> Iterator[None]:
    """A sink beside."""
    stop = threading.Event()
    with Sink(config, lake, options=SinkOptions(linger_s=0.02, maintenance=False), alone=True) as sink:
        thread = threading.Thread(target=sink.run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def test_sql_sees_rollouts_while_they_run_and_in_the_end_the_events_of_the_log(
    config: KafkaConfig, lake: Lake, tmp_path: Path
) -> None:
    written: list[str] = []
    done = threading.Event()

    def roll_out() -> None:
        with Recorder(log, producer_id="worker", run_id="run") as recorder:
            for number in range(120):
                written.extend(record_group(recorder, number))
                done.wait(0.01)
            recorder.flush()
        done.set()

    with archiving(config, lake), open_log(config.url, lake=None, spool=tmp_path / "spool") as log:
        worker = threading.Thread(target=roll_out)
        worker.start()
        counts = []
        while not done.is_set():
            row = lake.sql("SELECT count(*) AS ended, count(DISTINCT trajectory_id) AS t FROM rollout_ended").rows()[0]
            assert row["ended"] == row["t"] <= len(written) // 3
            counts.append(row["ended"])
        worker.join()
        assert counts == sorted(counts)
        assert any(0 < count < 240 for count in counts), "no question was asked while rollouts ran"
        with contextlib.closing(KafkaClient(config).consumer()) as consumer:
            logged = ids_in(consumer, num_messages(log))
        deadline = time.monotonic() + 60
        while lake.sql("SELECT count(*) AS n FROM rollout_ended").rows()[0]["n"] < 240:
            assert time.monotonic() < deadline
    seen = lake.sql("SELECT event_id FROM events WHERE log_topic = 'rollout'").arrow()["event_id"].to_pylist()
    assert sorted(seen) == sorted(logged) == sorted(written)


def ids_in(consumer: BrokerConsumer, count: int) -> list[str]:
    """Event ids of all messages of the rollout topic, decoded by Arrow alone."""
    places = [Partition("rollout", number) for number in range(PARTITIONS)]
    consumer.assign(places)
    for place in places:
        consumer.seek(place, 0)
    ids: list[str] = []
    while count:
        for messages in consumer.poll(5.0).values():
            count -= len(messages)
            for message in messages:
                ids += pa.ipc.open_stream(pa.py_buffer(message.value)).read_all()["event_id"].to_pylist()
    return ids
