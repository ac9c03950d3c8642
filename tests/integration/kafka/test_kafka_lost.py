"""A log that lost something, on a real broker: readers go on from the lake, sinks say what is lost and the way out."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]  # not in its __all__
from tests.servers.apache_kafka import KafkaCluster

from rolltape.ingest import Recorder
from rolltape.ingest.deadletters import accept_loss_in_log
from rolltape.ingest.kafka import reader as reader_module
from rolltape.ingest.kafka.client import KafkaClient, Message, consumer
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.ingest.lanes import Lane
from rolltape.recipes.cli import main
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import (
    LakeAheadError,
    LogMismatchError,
    LogUnreachableError,
    OffsetLostError,
    TopicError,
    TopicRecreatedError,
)
from rolltape.store.lake import Lake
from rolltape.store.verify import verify

PLACE = Partition("rollout", 0)
QUICK = SinkOptions(linger_s=0.02, maintenance=False)


@pytest.fixture
def config(apache_kafka: KafkaCluster, topic_prefix: str) -> KafkaConfig:
    """A log of one rollout partition."""
    made = KafkaConfig.from_url(f"kafka://{apache_kafka.bootstrap}/{topic_prefix}", {})
    make_topics(made)
    return made


def make_topics(config: KafkaConfig) -> None:
    with contextlib.closing(KafkaClient(config).admin()) as admin:
        ensure_topics(admin, TopicPlan.of(partitions={"rollout": 1}), create=True)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@contextlib.contextmanager
def opened(config: KafkaConfig, lake: Lake | None, spool: Path) -> Iterator[KafkaLog]:
    with KafkaLog(config, None if lake is None else Lake.open(lake.location), spool=spool) as log:
        yield log


def record(log: KafkaLog, first: int, number: int, producer_id: str = "p") -> None:
    """One record an event."""
    with Recorder(log, producer_id=producer_id, run_id="run") as recorder:
        for item in range(first, first + number):
            recorder.record("rollout_started", trajectory_id=f"t{item}", attempt=0, group_id="g")
            recorder.flush()


def drain(config: KafkaConfig, lake: Lake) -> None:
    with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
        sink.drain(60)


def delete_before(cluster: KafkaCluster, config: KafkaConfig, offset: int, folder: Path) -> None:
    """As retention does, but at once."""
    wish = {"topic": config.broker_topic("rollout"), "partition": 0, "offset": offset}
    file = folder / "delete.json"
    file.write_text(json.dumps({"partitions": [wish], "version": 1}))
    command = "org.apache.kafka.tools.DeleteRecordsCommand"
    cluster.tool(command, "--bootstrap-server", cluster.bootstrap, "--offset-json-file", str(file))


def trajectories(log: KafkaLog, start: Cursor) -> list[str]:
    """What a reader delivers from ``start`` to the present end."""
    with contextlib.closing(log.reader(start, topics=["rollout"])) as reader:
        found: list[str] = []
        while reader.cursor[PLACE] < log.end()[PLACE]:
            for delivery in reader.poll(1.0):
                found += delivery.table["trajectory_id"].to_pylist()
        return found


def test_a_reader_whose_offset_the_log_lost_goes_on_from_the_lake(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path
) -> None:
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 6)
        live = log.reader(Cursor(), topics=["rollout"])
        first: list[str] = []
        while len(first) < 6:
            first += [name for item in live.poll(1.0) for name in item.table["trajectory_id"].to_pylist()]
        record(log, 6, 6)
        drain(config, lake)
        delete_before(apache_kafka, config, 10, tmp_path)
        record(log, 12, 3)
        # One that stood still meanwhile, and those that come late, from before and from after what was deleted.
        while len(first) < 15:
            first += [name for item in live.poll(1.0) for name in item.table["trajectory_id"].to_pylist()]
        live.close()
        expected = [f"t{number}" for number in range(15)]
        assert first == expected
        for start in (0, 3, 10, 13):
            assert trajectories(log, Cursor({PLACE: start})) == expected[start:]


def test_offsets_that_were_deleted_before_they_were_archived_are_named_and_skipped(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 4)
        drain(config, lake)
        record(log, 4, 4, producer_id="q")
        record(log, 8, 4)
        delete_before(apache_kafka, config, 6, tmp_path)
        with pytest.raises(OffsetLostError, match=r"2 offsets \(4 to 5\).*--skip-lost rollout/0"):
            drain(config, lake)
        with pytest.raises(OffsetLostError, match="--skip-lost rollout/0"):
            log.reader(Cursor({PLACE: 4}))
        arguments = ["sink", "--log", config.url, "--lake", str(lake.location), "--once"]
        assert main(arguments) == 1
        assert "OffsetLostError" in capsys.readouterr().err
        assert main([*arguments, "--skip-lost", "rollout/0"]) == 0
        assert '"num_offsets": 2' in capsys.readouterr().out
        # The lane of what was lost stands; the others go on. An operator accepts, and it goes on too.
        assert lake.read("rollout_started").num_rows == 8
        accept_loss_in_log(log, Lane("q", 1, "rollout", 0), 1, first=0)
        drain(config, lake)
        assert sorted(lake.read("rollout_started")["trajectory_id"].to_pylist()) == sorted(
            f"t{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9, 10, 11)
        )
        assert verify(lake).ok


def test_a_topic_that_was_created_anew_is_an_error_until_it_is_adopted(
    config: KafkaConfig, lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 5)
        drain(config, lake)
    with contextlib.closing(KafkaClient(config).admin()) as admin:
        admin.delete(["rollout"])
    make_topics_again(config)
    with pytest.raises(TopicRecreatedError, match=r"rollout/0 up to 4.*--adopt rollout"):
        Sink(config, Lake.open(lake.location), options=QUICK, alone=True)
    arguments = ["sink", "--log", config.url, "--lake", str(lake.location), "--once"]
    assert main([*arguments, "--adopt", "rollout"]) == 0
    assert '"generation": 2' in capsys.readouterr().out
    with opened(config, lake, tmp_path / "spool") as log:
        assert log.end()[PLACE] == 5
        record(log, 5, 3, producer_id="q")
        live = trajectories(log, Cursor({PLACE: 3}))
        drain(config, lake)
        assert trajectories(log, Cursor({PLACE: 3})) == live == ["t3", "t4", "t5", "t6", "t7"]
        assert lake.read("rollout_started")["log_offset"].to_pylist() == list(range(8))
        assert verify(lake).ok


def lose_end(cluster: KafkaCluster, config: KafkaConfig, offset: int) -> None:
    """Cut a partition at this offset while its broker is down."""
    cluster.term(1)
    cluster.cut(config.broker_topic("rollout"), 0, offset)
    cluster.start(1)


def test_a_log_that_lost_its_end_is_read_again_and_nothing_that_it_holds_is_lost_or_doubled(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was written between the cut and the operator's decision lies where the lake has other records."""
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 8)
        drain(config, lake)
    lose_end(apache_kafka, config, 5)
    with opened(config, None, tmp_path / "spool") as log:
        record(log, 8, 2, producer_id="q")
        assert log.end()[PLACE] == 7
    arguments = ["sink", "--log", config.url, "--lake", str(lake.location), "--once"]
    assert main(arguments) == 1
    assert "LakeAheadError" in capsys.readouterr().err
    assert main([*arguments, "--adopt", "rollout"]) == 0
    assert '"generation": 2' in capsys.readouterr().out
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 10, 2, producer_id="q")
        live = trajectories(log, Cursor({PLACE: 6}))
        drain(config, lake)
        assert trajectories(log, Cursor({PLACE: 6})) == live == [f"t{number}" for number in range(6, 12)]
    rows = lake.read("rollout_started")
    assert rows["trajectory_id"].to_pylist() == [f"t{number}" for number in range(12)]
    assert rows["log_offset"].to_pylist() == [*range(8), 13, 14, 15, 16]
    assert verify(lake).ok


