"""Sinks over a broker: partitions move between them, zombies are fenced, and readers deliver what the lake holds."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.servers.fixtures import Broker

from rolltape.ingest import Recorder
from rolltape.ingest.deadletters import accept_loss_in_log
from rolltape.ingest.kafka import retention as retention_module
from rolltape.ingest.kafka.client import BrokerProducer
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.positions import generation_app_id, identify
from rolltape.ingest.kafka.retention import BlobRetention, oldest_unarchived_s
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.topics import TopicPlan, ensure_topics
from rolltape.ingest.kafka.wire import to_claim, to_message
from rolltape.ingest.lanes import Lane, log_app_id
from rolltape.recipes.cli import main
from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import CommitterFencedError, LakeAheadError, LogMismatchError, StoreUnreachableError
from rolltape.store.lake import Lake
from rolltape.store.maintenance import checkpoint, clean_logs, compact
from rolltape.store.verify import verify

QUICK = SinkOptions(linger_s=0.02, status_s=0.2, alarm_after_s=0.1, maintenance=False)
PARTITIONS = 3
START = Cursor()


@pytest.fixture
def config(noida_broker: Broker, topic_prefix: str) -> KafkaConfig:
    """A log of three rollout partitions."""
    made = KafkaConfig.from_url(f"kafka://{noida_broker.bootstrap}/{topic_prefix}", {})
    from rolltape.ingest.kafka.client import KafkaClient

    with contextlib.closing(KafkaClient(made).admin()) as admin:
        ensure_topics(admin, TopicPlan.of(partitions={"rollout": PARTITIONS}), create=True)
    return made


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def log(config: KafkaConfig, lake: Lake, tmp_path: Path) -> Iterator[KafkaLog]:
    with KafkaLog(config, Lake.open(lake.location), spool=tmp_path / "spool") as opened:
        yield opened


@pytest.fixture
def raw(log: KafkaLog) -> Iterator[BrokerProducer]:
    """Puts into the log what no recorder would."""
    with contextlib.closing(log.client.producer()) as producer:
        yield producer


@contextlib.contextmanager
def running(config: KafkaConfig, lake: Lake, *, alone: bool = False, options: SinkOptions = QUICK) -> Iterator[Sink]:
    """A sink in a thread; its error is raised at the end."""
    errors: list[BaseException] = []
    stop = threading.Event()
    sink = Sink(config, Lake.open(lake.location), options=options, alone=alone)

    def run() -> None:
        try:
            sink.run(stop)
        except BaseException as error:  # noqa: BLE001  # raised where the test sees it
            errors.append(error)

    thread = threading.Thread(target=run, name="sink")
    thread.start()
    try:
        yield sink
    finally:
        stop.set()
        thread.join(60)
        sink.close()
    for error in errors:
        raise error


def rows(log: KafkaLog, kinds: list[str] | None = None, start: Cursor = START) -> list[str]:
    """What a reader delivers up to the log's present end, each row spelled out."""
    end = log.end()
    found: list[str] = []
    with contextlib.closing(log.reader(start, kinds=kinds)) as reader:
        deadline = time.monotonic() + 30
        while any(reader.cursor[place] < end[place] for place in end):
            assert time.monotonic() < deadline, f"{reader.cursor} does not reach {end}"
            found += [repr(row) for delivery in reader.poll(0.5) for row in delivery.table.to_pylist()]
    return sorted(found)


def archived(lake: Lake, kinds: list[str], start: Cursor = START) -> list[str]:
    """The same from the lake."""
    found = [row for kind in kinds for row in lake.read(kind).to_pylist()]
    at = [(row, Partition(row["log_topic"], row["log_partition"])) for row in found]
    return sorted(repr(row) for row, place in at if row["log_offset"] >= start[place])


def record_some(recorder: Recorder, first: int, number: int) -> None:
    recorder.record_batch(
        "rollout_started",
        {
            "trajectory_id": [f"t{first + item}" for item in range(number)],
            "attempt": 0,
            "group_id": [f"g{(first + item) % 17}" for item in range(number)],
            "prompt_token_ids": [[first + item, 1, 2] for item in range(number)],
        },
    )


