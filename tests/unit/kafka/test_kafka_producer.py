"""The log over a broker: producers, their epochs, payloads of all sizes, the newest policy versions."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.schema_events import action, batch_of

from rolltape.ingest import open_log
from rolltape.ingest.kafka.client import BrokerAdmin, KafkaClient, record_bytes
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.ingest.kafka.versions import newest_registered_epoch, read_whole
from rolltape.ingest.kafka.wire import claim_of, from_message, to_message
from rolltape.ingest.recorder import Recorder
from rolltape.schema.codec import Headers, Record, decode, make_record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import ConfigError, FlushTimeout, ProducerFencedError, RecordTooLargeError
from rolltape.store.lake import Lake
from rolltape.store.location import Location

PLACE = Partition("rollout", 0)
LIMIT = 1 << 20
Opener = Callable[..., KafkaLog]


@pytest.fixture
def config(kafka_broker: Any, topic_prefix: str) -> KafkaConfig:
    """Topics of one partition that take messages of 1 MiB."""
    config = KafkaConfig(bootstrap=tuple(kafka_broker.bootstrap.split(",")), prefix=topic_prefix)
    with contextlib.closing(BrokerAdmin(config)) as admin:
        plan = TopicPlan.of(partitions={"rollout": 1}, max_message_bytes=LIMIT)
        assert all(check.is_sound for check in ensure_topics(admin, plan, create=True))
    return config


@pytest.fixture
def opened(config: KafkaConfig, tmp_path: Path) -> Iterator[Opener]:
    """Opens logs on those topics, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_one(lake: Lake | None = None, spool: str = "spool") -> KafkaLog:
            log = open_log(config.url, lake=None if lake is None else lake.location.url, spool=tmp_path / spool)
            assert isinstance(log, KafkaLog)
            return stack.enter_context(log)

        yield open_one


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake beside the log."""
    return Lake.create(Location.parse(tmp_path / "lake"))


def raw_record(number: int, num_bytes: int, epoch: int, producer_id: str = "p") -> Record:
    """A record of one lane number whose payload is of that many bytes, and no Arrow stream."""
    headers = Headers(
        kind="action_sampled",
        schema_version="1.1",
        codec="arrow+lz4",
        num_rows=1,
        producer_id=producer_id,
        producer_epoch=epoch,
        first_lane_seq=number,
        last_lane_seq=number,
    )
    value = hashlib.shake_128(b"%d" % number).digest(num_bytes)
    return Record(topic="rollout", partition=0, key="group", headers=headers, value=value)


def records_of(log: KafkaLog) -> list[Record]:
    """What lies in the partition, in order."""
    found = []
    for message in read_all(log.client):
        record = from_message(message, log.blobs)
        assert isinstance(record, Record)
        found.append(record)
    return found


def read_all(client: KafkaClient, partition: Partition = PLACE) -> list[Any]:
    """All messages of a partition."""
    with contextlib.closing(client.consumer()) as consumer:
        end = consumer.end_offsets([partition])[partition]
        consumer.assign([partition])
        consumer.seek(partition, 0)
        found: list[Any] = []
        while len(found) < end:
            found += consumer.poll(1.0).get(partition, [])
        return found


# Producers and their epochs.


def test_flush_returns_once_the_brokers_have_it(opened: Opener) -> None:
    log = opened()
    with contextlib.closing(log.producer("p")) as producer:
        records = [raw_record(number, 1000, producer.epoch) for number in range(200)]
        for record in records:
            producer.send(record)
        producer.flush("logged", 30)
        assert producer.acknowledged(PLACE) == 199
        assert producer.unacknowledged_bytes == 0
        assert log.end()[PLACE] == 200
        assert [bytes(found.value) for found in records_of(log)] == [record.value for record in records]


def test_a_second_live_producer_is_refused(opened: Opener) -> None:
    log = opened()
    with contextlib.closing(log.producer("p")), pytest.raises(ProducerFencedError):
        log.producer("p")


def test_a_restart_raises_the_epoch_on_any_machine(opened: Opener, config: KafkaConfig) -> None:
    # Back on the first machine, whose own counter knows nothing of what the others did.
    for spool, epoch in (("one", 1), ("one", 2), ("another", 3), ("one", 4), ("a third", 5)):
        log = opened(spool=spool)
        with contextlib.closing(log.producer("p")) as producer:
            assert producer.epoch == epoch
            producer.send(raw_record(0, 10, epoch))
            producer.flush("logged", 30)
    assert newest_registered_epoch(KafkaClient(config), "p") == 5
    assert newest_registered_epoch(KafkaClient(config), "q") == 0


def test_the_lakes_marks_raise_the_epoch_too(opened: Opener, lake: Lake) -> None:
    record = make_record(batch_of("action_sampled", action(1)))
    import pyarrow as pa

    lake.append({"action_sampled": pa.Table.from_batches([decode(record.value)])}, {"lane/p/41/rollout/0": 0})
    with contextlib.closing(opened(lake).producer("p")) as producer:
        assert producer.epoch == 42


def test_what_is_left_in_the_spool_goes_first_at_the_next_start(opened: Opener, tmp_path: Path) -> None:
    log = opened()
    producer = log.producer("p")
    for number in range(5):
        producer.send(raw_record(number, 1000, 1))
    producer.flush("spooled", 30)
    folder = producer._writer.folder
    shutil.copytree(folder, tmp_path / "kept")
    producer.close()
    assert not folder.exists()
    # As if it had been killed before the brokers answered.
    shutil.copytree(tmp_path / "kept", folder)
    with contextlib.closing(opened().producer("p")) as again:
        again.wait_for_older_epochs(30)
        again.send(raw_record(0, 10, again.epoch))
        again.flush("logged", 30)
    lanes = [(found.headers.producer_epoch, found.headers.first_lane_seq) for found in records_of(log)]
    assert lanes[:5] == [(1, number) for number in range(5)]
    assert set(lanes[5:]) == {(1, number) for number in range(5)} | {(2, 0)}
    assert not folder.exists()


def test_a_log_without_lake_and_spool_says_so(config: KafkaConfig) -> None:
    log = open_log(config.url)
    with contextlib.closing(log), pytest.raises(ConfigError, match="spool"):
        log.producer("p")


def test_a_spool_of_kafka_lies_beside_that_of_a_committer(config: KafkaConfig, lake: Lake) -> None:
    log = open_log(config.url, lake=lake.location.url)
    assert isinstance(log, KafkaLog)
    assert log.spool_path.parent == lake.spool_path
    assert log.spool_path.name.startswith("kafka-")
    log.close()


@pytest.mark.parametrize("where", ["beside the lake", "a folder"])
def test_a_spool_is_found_again_by_another_address_of_the_same_brokers(
    config: KafkaConfig, lake: Lake, tmp_path: Path, where: str
) -> None:
    spool = tmp_path / "spool" if where == "a folder" else None
    other = replace(config, bootstrap=(*reversed(config.bootstrap), "localhost:1", *config.bootstrap))
    with KafkaLog(config, lake, spool=spool) as one, KafkaLog(other, lake, spool=spool) as two:
        assert one.spool_path == two.spool_path
    elsewhere = replace(config, prefix=f"{config.prefix}-2")
    with contextlib.closing(BrokerAdmin(elsewhere)) as admin:
        ensure_topics(admin, TopicPlan(), create=True)
    with KafkaLog(elsewhere, lake, spool=spool) as three:
        assert three.spool_path not in (one.spool_path, lake.spool_path)


def test_threads_share_a_recorder(opened: Opener) -> None:
    log = opened()
    with Recorder(log, producer_id="p", run_id="run") as recorder:

        def record(thread: int) -> None:
            for number in range(50):
                recorder.record("rollout_started", trajectory_id=f"{thread}-{number}", attempt=0, group_id=f"{thread}")

        threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.flush()
    rows = [row for found in records_of(log) for row in decode(found.value).to_pylist()]
    assert [row["lane_seq"] for row in rows] == list(range(200))
    for thread_number in range(4):
        own = [row["trajectory_id"] for row in rows if row["group_id"] == str(thread_number)]
        assert own == [f"{thread_number}-{number}" for number in range(50)]
    # They were filled into fewer records than there are events.
    assert len(records_of(log)) < 200


# Sizes (case D18): what is counted is what is sent.


def test_payloads_around_the_limit_all_arrive(opened: Opener, lake: Lake) -> None:
    log = opened(lake)
    around = range(LIMIT - 400, LIMIT + 50, 25)
    with contextlib.closing(log.producer("p")) as producer:
        records = [raw_record(number, size, producer.epoch) for number, size in enumerate(around)]
        for record in records:
            producer.send(record)
        producer.flush("logged", 60)
    assert [bytes(found.value) for found in records_of(log)] == [record.value for record in records]
    claimed = [claim_of(message.headers) is not None for message in read_all(log.client)]
    fits = [record_bytes(*to_message(record)) <= LIMIT for record in records]
    assert claimed == [not fit for fit in fits]
    assert True in claimed
    assert False in claimed


def test_an_action_of_40_mb_lies_beside_the_lake(opened: Opener, lake: Lake) -> None:
    log = opened(lake)
    with contextlib.closing(log.producer("p")) as producer:
        record = raw_record(0, 40 << 20, producer.epoch)
        producer.send(record)
        producer.flush("logged", 60)
    (message,) = read_all(log.client)
    assert message.value == b""
    sha256 = hashlib.sha256(record.value).hexdigest()
    assert claim_of(message.headers) == (sha256, 40 << 20)
    (found,) = records_of(log)
    assert hashlib.sha256(found.value).hexdigest() == sha256
    assert [path.name for path in Path(lake.location.path, "blobs", "sha256").iterdir()] == [sha256[:2]]


def test_without_a_lake_a_payload_above_the_limit_is_refused_at_once(opened: Opener) -> None:
    log = opened()
    with contextlib.closing(log.producer("p")) as producer:
        with pytest.raises(RecordTooLargeError, match=r"lake=URL"):
            producer.send(raw_record(0, LIMIT, producer.epoch))
        # It was not taken: the lane goes on.
        producer.send(raw_record(0, LIMIT // 2, producer.epoch))
        producer.flush("logged", 30)
        assert producer.acknowledged(PLACE) == 0


def test_a_topic_whose_limit_was_lowered_gets_claim_checks(opened: Opener, config: KafkaConfig, lake: Lake) -> None:
    log = opened(lake)
    with contextlib.closing(BrokerAdmin(config)) as admin:
        admin.alter_configs("rollout", {"max.message.bytes": str(LIMIT // 4)})
    with contextlib.closing(log.producer("p")) as producer:
        for number in range(3):
            producer.send(raw_record(number, LIMIT // 2, producer.epoch))
        producer.flush("logged", 60)
    assert {found.headers.first_lane_seq for found in records_of(log)} == {0, 1, 2}


# What the log tells of itself.


def version(number: int, **fields: Any) -> dict[str, Any]:
    return {"policy_id": "actor", "policy_run_epoch": 1, "version": number, **fields}


def told(log: KafkaLog) -> list[tuple[str, int]]:
    """Kind and version number of the newest versions."""
    rows = [(delivery.kind, delivery.table.to_pylist()[0]) for delivery in log.newest_versions()]
    return [(kind, row[kind]["version"]) for kind, row in rows]


def test_the_newest_policy_versions_are_found_by_who_starts_late(opened: Opener) -> None:
    log = opened()
    with Recorder(log, producer_id="trainer", run_id="run") as recorder:
        for number in (1, 2, 3):
            recorder.record("weights_published", payload="full", path=f"weights/{number}", **version(number))
        recorder.record("weights_staged", engine_id="e", **version(3))
        recorder.record("weights_committed", **version(2))
        recorder.flush()
        assert told(log) == [("weights_published", 2), ("weights_published", 3), ("weights_committed", 2)]
    (published,) = [row for row in log.newest_versions() if row.kind == "weights_published"][:1]
    row = published.table.to_pylist()[0]
    assert (row["weights_published"]["path"], row["log_topic"], row["producer_id"]) == (
        "weights/2",
        "policy-versions",
        "trainer",
    )
    # Another process knows what is there.
    with Recorder(opened(spool="other"), producer_id="coordinator", run_id="run") as recorder:
        recorder.record("weights_committed", **version(3))
        recorder.record("weights_aborted", reason="no engine", **version(4))
        recorder.flush()
    assert told(log) == [("weights_published", 3), ("weights_committed", 3), ("weights_aborted", 4)]


def test_versions_of_runs_and_policies_do_not_replace_each_other(opened: Opener, config: KafkaConfig) -> None:
    log = opened()
    for run_id, policy_id in (("run/a", "actor"), ("run", "a/actor"), ("run", "critic")):
        with Recorder(log, producer_id=f"t-{policy_id.replace('/', '-')}", run_id=run_id) as recorder:
            recorder.record("weights_published", payload="full", **{**version(7), "policy_id": policy_id})
            recorder.record("weights_committed", **{**version(7), "policy_id": policy_id})
            recorder.flush()
    assert len(told(log)) == 6
    assert len(read_whole(KafkaClient(config), Partition("policy-versions", 0))) == 6


def test_waiting_for_the_archive_needs_a_sink(opened: Opener, lake: Lake) -> None:
    log = opened(lake)
    log.wait_until_archived(5)
    with contextlib.closing(log.producer("p")) as producer:
        producer.send(raw_record(0, 10, producer.epoch))
        producer.flush("logged", 30)
    with pytest.raises(FlushTimeout, match="rollout/0 is at -1 of 0"):
        log.wait_until_archived(0.2)
    lake.append({}, {"log/rollout/0": 0})
    log.wait_until_archived(5)
    with pytest.raises(ConfigError, match="lake"):
        opened().wait_until_archived(1)
