"""Case D19: a retry that went behind later messages changes nothing.

Reported elsewhere: the retry buffer goes behind later messages, or idempotence is off. Here events 4, 5, 6, 1, 2, 2
and, much later, 3 of one attempt lie in the log in this order.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tests.integration.cases.conftest import Place

from rolltape.ingest import Recorder
from rolltape.ingest.kafka.client import connect
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.ingest.kafka.wire import to_message
from rolltape.ingest.memory import MemoryLog
from rolltape.schema.codec import Record
from rolltape.schema.cursor import Partition
from rolltape.schema.digest import prefix_digest
from rolltape.store.lake import Lake

QUICK = SinkOptions(linger_s=0.01, max_linger_s=0.05, maintenance=False)


class _Producer:
    """Notes what a recorder sends and sends nothing."""

    producer_id = "p"
    epoch = 1
    unacknowledged_bytes = 0

    def __init__(self) -> None:
        self.records: list[Record] = []

    def send(self, record: Record, *, more: bool = False) -> None:
        self.records.append(record)


def attempt() -> list[Record]:
    """Eight records of one event each: start, four actions, an observation between them, end and reward."""
    producer, log = _Producer(), MemoryLog()
    log.producer = lambda _: producer  # type: ignore[assignment, method-assign, return-value]
    where: dict[str, Any] = {"trajectory_id": "t", "attempt": 0, "group_id": "g"}
    context = [1, 2, 3]
    recorder = Recorder(log, producer_id="p", run_id="r")
    recorder.record("rollout_started", prompt_token_ids=context, **where)
    for number in range(4):
        recorder.record(
            "action_sampled",
            token_ids=[10 + number, 20 + number],
            rollout_log_probs=[-0.5, -0.25],
            version_runs=[{"start": 0, "length": 2, "policy_id": "policy", "run_epoch": 1, "version": 3}],
            sampling={"temperature": 1.0, "logprobs_mode": "processed_logprobs"},
            prefix_length=len(context),
            prefix_digest=prefix_digest(context),
            prefix_source="engine",
            **where,
        )
        context += [10 + number, 20 + number]
        if number == 1:
            recorder.record("observation_received", token_ids=[99], **where)
            context.append(99)
    recorder.record("rollout_ended", status="completed", num_action_tokens=8, num_observation_tokens=1, **where)
    recorder.record("reward_assigned", state="earned", scalar=1.0, **where)
    return producer.records


def archived(place: Place, records: list[Record]) -> None:
    """Put records into partition 0 in this order and archive them."""
    producer = connect(place.config).producer(max_record_bytes=1 << 20)
    pending = [producer.send(Partition("rollout", 0), *to_message(record)) for record in records]
    producer.flush(30)
    assert [one.error() for one in pending] == [None] * len(pending)
    producer.close()
    with Sink(place.config, Lake.open(place.lake.location), options=QUICK, alone=True) as sink:
        sink.drain()


def state(lake: Lake) -> tuple[str, list[str], str]:
    """State of the trajectory, why it is not trainable, and a hash over its folded segments."""
    (row,) = lake.sql("SELECT state, untrainable_reasons FROM trajectories").rows()
    columns = "segment_index, prompt_token_ids, response_token_ids, rollout_log_probs, response_mask, observation_mask"
    segments = lake.sql(f"SELECT {columns} FROM segments ORDER BY segment_index").rows()
    return row["state"], row["untrainable_reasons"], hashlib.sha256(repr(segments).encode()).hexdigest()


def test_case_d19_the_folded_state_is_that_of_the_events_in_order(make_place: Any) -> None:
    one, two, three, four, five, six, *rest = attempt()
    reordered = make_place("reordered", partitions={"rollout": 1})
    archived(reordered, [four, five, six, one, two, two])
    incomplete, why, _ = state(reordered.lake)
    assert incomplete == "open"
    assert "open" in why
    archived(reordered, [*reversed(rest), three, rest[0]])
    assert reordered.lake.read("dead_letter").num_rows == 0

    in_order = make_place("in-order", partitions={"rollout": 1})
    archived(in_order, [one, two, three, four, five, six, *rest])
    assert state(reordered.lake) == state(in_order.lake)
    assert state(reordered.lake)[1] == []
    lanes = [row["lane_seq"] for kind in ("action_sampled", "reward_assigned") for row in rows(reordered.lake, kind)]
    assert sorted(lanes) == sorted(set(lanes))


def rows(lake: Lake, kind: str) -> list[dict[str, Any]]:
    """The rows of a kind."""
    found: list[dict[str, Any]] = lake.read(kind).to_pylist()
    return found
