"""Faults of our own processes: producers, sinks and trainers killed, sinks that come and go."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Final, Literal

from tests.faults.servers import Servers
from tests.faults.stage import Stage

_STORM_STEP_S: Final = 2.0


def kill_producer(stage: Stage, servers: Servers) -> None:
    """Four kills of writers; each comes back, and its spool goes first."""
    stage.start()
    for share in (0.15, 0.35, 0.55, 0.75):
        stage.hold_at(share)
        workload = stage.chance.choice(stage.live_writers)
        stage.strike(stage.writers[workload.producer_id].kill, share=share, of=workload.producer_id)
        stage.start_writer(workload)
    stage.settle()


def kill_sink_before_commit(stage: Stage, servers: Servers) -> None:
    """The data files are there, the commit is not."""
    _crash_sinks(stage, "data_file_written")


def kill_sink_after_commit(stage: Stage, servers: Servers) -> None:
    """The commit is there, and nobody heard so."""
    _crash_sinks(stage, "after_commit")


def _crash_sinks(stage: Stage, window: Literal["data_file_written", "after_commit"]) -> None:
    """A window whose mark exists is passed unharmed: to take the mark away is to strike at the next passage."""
    stage.create_topics()
    for number, share in enumerate((0.25, 0.55)):
        mark = stage.folder / f"mark-{number}"
        mark.touch()
        sink = stage.start_sink("sink", crash=f"{window}:1:{mark}")
        if not number:
            stage.start_writers()
        stage.until_sinking(share)
        stage.strike(mark.unlink, share=share)
        stage.until_crashed(sink, mark)
        if window == "data_file_written" and stage.num_archived() >= stage.standing().acknowledged:
            stage.problems.append("the sink died and everything was archived: the window was not hit")
    stage.start_sink("sink")
    stage.settle()


def kill_trainer(stage: Stage, servers: Servers) -> None:
    """A reader that pins its cursor with what it consumed is killed three times, and consumes each event once."""
    stage.start()
    stage.start_reader()
    for share in (0.25, 0.45, 0.65):
        reader = stage.reader
        assert reader is not None
        stage.strike(reader.kill, share=share)
        stage.start_reader()
    stage.settle()
    stage.until_read()
    reading = stage.reading()
    if not reading.ok:
        stage.problems.append(f"the trainer: {reading}")


def rebalance_storm(stage: Stage, servers: Servers) -> None:
    """Every two seconds a sink joins, and one leaves: in order or by kill -9."""
    stage.pace(0.7)
    stage.start(num_sinks=2)
    stage.flow()
    number = 2
    while stage.live_writers:
        time.sleep(_STORM_STEP_S)
        stage.start_sink(f"sink-{number}")
        number += 1
        leaving = stage.chance.choice([child for child in stage.sinks.values() if child.is_alive][:-1])
        how = stage.chance.choice([signal.SIGTERM, signal.SIGKILL])
        if stage.standing().acknowledged < 0.9 * stage.num_planned:
            stage.strike(partial(os.kill, leaving.pid, how))
    stage.settle()
