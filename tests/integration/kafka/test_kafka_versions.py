"""The newest policy version over a broker: an engine that starts late loads it and reads no history of weights."""

from __future__ import annotations

import contextlib
from pathlib import Path
from threading import Thread

import pyarrow.compute as pc
import pytest
from tests.integration.rollout.conftest import ScriptedTrainer
from tests.servers.fixtures import Broker

from rolltape.ingest.kafka.log import KafkaLog
from rolltape.ingest.kafka.versions import PRODUCERS_PARTITION, VERSIONS_PARTITION
from rolltape.ingest.log import open_log
from rolltape.ingest.recorder import Recorder
from rolltape.recipes.runs import make_topics
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.process import DONE
from rolltape.rollout.tape import KINDS, TOPICS, RunTape, start_of
from rolltape.rollout.worker import WorkerConfig, make_worker
from rolltape.schema.cursor import Partition
from rolltape.store.lake import Lake
from rolltape.store.location import Location

NUM_OLD = 60
WEIGHTS = Partition("weights", 0)


def test_an_engine_that_starts_late_finds_the_newest_version(
    kafka_broker: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    url = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}"
    make_topics(url)
    lake = Lake.create(Location.parse(str(tmp_path / "lake")))
    with open_log(url, lake=lake.location.url) as log:
        trainer = ScriptedTrainer(log, lake.location)
        trainer.start_run()
        _publish_versions_whose_shards_are_gone(trainer)
        key = trainer.publish(NUM_OLD + 1, step=NUM_OLD + 1)
        trainer.recorder.record("weights_committed", **key, required_engines=[], staged_event_ids=[])
        trainer.recorder.flush("logged")

        tape = RunTape("run", "actor")
        start = start_of(log, tape)
        assert tape.committed == {(1, NUM_OLD + 1)}, "the compacted topic holds the newest one and no older"
        assert start[WEIGHTS] >= log.end()[WEIGHTS] - 64 > 0
        assert start[Partition("control", 0)] == start[Partition("training", 0)] == 0
        reader = log.reader(start, topics=TOPICS, kinds=KINDS)
        seen = [d for d in reader.poll(5.0) if d.kind == "weights_published"]
        reader.close()
        oldest = min((pc.min(pc.struct_field(d.table[d.kind], "version")).as_py() for d in seen), default=0)
        assert not seen or oldest > 1

        config = WorkerConfig(
            lake=lake.location.url,
            log=url,
            run_id="run",
            environment_options={"num_heldout": 20},
            groups_per_step=1,
            group_size=2,
            sampling=SamplingConfig(max_tokens=4),
            poll_s=0.05,
            evaluate_heldout=False,
        )
        recorder = Recorder(log, producer_id=config.producer_id, run_id=config.run_id)
        worker = make_worker(config, log, recorder, lake.location)
        status: list[int] = []
        thread = Thread(target=lambda: status.append(worker.run()), daemon=True)
        thread.start()
        trainer.complete(NUM_OLD + 1, version_out=NUM_OLD + 1, final=True)
        thread.join(60)
        worker.stop()
        thread.join(60)
        recorder.close()
        assert status == [DONE]
        kinds = ("weights_staged", "weights_activated")
        # An empty poll of a broker is no sign of the end.
        trainer.tape.wait_for("the worker's weights", lambda: all(trainer.tape.count(kind) for kind in kinds))
        for kind in kinds:
            assert [row["version"] for row in trainer.tape.rows(kind)] == [NUM_OLD + 1]
        trainer.close()


def _publish_versions_whose_shards_are_gone(trainer: ScriptedTrainer) -> None:
    for number in range(1, NUM_OLD + 1):
        key = {"policy_id": "actor", "policy_run_epoch": 1, "version": number, "weights_digest": "w"}
        trainer.recorder.record("weights_published", **key, role="actor", step=number, payload="full", path="gone")
        trainer.recorder.record("weights_committed", **key, required_engines=[], staged_event_ids=[])
    trainer.recorder.flush("logged")


@pytest.mark.parametrize(
    ("key", "partition"),
    [
        (b"run/actor/1/9/weights_committed", VERSIONS_PARTITION),
        (b"run/actor/1/9/a_kind_of_newer_software", VERSIONS_PARTITION),
        (b"run/actor/1/9/rollout_started", VERSIONS_PARTITION),
        (b"\xff", VERSIONS_PARTITION),
        (b"trainer", PRODUCERS_PARTITION),
    ],
)
@pytest.mark.parametrize("value", [b"no record", b"99999999999", b"9" * 5_000])
def test_what_somebody_else_wrote_into_a_compacted_topic_stands_in_nobodys_way(
    noida_broker: Broker, topic_prefix: str, tmp_path: Path, key: bytes, partition: Partition, value: bytes
) -> None:
    url = f"kafka://{noida_broker.bootstrap}/{topic_prefix}"
    make_topics(url)
    with open_log(url, spool=tmp_path / "spool") as log:
        assert isinstance(log, KafkaLog)
        with contextlib.closing(log.client.producer()) as producer:
            producer.send(partition, key, value, [])
            producer.flush(10)
        assert log.newest_versions() == []
        with Recorder(log, producer_id="trainer", run_id="run") as recorder:
            recorder.record("weights_committed", policy_id="actor", policy_run_epoch=1, version=7)
            recorder.flush("logged")
        assert [d.table["weights_committed"].to_pylist()[0]["version"] for d in log.newest_versions()] == [7]
