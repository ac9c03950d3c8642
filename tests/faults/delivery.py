"""Faults of what is delivered: repeated, reordered and spoilt records, and records larger than any limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.faults.ledger import count_strangers, refused_events, standing
from tests.faults.servers import Servers
from tests.faults.stage import Stage
from tests.faults.workload import EVENTS_PER_BLOCK, LongAction

LONG: Final = 300_000
"""2.4 MB of ids and log-probs, beyond what a record is split at."""

HUGE: Final = 5_000_000
"""Five million ids of four bytes, and as many log-probs."""

_BLOCK: Final = 8
_CALL: Final = 4


def disordered(stage: Stage, servers: Servers) -> None:
    """Every flush is shuffled, with repeats of its own records and of older ones; a reader sees what the lake gets.

    A sink dies meanwhile: what waited in its memory for a missing record is read again by another.
    """
    stage.delivery = "disordered"
    stage.start(num_sinks=2)
    stage.start_reader()
    stage.until_sinking(0.3)
    stage.strike(stage.sinks["sink-0"].kill, share=0.3)
    stage.start_sink("sink-0")
    stage.settle()
    stage.until_read()
    reading = stage.reading()
    if not reading.ok:
        stage.problems.append(f"the trainer: {reading}")


def corrupt(stage: Stage, servers: Servers) -> None:
    """Payloads are spoilt under whole headers, and strangers write into the topic; everything else arrives."""
    stage.delivery = "corrupt"
    stage.start(num_sinks=2)
    ids = [workload.producer_id for workload in stage.workloads]
    stage.flow()
    stage.strike_when(
        lambda: all(refused_events(stage.ledgers, producer_id) for producer_id in ids), "each writer to spoil a record"
    )
    stage.settle()
    if not all(count_strangers(stage.ledgers, producer_id) for producer_id in ids):
        stage.problems.append("no stranger wrote")


def long_action(stage: Stage, servers: Servers) -> None:
    """An action of 300,000 tokens in the middle of each producer's work: beyond the record size, below the limit."""
    _play(stage, [LongAction(_BLOCK, _CALL, LONG)])


def huge_action(stage: Stage, servers: Servers) -> None:
    """An action of 40 MB: the brokers take at most 16, so its payload lies beside the lake."""
    stage.workloads[1:] = [replace(workload, pause_s=0.4) for workload in stage.workloads[1:]]
    _play(stage, [LongAction(_BLOCK, _CALL, HUGE)], num_producers=1)
    if not any((stage.place.table / "blobs").rglob("*")):
        stage.problems.append("expected a blob beside the lake, got none: no claim check was made")


def _play(stage: Stage, actions: list[LongAction], *, num_producers: int | None = None) -> None:
    chosen = stage.workloads[:num_producers]
    longer = [replace(workload, long_actions=tuple(actions)) for workload in chosen]
    stage.workloads[: len(longer)] = longer
    stage.start()
    stage.flow()
    ids = [workload.producer_id for workload in longer]
    wanted = _BLOCK * EVENTS_PER_BLOCK * len(ids)
    stage.strike_when(lambda: standing(stage.ledgers, ids).handed_over >= wanted, "the long actions")
    stage.settle()
