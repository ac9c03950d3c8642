"""A scoring service over a broker, killed and started again: the lake has some of the scores, the broker others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.structs import TopicPartition
from tests.integration.rollout.teacher_stage import Rollouts, Scores, ServiceProcess
from tests.servers.fixtures import Broker
from tests.teacher_lakes import ended_run

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.log import open_log
from rolltape.recipes.runs import make_topics
from rolltape.store.lake import Lake
from rolltape.store.location import Location

GROUPS, SIZE = 12, 4
DOMAINS = {"p-up": "up", "p-down": "down"}
OPTIONS = SinkOptions(linger_s=0.02, maintenance=False)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("teachers")
    return ended_run(folder / "up", "up", 21), ended_run(folder / "down", "down", 22)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, teachers: tuple[str, str]) -> Scores:
    """What a service on the embedded log writes that is never killed."""
    folder = tmp_path_factory.mktemp("calm")
    lake = Lake.create(Location.parse(str(folder / "lake")))
    service = ServiceProcess(folder, lake.location.url, teachers)
    with EmbeddedLog(lake, committer="thread") as log:
        rollouts = Rollouts(log)
        rollouts.start_run(DOMAINS)
        rollouts.roll(range(GROUPS), SIZE)
        service.start()
        try:
            rollouts.wait_for_scores(GROUPS * SIZE)
            rollouts.finish()
            service.wait_for_end()
        finally:
            service.close()
            rollouts.close()
        return rollouts.scored()


class Pipeline:
    """Topics of a test's own, a lake, a sink that may be away, rollouts and the service."""

    def __init__(self, broker: Broker, prefix: str, folder: Path, teachers: tuple[str, str]) -> None:
        self._bootstrap = broker.bootstrap
        self._url = f"kafka://{broker.bootstrap}/{prefix}"
        make_topics(self._url)
        self.lake = Lake.create(Location.parse(str(folder / "lake")))
        opened = open_log(self._url, lake=self.lake.location.url)
        assert isinstance(opened, KafkaLog)
        self.log = opened
        self.rollouts = Rollouts(self.log)
        self.rollouts.start_run(DOMAINS)
        self.service = ServiceProcess(folder, self.lake.location.url, teachers, log=self._url)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start_sink(self) -> None:
        sink = Sink(
            KafkaConfig.from_url(self._url, lake=self.lake.location.url),
            Lake.open(self.lake.location),
            options=OPTIONS,
        )

        def run() -> None:
            try:
                sink.run(self._stop)
            finally:
                sink.close()

        self._stop.clear()
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def stop_sink(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)

    def forget_up_to_now(self) -> int:
        """What retention does, all at once; how many partitions of rollouts lost something."""
        self.log.wait_until_archived(60.0)
        end = self.log.end()
        places = [place for place in end if place.topic in ("rollout", "teacher") and end[place]]
        admin = KafkaAdminClient(bootstrap_servers=self._bootstrap)
        try:
            topics = {place: self.log.config.broker_topic(place.topic) for place in places}
            admin.delete_records({TopicPartition(topics[place], place.partition): end[place] for place in places})
        finally:
            admin.close()
        return sum(place.topic == "rollout" for place in places)

    def close(self) -> None:
        self.service.close()
        self.stop_sink()
        self.rollouts.close()
        self.log.close()


@pytest.fixture
def pipeline(kafka_broker: Broker, topic_prefix: str, tmp_path: Path, teachers: tuple[str, str]) -> Iterator[Pipeline]:
    made = Pipeline(kafka_broker, topic_prefix, tmp_path, teachers)
    yield made
    made.close()


def test_killed_services_leave_every_rollout_scored_once(pipeline: Pipeline, calm: Scores) -> None:
    pipeline.start_sink()
    pipeline.service.start()
    pipeline.rollouts.roll(range(5), SIZE)
    pipeline.rollouts.wait_for_scores(4 * SIZE)
    pipeline.service.kill()
    # Half of a unit waits, and only the lake has it: the brokers forget the beginning.
    assert pipeline.forget_up_to_now() > 1
    pipeline.service.start()
    pipeline.rollouts.roll(range(5, 7), SIZE)
    pipeline.rollouts.wait_for_scores(6 * SIZE)
    # Nothing is archived from here on: what is scored then only the brokers tell.
    pipeline.stop_sink()
    pipeline.rollouts.roll(range(7, 10), SIZE)
    pipeline.rollouts.wait_for_scores(10 * SIZE)
    pipeline.service.kill()
    pipeline.service.start()
    pipeline.rollouts.roll(range(10, GROUPS), SIZE)
    pipeline.rollouts.wait_for_scores(GROUPS * SIZE)
    pipeline.rollouts.finish()
    pipeline.service.wait_for_end()
    assert pipeline.rollouts.scored() == calm
    pipeline.start_sink()
    pipeline.log.wait_until_archived(60.0)
    assert pipeline.lake.read("teacher_scored").num_rows == GROUPS * SIZE