def grow_again(config: KafkaConfig, spool: Path, first: int, number: int) -> None:
    """Another producer goes on where the log was cut, until it is longer than it ever was."""
    with opened(config, None, spool) as log:
        record(log, first, number, producer_id="q")


def test_a_log_that_lost_its_end_and_grew_again_is_named_and_read_again(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its offsets look whole; those before the lake's position hold what no sink has archived."""
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 8)
        drain(config, lake)
    lose_end(apache_kafka, config, 5)
    grow_again(config, tmp_path / "spool", 8, 6)
    with opened(config, lake, tmp_path / "spool") as log:
        assert log.end()[PLACE] == 11
        with pytest.raises(LakeAheadError, match=r"rollout/0: expected offset 7.*lane q.*Of offsets 0 to 7.*--adopt"):
            drain(config, lake)
        with pytest.raises(LakeAheadError, match="--adopt rollout"):
            trajectories(log, Cursor({PLACE: 6}))
    arguments = ["sink", "--log", config.url, "--lake", str(lake.location), "--once"]
    assert main(arguments) == 1
    assert "LakeAheadError" in capsys.readouterr().err
    assert lake.read("rollout_started").num_rows == 8
    assert main([*arguments, "--adopt", "rollout"]) == 0
    assert '"generation": 2' in capsys.readouterr().out
    # Adopted once, it is as any other log.
    assert main([*arguments, "--adopt", "rollout"]) == 0
    assert '"generation": 2' in capsys.readouterr().out
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 14, 2, producer_id="q")
        live = trajectories(log, Cursor({PLACE: 6}))
        drain(config, lake)
        assert trajectories(log, Cursor({PLACE: 6})) == live == [f"t{number}" for number in range(6, 16)]
    rows = lake.read("rollout_started")
    assert rows["trajectory_id"].to_pylist() == [f"t{number}" for number in range(16)]
    # Five records of the cut log came again, and are no rows.
    assert rows["log_offset"].to_pylist() == [*range(8), *range(13, 21)]
    assert verify(lake).ok