def test_partitions_move_between_sinks_without_loss_or_doubling(config: KafkaConfig, lake: Lake, log: KafkaLog) -> None:
    """Sinks join and leave while events come; each event is archived once, in the order of its lane."""
    total = 0
    with Recorder(log, producer_id="p", run_id="run") as recorder, contextlib.ExitStack() as sinks:
        for step in range(4):
            leaver = contextlib.ExitStack()
            sink = leaver.enter_context(running(config, lake))
            if step % 2:
                sinks.push(leaver)
            until = time.monotonic() + 2.0
            while time.monotonic() < until or not sink.assignment:
                record_some(recorder, total, 20)
                total += 20
                time.sleep(0.05)
                assert time.monotonic() < until + 30, "the group gave this sink nothing"
            recorder.flush()
            if not step % 2:
                leaver.close()
        log.wait_until_archived(60)
    found = lake.read("rollout_started", columns=["trajectory_id", "log_partition", "log_offset", "lane_seq"])
    assert sorted(found["trajectory_id"].to_pylist()) == sorted(f"t{number}" for number in range(total))
    places = sorted(
        zip(*(found[name].to_pylist() for name in ("log_partition", "log_offset", "lane_seq")), strict=True)
    )
    for partition in range(PARTITIONS):
        lane = [lane_seq for place, _, lane_seq in places if place == partition]
        assert lane == list(range(len(lane)))
    assert rows(log) == archived(lake, ["rollout_started"])
    assert verify(lake).ok


def test_a_sink_that_lost_its_partitions_unknowingly_is_fenced(config: KafkaConfig, lake: Lake, log: KafkaLog) -> None:
    """Two that both believe to own everything: what the zombie staged is refused, and it goes on from the lake."""
    patient = replace(QUICK, linger_s=60.0, max_linger_s=60.0)
    zombie = Sink(config, Lake.open(lake.location), options=patient, alone=True)
    with Recorder(log, producer_id="p", run_id="run") as recorder, contextlib.closing(zombie):
        record_some(recorder, 0, 40)
        recorder.flush()
        for _ in range(5):
            zombie.run_once(0.2)
        assert lake.read("rollout_started").num_rows == 0
        with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
            sink.drain(30)
        assert lake.read("rollout_started").num_rows == 40
        with pytest.raises(CommitterFencedError, match="another committer wrote in between"):
            zombie.commit()
        record_some(recorder, 40, 10)
        recorder.flush()
        zombie.drain(30)
    assert sorted(lake.read("rollout_started")["trajectory_id"].to_pylist()) == sorted(f"t{item}" for item in range(50))


def test_a_sink_takes_marks_and_positions_of_one_version(config: KafkaConfig, lake: Lake, log: KafkaLog) -> None:
    """The sink before it commits its last records just as the next one looks where to go on."""
    patient = replace(QUICK, linger_s=60.0, max_linger_s=60.0)
    first = Sink(config, Lake.open(lake.location), options=patient, alone=True)
    second = Sink(config, Lake.open(lake.location), options=QUICK, alone=True)
    reload = second._archive.reload

    def reload_before_the_commit() -> Any:
        found = reload()
        if first.num_commits < 2:
            first.commit()
        return found

    second._archive.reload = reload_before_the_commit  # type: ignore[method-assign]
    with (
        Recorder(log, producer_id="p", run_id="run") as recorder,
        contextlib.closing(first),
        contextlib.closing(second),
    ):
        record_some(recorder, 0, 40)
        recorder.flush()
        while first._archive.staged_bytes == 0 or sum(_read(first)) < _num_records(log):
            first.run_once(0.1)
        record_some(recorder, 40, 40)
        recorder.flush()
        second.drain(30)
        assert second._archive.gaps() == []
    assert sorted(lake.read("rollout_started")["trajectory_id"].to_pylist()) == sorted(f"t{item}" for item in range(80))


def _num_records(log: KafkaLog) -> int:
    return sum(log.end().offsets.values())


def test_readers_deliver_what_the_sink_archives_from_any_cursor(
    config: KafkaConfig, lake: Lake, log: KafkaLog, raw: BrokerProducer
) -> None:
    """Foreign messages, poison, a gap that closes late: the same rows live, from the lake, and half and half."""
    kinds = ["rollout_started", "dead_letter"]
    lane = contextlib.closing(log.producer("by-hand"))
    with lane as producer, Recorder(log, producer_id="p", run_id="run") as recorder:
        record_some(recorder, 0, 30)
        recorder.flush()
        place = Partition("rollout", 0)
        made = [_record(producer.producer_id, producer.epoch, number) for number in range(4)]
        for item in (made[0], made[2], made[3]):
            raw.send(place, *to_message(item)).error()
        raw.send(place, b"key", b"{}", []).error()
        raw.send(place, b"key", b"these are no events", made[1].headers.to_pairs()).error()
        raw.flush(10)
        live_before = rows(log, kinds)
        with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
            sink.drain(30)
        assert rows(log, kinds) == live_before == archived(lake, kinds)
        record_some(recorder, 30, 10)
        recorder.flush()
        half = rows(log, kinds)
        with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
            sink.drain(30)
        assert rows(log, kinds) == half == archived(lake, kinds)
    reasons = sorted(row["dead_letter"]["reason"] for row in lake.read("dead_letter").to_pylist())
    assert reasons == ["foreign_message", "truncated_payload"]
    for offset in (0, 1, 3, 5, 8):
        start = Cursor({place: offset, Partition("rollout", 1): offset})
        assert rows(log, kinds, start) == archived(lake, kinds, start)


