"""Faults of the brokers: killed, two of three at once, and paused."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from tests.faults.servers import Servers, mended
from tests.faults.stage import NUM_PARTITIONS, Stage

PAUSE_S: Final = 60.0

IMPATIENT: Final = {"request_timeout_s": "5", "delivery_timeout_s": "10"}
"""Timeouts that pass several times within the pause."""


def _leader(stage: Stage, servers: Servers) -> int:
    partition = stage.chance.randrange(NUM_PARTITIONS)
    return servers.cluster.leader(f"{stage.prefix}.rollout", partition)


def kill_leader(stage: Stage, servers: Servers) -> None:
    """Leaders are killed and come back, twice."""
    stage.start()
    with mended(servers.cluster):
        for share in (0.2, 0.6):
            stage.hold_at(share)
            leader = _leader(stage, servers)
            stage.strike(partial(servers.cluster.kill, leader), share=share)
            time.sleep(stage.chance.uniform(1.0, 4.0))
            servers.cluster.start(leader)
        stage.settle()


def kill_two(stage: Stage, servers: Servers) -> None:
    """Two of three are killed at once: nothing can be acknowledged before one of them is back."""
    stage.start()
    with mended(servers.cluster):
        stage.hold_at(0.3)
        leader = _leader(stage, servers)
        other = stage.chance.choice([node for node in servers.cluster.nodes if node != leader])

        def kill() -> None:
            servers.cluster.kill(leader)
            servers.cluster.kill(other)

        stage.strike(kill, share=0.3)
        time.sleep(stage.chance.uniform(4.0, 8.0))
        for node in stage.chance.sample([leader, other], 2):
            servers.cluster.start(node, wait=False)
        stage.settle()


def pause_leader(stage: Stage, servers: Servers) -> None:
    """A leader keeps its connections and answers nothing; then it goes on as if nothing had been.

    Even seeds leave the timeouts at their defaults, odd ones have writers and sinks give up again and again.
    """
    if stage.seed % 2:
        stage.options = dict(IMPATIENT)
    stage.start()
    with mended(servers.cluster):
        stage.hold_at(0.3)
        leader = _leader(stage, servers)
        stage.strike(partial(servers.cluster.pause, leader), share=0.3)
        time.sleep(PAUSE_S)
        servers.cluster.resume(leader)
        stage.settle()