def test_who_reads_while_a_log_is_cut_and_grows_again_hears_of_it(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path
) -> None:
    """A sink that stood at its end and a reader: neither asked for anything while the log was shorter."""
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 8)
        with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
            sink.drain(60)
            with contextlib.closing(log.reader(Cursor(), topics=["rollout"])) as reader:
                while reader.cursor[PLACE] < 8:
                    reader.poll(1.0)
                lose_end(apache_kafka, config, 5)
                grow_again(config, tmp_path / "spool", 8, 6)
                for read_on in (sink.run_once, lambda: reader.poll(0.5)):
                    with pytest.raises(LogMismatchError):
                        read_until_it_fails(read_on)
    assert lake.read("rollout_started")["trajectory_id"].to_pylist() == [f"t{number}" for number in range(8)]


def test_what_was_read_before_a_log_lost_it_and_is_not_archived_is_kept_by_the_sink_and_missed_by_readers(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path
) -> None:
    waiting = replace(QUICK, linger_s=600.0, max_linger_s=600.0)
    with opened(config, lake, tmp_path / "spool") as log, contextlib.ExitStack() as stack:
        record(log, 0, 8)
        reader = stack.enter_context(contextlib.closing(log.reader(Cursor(), topics=["rollout"])))
        while reader.cursor[PLACE] < 8:
            reader.poll(1.0)
        sink = stack.enter_context(contextlib.closing(Sink(config, lake, options=waiting, alone=True)))
        while 'records_total{outcome="accepted",topic="rollout"} 8.0' not in sink.metrics.text():
            sink.run_once()
        assert lake.read("rollout_started").num_rows == 0
        lose_end(apache_kafka, config, 5)
        grow_again(config, tmp_path / "spool", 8, 6)
        with pytest.raises(OffsetLostError, match="offsets 0 to 7, which this reader has delivered"):
            read_until_it_fails(lambda: reader.poll(0.5))
        with pytest.raises(LakeAheadError, match="--adopt rollout"):
            read_until_it_fails(sink.run_once)
    assert lake.read("rollout_started")["trajectory_id"].to_pylist() == [f"t{number}" for number in range(8)]


