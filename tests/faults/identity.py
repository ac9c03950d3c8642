"""Faults of identity and time: clocks that jump, an id used again, a topic made again, or cut and filled again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from typing import Final

import pyarrow.compute as pc
from tests.faults.clock import CLOCK_OFF_S
from tests.faults.servers import Servers, mended
from tests.faults.stage import NUM_PARTITIONS, Child, Stage, StageError

from rolltape.ingest.kafka.client import connect
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.schema.cursor import Partition

_FIRST_BLOCKS: Final = 5


def clock_off(stage: Stage, servers: Servers) -> None:
    """Clocks of writers and sinks jump ten minutes ahead, ten minutes behind, and back."""
    stage.wrapper = ("tests.faults.clock",)
    stage.start(num_sinks=2)
    for share in (0.2, 0.45, 0.7):
        stage.strike(partial(_move_clocks, stage), share=share)
    stage.settle()
    recorded = pc.cast(stage.lake().read("action_sampled")["recorded_at"], "int64")
    span_s = (pc.max(recorded).as_py() - pc.min(recorded).as_py()) / 1e6
    if span_s < 1.9 * CLOCK_OFF_S:
        stage.problems.append(f"expected events {2 * CLOCK_OFF_S} s apart by their own clocks, got {span_s} s")


def _move_clocks(stage: Stage) -> None:
    for child in (*stage.writers.values(), *stage.sinks.values()):
        if child.is_alive:
            os.kill(child.pid, signal.SIGUSR1)


def same_id_again(stage: Stage, servers: Servers) -> None:
    """One id: a second live writer is refused; closed and opened, killed and opened, and opened without its spool.

    The sink starts last, so that the lake knows nothing of any epoch while the producers come back.
    """
    stage.create_topics()
    whole = list(stage.workloads)
    stage.workloads = [replace(workload, num_blocks=_FIRST_BLOCKS) for workload in whole]
    stage.start_writers()
    stage.flow()
    for child in stage.writers.values():
        child.wait(90)
    stage.workloads = whole
    stage.flow(0.3)
    stage.start_writers()
    first = whole[0].producer_id
    stage.strike(partial(_second_writer, stage), share=0.35)
    stage.strike(stage.writers[first].kill, share=0.45, of=first)
    stage.start_writer(whole[0])
    stage.strike(stage.writers[first].kill, share=0.7, of=first)
    # What was acknowledged is in the log; what only the spool had is gone with the machine.
    assert stage.spool is not None
    for folder in stage.spool.rglob(first):
        shutil.rmtree(folder)
    stage.start_writer(whole[0])
    stage.start_sink("sink-0")
    stage.settle()
    rows = stage.lake().read("action_sampled", columns=["producer_id", "producer_epoch"])
    epochs = pc.unique(rows.filter(pc.equal(rows["producer_id"], first))["producer_epoch"]).to_pylist()
    if len(epochs) != 4:
        stage.problems.append(f"expected four starts of {first} under epochs of their own, got {sorted(epochs)}")


def _second_writer(stage: Stage) -> None:
    """While a writer lives, another one of its id must be refused."""
    alive = stage.writers[stage.workloads[0].producer_id]
    second = stage.start_writer(stage.workloads[0])
    stage.writers[stage.workloads[0].producer_id] = alive
    if second.wait(60) == 0 or "ProducerFencedError" not in second.last_words():
        stage.problems.append(f"a second writer of a live id ended with {second.status}: {second.last_words()}")


def topic_recreated(stage: Stage, servers: Servers) -> None:
    """The rollout topic is deleted and made again under running writers; an operator adopts the new one.

    Everything acknowledged is archived before (what is not would be lost with the topic, by the operator's act); what
    is on its way is not acknowledged and goes to the new topic.
    """
    stage.start()
    stage.hold_at(0.35)

    def stop() -> None:
        for child in stage.writers.values():
            child.pause()

    stage.strike(stop, share=0.35)
    stage.until_archived()
    _recreate(stage)
    for child in stage.writers.values():
        child.resume()
    _refused(stage, stage.sinks["sink-0"])
    _refused(stage, stage.start_sink("sink-0"))
    stage.start_sink("sink-0", "--adopt", "rollout")
    stage.settle()
    generations = {app: n for app, n in stage.lake().snapshot().transactions.items() if app.startswith("kafka/")}
    if sorted(n for app, n in generations.items() if "/rollout/" in app) != [1, 2]:
        stage.problems.append(f"expected two generations of the topic, got {generations}")


def topic_cut(stage: Stage, servers: Servers) -> None:
    """The brokers' disks lose the end of the rollout topic, and it grows again beyond where sinks stand.

    Everything in it is archived before. The sinks stand still while it is shorter, so that no offset tells.
    """
    stage.start()
    stage.hold_at(0.35)

    def stop() -> None:
        for child in stage.writers.values():
            child.pause()

    stage.strike(stop, share=0.35)
    ends = _archived_to_its_end(stage)
    sink = stage.sinks["sink-0"]
    sink.pause()
    with mended(servers.cluster):
        servers.cluster.stop()
        for place, end in ends.items():
            servers.cluster.cut(f"{stage.prefix}.{place.topic}", place.partition, end // 2)
    for child in stage.writers.values():
        child.resume()
    stage.flow(0.8)
    with contextlib.closing(connect(KafkaConfig.from_url(stage.log_url())).consumer()) as consumer:
        stage.until(
            lambda: all(end >= ends[place] for place, end in consumer.end_offsets(ends).items()), "a log as long again"
        )
    sink.resume()
    _refused(stage, sink)
    _refused(stage, stage.start_sink("sink-0"))
    stage.start_sink("sink-0", "--adopt", "rollout")
    stage.settle()


def _archived_to_its_end(stage: Stage) -> dict[Partition, int]:
    """The ends of the rollout topic, once its writers stand still and the lake has all that they wrote."""
    places = [Partition("rollout", number) for number in range(NUM_PARTITIONS)]
    deadline = time.monotonic() + 60
    with contextlib.closing(connect(KafkaConfig.from_url(stage.log_url())).consumer()) as consumer:
        while True:
            before = consumer.end_offsets(places)
            time.sleep(1.0)
            cursor = stage.lake().cursor()
            if consumer.end_offsets(places) == before == {place: cursor[place] for place in places}:
                return before
            if time.monotonic() > deadline:
                raise StageError(f"expected {before} to be archived within 60 s, got {cursor}")


def _recreate(stage: Stage) -> None:
    admin = connect(KafkaConfig.from_url(stage.log_url())).admin()
    try:
        admin.delete(["rollout"])
        deadline = time.monotonic() + 30
        while admin.describe(["rollout"])["rollout"] is not None:
            if time.monotonic() > deadline:
                raise StageError(f"{stage.prefix}.rollout is still there 30 s after it was deleted")
            time.sleep(0.05)
    finally:
        admin.close()
    stage.create_topics()


def _refused(stage: Stage, sink: Child) -> None:
    """The sink must end by itself, with an error that names the topic and the way out."""
    status, said = sink.wait(60), sink.last_words()
    if status == 0 or "rollout" not in said or "--adopt" not in said:
        stage.problems.append(f"expected the sink to refuse the new topic by name, it ended with {status}: {said}")