def _record(producer_id: str, epoch: int, number: int) -> Any:
    from rolltape.schema.build import build_batch
    from rolltape.schema.codec import make_record

    columns: dict[str, Any] = {
        "event_id": f"by-hand-{number}",
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": producer_id,
        "producer_epoch": epoch,
        "lane_seq": [number],
        "recorded_at": 0,
        "trajectory_id": "by-hand",
        "attempt": 0,
        "event_index": number,
    }
    return make_record(build_batch("rollout_started", columns, 1).batch)


def test_a_gap_raises_an_alarm_and_an_accepted_loss_lets_the_lane_go_on(
    config: KafkaConfig, lake: Lake, log: KafkaLog, raw: BrokerProducer
) -> None:
    with running(config, lake, alone=True) as sink, contextlib.closing(log.producer("by-hand")) as producer:
        lane = Lane("by-hand", producer.epoch, "rollout", 0)
        for number in (0, 3):
            raw.send(Partition("rollout", 0), *to_message(_record("by-hand", producer.epoch, number)))
        raw.flush(10)
        _wait(lambda: lake.read("alarm_raised").num_rows)
        detail = lake.read("alarm_raised").to_pylist()[0]["alarm_raised"]["detail"]
        assert "1 to 2 are missing" in detail
        assert _metric(sink.metrics.text(), "rolltape_sink_lanes_standing") == 1
        accept_loss_in_log(log, lane, 2, first=1)
        _wait(lambda: lake.read("rollout_started").num_rows == 2)
        _wait(lambda: _metric(sink.metrics.text(), "rolltape_sink_lanes_standing") == 0)
    # Whoever sees the gap again, after a crash say, sends the alarm again: it is one alarm.
    assert lake.read("alarm_raised").num_rows == 1
    assert verify(lake).ok