def read_until_it_fails(read_on: Callable[[], object]) -> None:
    """The broker was away: what passes by itself is waited out, as whoever runs a sink or a trainer does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(LogUnreachableError):
            read_on()


def test_retention_that_took_what_lies_before_the_position_is_no_loss(
    apache_kafka: KafkaCluster, config: KafkaConfig, lake: Lake, tmp_path: Path
) -> None:
    with opened(config, lake, tmp_path / "spool") as log:
        record(log, 0, 6)
        drain(config, lake)
        delete_before(apache_kafka, config, 6, tmp_path)
        drain(config, lake)
        record(log, 6, 2)
        drain(config, lake)
        assert trajectories(log, Cursor({PLACE: 4})) == ["t4", "t5", "t6", "t7"]
    assert lake.read("rollout_started").num_rows == 8


def make_topics_again(config: KafkaConfig) -> None:
    """The brokers take a moment to forget a topic."""
    for _ in range(50):
        make_topics(config)
        with contextlib.closing(KafkaClient(config).admin()) as admin:
            if admin.describe(["rollout"])["rollout"] is not None:
                return
    raise AssertionError("the topic was not created anew")


def test_a_reader_says_that_its_topic_has_more_partitions_by_now(
    config: KafkaConfig, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_METADATA_AGE_S", 0.2)
    monkeypatch.setattr(reader_module, "_LOOK_S", 0.1)
    with opened(config, lake, tmp_path / "a") as log, contextlib.closing(log.reader(Cursor())) as reader:
        record(log, 0, 2)
        assert reader.poll(10.0)
        admin = AdminClient({"bootstrap.servers": ",".join(config.bootstrap)})
        for future in admin.create_partitions([NewPartitions(config.broker_topic("rollout"), 3)]).values():
            future.result(20)
        with pytest.raises(TopicError, match=r"rollout: expected the 1 partitions .* got 3: .*Open the log again"):
            deque(reader.poll(1.0) for _ in range(30))
        cursor = reader.cursor
    with opened(config, lake, tmp_path / "b") as log, contextlib.closing(log.reader(cursor)) as reader:
        for group in "abcdef":
            with Recorder(log, producer_id=f"q{group}", run_id="run") as recorder:
                recorder.record("rollout_started", trajectory_id=group, attempt=0, group_id=group)
        found: set[str] = set()
        while len(found) < 6:
            found |= {name for d in reader.poll(10.0) for name in d.table["trajectory_id"].to_pylist()}
        assert found == set("abcdef")


def test_a_wrong_clock_of_a_producer_neither_ages_its_records_nor_has_them_refused(
    config: KafkaConfig, apache_kafka: KafkaCluster
) -> None:
    producer = Producer({"bootstrap.servers": apache_kafka.bootstrap, "log_level": 2})
    failed: list[str] = []
    day_ms, now_ms = 24 * 3_600_000, int(time.time() * 1000)
    for days in (-30, 2):
        # Retention would delete the first at once; brokers refuse times an hour ahead of theirs.
        producer.produce(
            config.broker_topic("rollout"),
            b"x",
            timestamp=now_ms + days * day_ms,
            on_delivery=lambda error, _: failed.extend([str(error)] if error else []),
        )
    assert producer.flush(30) == 0
    assert not failed
    with contextlib.closing(KafkaClient(config).consumer()) as consumer:
        consumer.assign([PLACE])
        consumer.seek(PLACE, 0)
        messages: list[Message] = []
        while len(messages) < 2:
            messages += consumer.poll(5.0).get(PLACE, [])
    assert all(abs(message.timestamp_ms - now_ms) < day_ms for message in messages)
