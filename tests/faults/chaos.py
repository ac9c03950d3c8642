"""Everything at once: producers, sinks, trainer and brokers die in any order, one while another is coming back."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from tests.faults.servers import Servers, mended
from tests.faults.stage import NUM_PARTITIONS, Stage

_NUM_STRIKES = 8


def anything(stage: Stage, servers: Servers) -> None:
    """Eight deaths in a random order, two sinks and a trainer's reader beside three producers."""
    stage.pace(0.8)
    stage.start(num_sinks=2)
    stage.start_reader()
    stage.hold_at(0.1)
    stage.flow()
    deaths = (_producer, _sink, _trainer, _broker)
    with mended(servers.cluster):
        for _ in range(_NUM_STRIKES):
            if len(stage.live_writers) < len(stage.workloads):
                break
            back = stage.chance.choice(deaths)(stage, servers)
            time.sleep(stage.chance.uniform(0.0, 1.5))
            back()
        servers.cluster.start_all()
        stage.settle()
    stage.until_read()
    reading = stage.reading()
    if not reading.ok:
        stage.problems.append(f"the trainer: {reading}")


def _producer(stage: Stage, servers: Servers) -> Callable[[], object]:
    workload = stage.chance.choice(stage.live_writers)
    stage.strike(stage.writers[workload.producer_id].kill)
    return partial(stage.start_writer, workload)


def _sink(stage: Stage, servers: Servers) -> Callable[[], object]:
    name = stage.chance.choice(sorted(stage.sinks))
    stage.strike(stage.sinks[name].kill)
    return partial(stage.start_sink, name)


def _trainer(stage: Stage, servers: Servers) -> Callable[[], object]:
    assert stage.reader is not None
    stage.strike(stage.reader.kill)
    return stage.start_reader


def _broker(stage: Stage, servers: Servers) -> Callable[[], object]:
    servers.cluster.start_all()
    leader = servers.cluster.leader(f"{stage.prefix}.rollout", stage.chance.randrange(NUM_PARTITIONS))
    if leader < 0:
        return lambda: None
    stage.strike(partial(servers.cluster.kill, leader))
    return partial(servers.cluster.start, leader, wait=False)