def _wait(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _metric(text: str, name: str, labels: str = "") -> float:
    found = re.search(rf"^{name}{re.escape(labels)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name}{labels} is not among the metrics"
    return float(found[1])


def test_prometheus_sees_lag_age_rows_and_commits(config: KafkaConfig, lake: Lake, log: KafkaLog) -> None:
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        record_some(recorder, 0, 50)
        recorder.flush()
        with running(config, lake, alone=True, options=replace(QUICK, metrics_port=0)) as sink:
            log.wait_until_archived(30)

            def text() -> str:
                with urllib.request.urlopen(f"http://127.0.0.1:{sink.metrics_port}/metrics", timeout=5) as answer:
                    return str(answer.read().decode())

            # A commit is there for others an instant before its sink counts it, and may be one of several.
            _wait(lambda: 'rolltape_sink_rows_total{kind="rollout_started"} 50.0' in text())
            assert _metric(text(), "rolltape_sink_commits_total") >= 1
            assert _metric(text(), "rolltape_sink_partitions") == PARTITIONS + 4
            assert _metric(text(), "rolltape_sink_age_seconds", '{partition="0",topic="teacher"}') == 0
            _wait(lambda: _metric(text(), "rolltape_sink_lag_records", '{partition="0",topic="rollout"}') == 0)
            assert _metric(text(), "rolltape_sink_dead_letters_total", '{reason="foreign_message"}') == 0


def test_lag_grows_while_the_lake_cannot_be_reached(
    config: KafkaConfig, lake: Lake, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnreachableError("the store is away")

    def lag(sink: Sink) -> float:
        text = sink.metrics.text()
        return sum(
            _metric(text, "rolltape_sink_lag_records", f'{{partition="{number}",topic="rollout"}}')
            for number in range(PARTITIONS)
        )

    options = replace(QUICK, retry_s=0.05, max_retry_s=0.05, status_s=0.05)
    with Recorder(log, producer_id="p", run_id="run") as recorder, running(config, lake, options=options) as sink:
        record_some(recorder, 0, 20)
        recorder.flush()
        log.wait_until_archived(30)
        with monkeypatch.context() as patched:
            patched.setattr(sink._target, "append", away)
            patched.setattr(sink._target, "transactions", away)
            archived = log.end()
            for first in (20, 40):
                record_some(recorder, first, 20)
                recorder.flush()
                waiting = sum(log.end()[place] - archived[place] for place in log.end() if place.topic == "rollout")
                _wait(lambda waiting=waiting: lag(sink) == waiting)
        _wait(lambda: lag(sink) == 0)
    assert lake.read("rollout_started").num_rows == 60


def test_a_sink_that_is_stopped_commits_what_it_read(config: KafkaConfig, lake: Lake, log: KafkaLog) -> None:
    patient = replace(QUICK, linger_s=60.0, max_linger_s=60.0)
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        record_some(recorder, 0, 30)
        recorder.flush()
        with running(config, lake, alone=True, options=patient) as sink:
            _wait(lambda: _metric(sink.metrics.text(), "rolltape_sink_partitions") > 0)
            _wait(lambda: sum(_read(sink)) > 0 and not lake.read("rollout_started").num_rows)
            time.sleep(0.5)
    assert lake.read("rollout_started").num_rows == 30


def test_whatever_lies_before_the_position_a_sink_that_starts_again_takes_it_for_its_own(
    config: KafkaConfig, lake: Lake, log: KafkaLog, raw: BrokerProducer
) -> None:
    """Poison, a claim that is gone, a repeat, what waits behind a gap, a stranger: all of it is archived."""
    place = Partition("rollout", 0)
    with contextlib.closing(log.producer("by-hand")) as producer:
        made = [_record(producer.producer_id, producer.epoch, number) for number in range(5)]
    pairs = [item.headers.to_pairs() for item in made]
    messages = [
        to_message(made[0]),
        (b"key", b"these are no events", pairs[1]),
        to_claim(made[2], pairs[2], "0" * 64, 10),
        to_message(made[0]),
        (b"key", b"{}", []),
        to_message(made[4]),
        to_message(made[3]),
    ]
    for number, message in enumerate(messages):
        raw.send(place, *message)
        raw.flush(10)
        drain(config, lake)
        if number % 3 == 0:
            # What looks after the lake leaves what the positions are judged by.
            compact(lake)
            checkpoint(lake)
            clean_logs(lake, safe_age_s=0)
        assert len(rows(log)) == sum(lake.read(kind).num_rows for kind in ("rollout_started", "dead_letter"))
    assert lake.read("rollout_started")["event_id"].to_pylist() == ["by-hand-0", "by-hand-3", "by-hand-4"]
    assert lake.snapshot().cursor[place] == len(messages)


def test_a_record_before_the_position_that_was_never_archived_stops_sinks_and_readers(
    config: KafkaConfig, lake: Lake, log: KafkaLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lake fed from the same topic before it lost what is archived and was filled again by others."""
    place = Partition("rollout", 1)
    with contextlib.closing(log.producer("by-hand")) as producer:
        for number in range(4):
            producer.send(replace(_record(producer.producer_id, producer.epoch, number), partition=place.partition))
        producer.flush("logged", 10)
    fed = {generation_app_id(log.cluster_id, "rollout", log.topic("rollout").topic_id): 1, log_app_id(place): 2}
    lake.append({}, fed)
    with pytest.raises(LakeAheadError, match=r"rollout/1: expected offset 2.*by-hand.*has nothing.*--adopt rollout"):
        drain(config, lake)
    with pytest.raises(LakeAheadError, match="--adopt rollout"):
        rows(log)
    arguments = ["sink", "--log", config.url, "--lake", str(lake.location), "--once", "--adopt", "rollout"]
    assert main(arguments) == 0
    assert '"generation": 2' in capsys.readouterr().out
    assert lake.read("rollout_started")["log_offset"].to_pylist() == [3, 4, 5, 6]


def drain(config: KafkaConfig, lake: Lake) -> None:
    with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
        sink.drain(30)


def _read(sink: Sink) -> list[float]:
    text = sink.metrics.text()
    found = re.findall(r'^rolltape_sink_records_total\{outcome="accepted".*\} (\S+)$', text, re.MULTILINE)
    return [float(value) for value in found]


def test_once_drains_the_log_and_makes_the_lake(
    config: KafkaConfig, log: KafkaLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        record_some(recorder, 0, 30)
        recorder.flush()
    assert main(["sink", "--log", config.url, "--lake", str(tmp_path / "other"), "--once"]) == 0
    assert '"sink": "running"' in capsys.readouterr().out
    assert Lake.open(tmp_path / "other").read("rollout_started").num_rows == 30


def test_a_sink_and_an_embedded_committer_refuse_each_others_lake(config: KafkaConfig, tmp_path: Path) -> None:
    from rolltape.ingest import open_log

    embedded = tmp_path / "embedded"
    Lake.create(embedded)
    with open_log(str(embedded)) as other, Recorder(other, producer_id="p", run_id="run") as recorder:
        record_some(recorder, 0, 1)
        recorder.flush()
    with pytest.raises(LogMismatchError, match="an embedded log's committer fed"):
        Sink(config, Lake.open(embedded), options=QUICK, alone=True)


def test_memory_is_bounded_whatever_the_backlog(config: KafkaConfig, lake: Lake, log: KafkaLog) -> None:
    small = replace(QUICK, max_commit_bytes=200_000, linger_s=60.0, max_linger_s=60.0)
    with Recorder(log, producer_id="p", run_id="run") as recorder:
        for step in range(40):
            record_some(recorder, step * 100, 100)
        recorder.flush()
    sink = Sink(config, Lake.open(lake.location), options=small, alone=True)
    held: list[int] = []
    offer = sink._archive.offer

    def watch(*arguments: Any, **options: Any) -> Any:
        held.append(sink._archive.staged_bytes)
        return offer(*arguments, **options)

    sink._archive.offer = watch  # type: ignore[method-assign]
    with contextlib.closing(sink):
        sink.drain(60)
    assert lake.read("rollout_started").num_rows == 4_000
    assert sink.num_commits > 3
    assert max(held) < 200_000


def test_claimed_payloads_go_with_the_logs_retention_once_they_are_archived(
    config: KafkaConfig, lake: Lake, tmp_path: Path
) -> None:
    claims = replace(config, claim_check_bytes=1_000)
    with KafkaLog(claims, Lake.open(lake.location), spool=tmp_path / "spool") as log:
        with Recorder(log, producer_id="p", run_id="run") as recorder:
            recorder.record(
                "rollout_started", trajectory_id="t", attempt=0, prompt_token_ids=list(range(5_000)), group_id="g"
            )
            recorder.flush()
        time.sleep(0.3)
        assert log.blobs is not None
        (info,) = log.blobs.root.list(recursive=True)
        blob = log.blobs.root.child(info.path)
        retention = BlobRetention(log.client, lake, interval_s=0.001, margin_s=0.0)
        assert _oldest_unarchived_s(log, lake) < time.time() - 0.2
        assert retention.run() == 0
        with contextlib.closing(Sink(config, Lake.open(lake.location), options=QUICK, alone=True)) as sink:
            sink.drain(30)
            prompt = lake.read("rollout_started").to_pylist()[0]["rollout_started"]["prompt_token_ids"]
            assert prompt == list(range(5_000))
            assert _oldest_unarchived_s(log, lake) > time.time() - 0.2
            time.sleep(0.01)
            assert retention.run() == 0
            long_ago = time.time() - 30 * 86_400
            os.utime(blob.local_path(), (long_ago, long_ago))
            time.sleep(0.01)
            assert retention.run() == 1
            assert not blob.exists()
            sink.drain(30)
        (released,) = lake.read("artifacts_released").to_pylist()
        assert released["artifacts_released"]["paths"] == [f"blobs/sha256/{info.path}"]
        assert released["artifacts_released"]["num_bytes"] == info.size_bytes


def test_claimed_payloads_stay_where_the_logs_retention_is_not_shown(
    config: KafkaConfig, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Brokers leave the settings of a topic out for whoever has no right to see them."""
    with KafkaLog(config, Lake.open(lake.location), spool=tmp_path / "spool") as log:
        assert log.blobs is not None
        log.blobs.put(b"abc")
        (info,) = log.blobs.root.list(recursive=True)
        long_ago = time.time() - 30 * 86_400
        os.utime(log.blobs.root.child(info.path).local_path(), (long_ago, long_ago))
        shown = identify(log.client)
        topics = {name: topic._replace(configs={}) for name, topic in shown.topics.items()}
        monkeypatch.setattr(retention_module, "identify", lambda _: replace(shown, topics=topics))
        assert BlobRetention(log.client, lake, interval_s=0.001, margin_s=0.0).run() == 0
        assert "the right DescribeConfigs" in caplog.text
        monkeypatch.undo()
        assert BlobRetention(log.client, lake, interval_s=0.001, margin_s=0.0).run() == 1


def _oldest_unarchived_s(log: KafkaLog, lake: Lake) -> float:
    with contextlib.closing(log.client.consumer()) as consumer:
        return oldest_unarchived_s(consumer, identify(log.client), lake.snapshot().transactions)
