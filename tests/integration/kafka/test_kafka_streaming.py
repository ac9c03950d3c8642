"""An asynchronous trainer's stream over a broker: many partitions, retention behind its cursor, hand-over to live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.structs import TopicPartition
from tests.group_streams import GroupWriter, NothingMore, StreamTrainer, groups
from tests.servers.fixtures import Broker

from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.log import EventLog, open_log
from rolltape.recipes.runs import make_topics
from rolltape.schema.cursor import Partition
from rolltape.store.lake import Lake
from rolltape.store.location import Location

PATIENCE = 400  # looks of 50 ms
OPTIONS = SinkOptions(linger_s=0.02, maintenance=False)


class Pipeline:
    """Topics of a test's own, a lake, and a sink that may be away."""

    def __init__(self, broker: Broker, prefix: str, folder: Path) -> None:
        self.url = f"kafka://{broker.bootstrap}/{prefix}"
        self.bootstrap = broker.bootstrap
        make_topics(self.url)
        self.lake = Lake.create(Location.parse(str(folder / "lake")))
        self.log: EventLog = open_log(self.url, lake=self.lake.location.url)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start_sink(self) -> None:
        config = KafkaConfig.from_url(self.url, lake=self.lake.location.url)
        sink = Sink(config, Lake.open(self.lake.location), options=OPTIONS)

        def run() -> None:
            try:
                sink.run(self._stop)
            finally:
                sink.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def forget_up_to_now(self) -> int:
        """What retention does, all at once; how many partitions of rollouts lost something."""
        end = self.log.end()
        assert isinstance(self.log, KafkaLog)
        places = {place: end[place] for place in end if place.topic == "rollout" and end[place]}
        admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
        try:
            names = {
                TopicPartition(self.log.config.broker_topic(place.topic), place.partition): offset
                for place, offset in places.items()
            }
            admin.delete_records(names)
        finally:
            admin.close()
        return len(places)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)
        self.log.close()


@pytest.fixture
def pipeline(kafka_broker: Broker, topic_prefix: str, tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(kafka_broker, topic_prefix, tmp_path)
    yield made
    made.close()


def test_groups_come_over_all_partitions_and_each_once(pipeline: Pipeline) -> None:
    """Without a sink: what is live comes from the brokers alone."""
    writer, trainer = GroupWriter(pipeline.log), StreamTrainer(pipeline.log, patience=PATIENCE)
    for ordinal in range(8):
        writer.dispatch(ordinal)
    for ordinal in (5, 2, 7, 0, 1):
        writer.finish(ordinal)
    writer.recorder.flush("logged")
    batches = [trainer.gather(), trainer.gather()]
    trainer.start()
    for ordinal in (3, 4, 6):
        writer.finish(ordinal)
    writer.recorder.flush("logged")
    batches += [trainer.gather(), trainer.gather()]
    trained = [group for found in batches for group in groups(found)]
    assert sorted(trained) == [f"g{ordinal:03d}" for ordinal in range(8)]
    places = {place for found in batches for place in found.cursors[1] if place.topic == "rollout"}
    assert len(places) > 1
    writer.recorder.close()


def test_a_trainer_behind_the_brokers_retention_catches_up_from_the_lake_and_goes_on_live(pipeline: Pipeline) -> None:
    pipeline.start_sink()
    writer, trainer = GroupWriter(pipeline.log), StreamTrainer(pipeline.log, patience=PATIENCE)
    for ordinal in range(6):
        writer.dispatch(ordinal)
    for ordinal in (1, 3, 4):
        writer.finish(ordinal)
    writer.recorder.flush("logged")
    first = trainer.gather()
    pipeline.log.wait_until_archived(60.0)
    assert pipeline.forget_up_to_now() > 1
    # Dead here; it comes back to a cursor that the brokers do not hold any more.
    trainer.start()
    writer.finish(0)
    writer.finish(5)
    writer.recorder.flush("logged")
    batches = [first, trainer.gather()]
    writer.finish(2)
    writer.whole(6)
    writer.whole(7)
    writer.recorder.flush("logged")
    batches += [trainer.gather(), trainer.gather()]
    trained = [group for found in batches for group in groups(found)]
    assert sorted(trained) == [f"g{ordinal:03d}" for ordinal in range(8)]
    assert len(set(trained)) == len(trained)
    trainer.patience = 10
    with pytest.raises(NothingMore):
        trainer.gather()
    end = pipeline.log.end()
    for place in end:
        if place.topic == "rollout":
            assert trainer.stream.low_watermark()[place] == end[Partition(*place)]
    writer.recorder.close()
