"""The sender against brokers that the test plays: order, bounds, failures, restarts."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.schema_events import action, batch_of

from rolltape.ingest.kafka import sender as sender_module
from rolltape.ingest.kafka.claims import Claims
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.sender import Sender
from rolltape.ingest.kafka.topics import MAX_MESSAGE_BYTES, PRODUCERS
from rolltape.ingest.lanes import Lane
from rolltape.ingest.spool import SpoolWriter
from rolltape.schema.codec import Record, make_record
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import LogError, LogUnreachableError, RecordTooLargeError

LANE = Lane("p", 1, "rollout", 0)


@dataclass
class PlayedPending:
    """A record that the test decides about."""

    partition: Partition
    key: bytes
    headers: dict[str, bytes]
    on_done: Callable[[], None]
    failure: Exception | None = None
    decided: bool = False

    @property
    def offset(self) -> int:
        return -1

    @property
    def first(self) -> int:
        """First lane number."""
        return int(self.headers["rt-first-seq"])

    def done(self) -> bool:
        return self.decided

    def error(self) -> Exception | None:
        return self.failure

    def decide(self, failure: Exception | None = None) -> None:
        self.failure, self.decided = failure, True
        self.on_done()


@dataclass
class PlayedBrokers:
    """A client whose brokers do what the test says."""

    config: KafkaConfig
    is_away: bool = False
    acknowledges: bool = True
    sent: list[PlayedPending] = field(default_factory=list)
    num_connections: int = 0

    def producer(self, *, max_record_bytes: int, on_done: Callable[[], None]) -> PlayedProducer:
        if self.is_away:
            raise LogUnreachableError("away")
        self.num_connections += 1
        return PlayedProducer(self, on_done)

    def events(self) -> list[PlayedPending]:
        """What was sent beside the announcements of epochs."""
        return [pending for pending in self.sent if pending.partition.topic != PRODUCERS]

    def firsts(self) -> list[int]:
        return [pending.first for pending in self.events()]


@dataclass
class PlayedProducer:
    """One connection."""

    brokers: PlayedBrokers
    on_done: Callable[[], None]
    is_closed: bool = False

    def send(self, partition: Partition, key: bytes, value: Any, headers: Any) -> PlayedPending:
        if self.is_closed or self.brokers.is_away:
            raise LogError("closed")
        pending = PlayedPending(partition, key, dict(headers), self.on_done)
        self.brokers.sent.append(pending)
        if self.brokers.acknowledges or partition.topic == PRODUCERS:
            pending.decide()
        return pending

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self, timeout_s: float = 0.0) -> None:
        self.is_closed = True


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """The first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
    return value


class Producer:
    """Spool and sender, as the log's producer joins them."""

    def __init__(self, spool: Path, brokers: PlayedBrokers, limit: int = MAX_MESSAGE_BYTES) -> None:
        self.writer = SpoolWriter(spool, "p", segment_bytes=4096)
        self.limit = limit
        self.num_refreshed = 0
        client: Any = brokers
        claims = Claims(None, MAX_MESSAGE_BYTES, limit=lambda _: self.limit, refresh=self._refresh)
        self.sender = Sender(client, claims, self.writer.producer_folder, self.writer.epoch)
        self.lane = LANE._replace(producer_epoch=self.writer.epoch)

    def _refresh(self) -> None:
        self.num_refreshed += 1

    def send(self, *numbers: int, hand_over: bool = True, more: bool = False) -> None:
        for number in numbers:
            record = self.record(number)
            pairs = record.headers.to_pairs()
            place = self.writer.append_at(record, pairs)
            if hand_over:
                self.sender.hand_over(record, pairs, place, more=more)

    def record(self, number: int) -> Record:
        made = make_record(batch_of("action_sampled", action(lane_seq=[number])))
        return replace(made, headers=replace(made.headers, producer_epoch=self.writer.epoch))

    def wait(self, last: int) -> None:
        assert self.sender.wait_until(lambda: self.sender.mark(self.lane) >= last, time.monotonic() + 20)

    def close(self) -> None:
        self.sender.stop()
        self.writer.close(self.sender.forget_drained)

    def die(self) -> None:
        """End as kill -9 would: nothing sealed, nothing deleted, the lock free."""
        self.sender.stop()
        self.writer._owner.release()


@pytest.fixture
def brokers() -> PlayedBrokers:
    """Brokers that acknowledge at once."""
    return PlayedBrokers(KafkaConfig(bootstrap=("played:1",), delivery_timeout_s=30))


@pytest.fixture
def producer(tmp_path: Path, brokers: PlayedBrokers) -> Iterator[Producer]:
    """A first start."""
    opened = Producer(tmp_path, brokers)
    yield opened
    opened.close()


@pytest.mark.parametrize("hand_over", [True, False])
def test_everything_is_sent_once_and_in_order(producer: Producer, brokers: PlayedBrokers, hand_over: bool) -> None:
    producer.send(*range(50), hand_over=hand_over)
    producer.wait(49)
    assert brokers.firsts() == list(range(50))
    assert brokers.num_connections == 1


def test_memory_and_spool_take_turns_without_a_repeat(producer: Producer, brokers: PlayedBrokers) -> None:
    for start in range(0, 60, 6):
        producer.send(start, start + 1, hand_over=True)
        producer.send(start + 2, start + 3, hand_over=False)
        producer.send(start + 4, start + 5, hand_over=True)
    producer.wait(59)
    assert brokers.firsts() == list(range(60))


def test_the_epoch_is_announced_before_the_first_record(producer: Producer, brokers: PlayedBrokers) -> None:
    producer.send(0)
    producer.wait(0)
    first = brokers.sent[0]
    assert (first.partition, first.key) == (Partition(PRODUCERS, 0), b"p")
    assert brokers.events()[0].first == 0


def test_after_a_failure_everything_from_there_is_sent_again(producer: Producer, brokers: PlayedBrokers) -> None:
    brokers.acknowledges = False
    producer.send(*range(6))
    wait_for(lambda: len(brokers.events()) == 6)
    zero, one, two, three, *_ = brokers.events()
    zero.decide()
    one.decide()
    three.decide()
    brokers.acknowledges = True
    two.decide(LogError("no"))
    producer.wait(5)
    # What came after the failed one is repeated: whether the brokers have it does not matter.
    assert brokers.firsts() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert brokers.num_connections == 2
    assert producer.sender.error is None


def test_nothing_counts_as_acknowledged_behind_an_undecided_record(producer: Producer, brokers: PlayedBrokers) -> None:
    brokers.acknowledges = False
    producer.send(0, 1, 2)
    wait_for(lambda: len(brokers.events()) == 3)
    brokers.events()[1].decide()
    brokers.events()[2].decide()
    assert not producer.sender.wait_until(lambda: producer.sender.mark(producer.lane) >= 0, time.monotonic() + 0.3)
    brokers.events()[0].decide()
    producer.wait(2)
    assert producer.sender.confirmed_bytes > 0


def test_brokers_that_are_away_are_waited_for(tmp_path: Path, brokers: PlayedBrokers) -> None:
    brokers.is_away = True
    producer = Producer(tmp_path, brokers)
    producer.send(*range(20))
    wait_for(lambda: isinstance(producer.sender.error, LogUnreachableError))
    brokers.is_away = False
    producer.wait(19)
    assert brokers.firsts() == list(range(20))
    producer.close()


def test_bytes_in_flight_are_bounded(tmp_path: Path, brokers: PlayedBrokers) -> None:
    size = 4000
    brokers.config = replace(brokers.config, max_in_flight_bytes=size)
    brokers.acknowledges = False
    producer = Producer(tmp_path, brokers)
    producer.send(*range(30))
    wait_for(brokers.events)
    while len(brokers.events()) < 30:
        in_flight = [pending for pending in brokers.events() if not pending.decided]
        frame_bytes = producer.writer.append_at(producer.record(0), []).num_bytes if not in_flight else size // 3
        assert len(in_flight) * frame_bytes <= size
        in_flight[0].decide()
        wait_for(lambda: any(not pending.decided for pending in brokers.events()))
    for pending in brokers.events():
        pending.decide()
    producer.wait(29)
    assert brokers.firsts() == list(range(30))
    producer.close()


def test_what_the_brokers_have_goes_from_the_disk(tmp_path: Path, brokers: PlayedBrokers) -> None:
    producer = Producer(tmp_path, brokers)
    producer.send(*range(40))
    producer.wait(39)
    folder = producer.writer.folder
    wait_for(lambda: len(list(folder.glob("*.frames"))) <= 2)
    producer.close()
    assert not folder.exists()


def test_what_the_brokers_do_not_have_stays_and_goes_first(tmp_path: Path, brokers: PlayedBrokers) -> None:
    brokers.is_away = True
    first = Producer(tmp_path, brokers)
    first.send(*range(10))
    first.close()
    assert first.writer.folder.exists()
    second = Producer(tmp_path, brokers)
    assert (second.writer.epoch, second.sender.older_epochs) == (2, [1])
    brokers.is_away = False
    second.send(*range(5))
    second.wait(4)
    assert second.sender.wait_until(lambda: not second.sender.older_epochs, time.monotonic() + 20)
    epochs = [int(pending.headers["rt-epoch"]) for pending in brokers.events()]
    assert epochs == [1] * 10 + [2] * 5
    assert brokers.firsts() == [*range(10), *range(5)]
    assert not first.writer.folder.exists()
    second.close()


def test_a_killed_producer_loses_nothing_and_does_not_send_all_again(tmp_path: Path, brokers: PlayedBrokers) -> None:
    first = Producer(tmp_path, brokers)
    first.send(*range(30))
    first.wait(29)
    brokers.acknowledges = False
    first.send(30, 31)
    wait_for(lambda: len(brokers.events()) == 32)
    first.die()
    brokers.sent.clear()
    brokers.acknowledges = True
    second = Producer(tmp_path, brokers)
    assert second.sender.wait_until(lambda: not second.sender.older_epochs, time.monotonic() + 20)
    # Repeats are harmless, but a long-lived producer must not fill the log with them.
    assert brokers.firsts() == [30, 31]
    second.close()


@pytest.mark.parametrize("hint", [b"", b"torn", "old"])
def test_a_kill_between_an_acknowledgement_and_its_note_costs_repeats_only(
    tmp_path: Path, brokers: PlayedBrokers, hint: bytes | str
) -> None:
    first = Producer(tmp_path, brokers)
    first.send(0)
    first.wait(0)
    note = first.writer.folder / "CONFIRMED"
    wait_for(note.exists)
    old = note.read_bytes()
    first.send(*range(1, 30))
    first.wait(29)
    wait_for(lambda: len(list(first.writer.folder.glob("*.frames"))) <= 2)
    first.die()
    # The segment that the old note names is gone.
    note.write_bytes(old if isinstance(hint, str) else hint)
    brokers.sent.clear()
    second = Producer(tmp_path, brokers)
    assert second.sender.wait_until(lambda: not second.sender.older_epochs, time.monotonic() + 20)
    assert len(brokers.firsts()) <= 4
    assert brokers.firsts() == sorted(brokers.firsts())
    second.close()


def test_an_older_epoch_without_a_record_is_forgotten(tmp_path: Path, brokers: PlayedBrokers) -> None:
    Producer(tmp_path, brokers).die()
    second = Producer(tmp_path, brokers)
    assert second.sender.wait_until(lambda: not second.sender.older_epochs, time.monotonic() + 20)
    assert brokers.events() == []
    second.close()


def test_a_frame_that_the_disk_damaged_is_sent_and_says_so(tmp_path: Path, brokers: PlayedBrokers) -> None:
    brokers.is_away = True
    first = Producer(tmp_path, brokers)
    first.send(0, 1)
    first.close()
    path = first.writer.folder / "000000.frames"
    content = bytearray(path.read_bytes())
    content[-9] ^= 0xFF
    path.write_bytes(bytes(content))
    brokers.is_away = False
    second = Producer(tmp_path, brokers)
    assert second.sender.wait_until(lambda: not second.sender.older_epochs, time.monotonic() + 20)
    assert brokers.firsts() == [0, 1]
    assert sum("rt-damaged" in pending.headers for pending in brokers.events()) == 1
    second.close()


def test_a_record_that_is_too_large_stops_the_sender_and_is_not_dropped(tmp_path: Path, brokers: PlayedBrokers) -> None:
    producer = Producer(tmp_path, brokers, limit=100)
    producer.send(0, 1)
    wait_for(lambda: isinstance(producer.sender.error, RecordTooLargeError))
    assert "lake" in str(producer.sender.error)
    assert brokers.events() == []
    producer.limit = MAX_MESSAGE_BYTES
    producer.wait(1)
    assert brokers.firsts() == [0, 1]
    producer.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_whenever_every_lane_arrives_whole(
    tmp_path: Path, brokers: PlayedBrokers, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(sender_module, "_FIRST_BACKOFF_S", 0.0005)
    monkeypatch.setattr(sender_module, "_LAST_BACKOFF_S", 0.002)
    chances = random.Random(seed)
    log: list[int] = []

    class Unreliable(PlayedProducer):
        def send(self, partition: Partition, key: bytes, value: Any, headers: Any) -> PlayedPending:
            pending = PlayedPending(partition, key, dict(headers), self.on_done)
            if partition.topic != PRODUCERS:
                chance = chances.random()
                if chance < 0.03:
                    raise LogError("not taken")
                if chance < 0.90:
                    log.append(pending.first)
                # Between 0.85 and 0.90 the brokers have it, and the answer is lost.
                pending.decide(LogError("no answer") if chance > 0.85 else None)
            else:
                pending.decide(LogError("no") if chances.random() < 0.5 else None)
            return pending

    def connect(*, max_record_bytes: int, on_done: Callable[[], None]) -> PlayedProducer:
        if chances.random() < 0.2:
            raise LogUnreachableError("away")
        return Unreliable(brokers, on_done)

    brokers.producer = connect  # type: ignore[method-assign]
    producer = Producer(tmp_path, brokers)
    for number in range(120):
        producer.send(number, hand_over=chances.random() < 0.8)
    producer.wait(119)
    producer.close()
    mark, parked = -1, set[int]()
    for number in log:
        # What a lane's mark does: a repeat is known, a gap is waited for.
        parked.add(number)
        while mark + 1 in parked:
            mark += 1
    assert mark == 119
    assert not producer.writer.folder.exists()


def test_a_refusal_for_size_makes_the_topics_looked_at_again(producer: Producer, brokers: PlayedBrokers) -> None:
    brokers.acknowledges = False
    producer.send(0)
    wait_for(brokers.events)
    brokers.events()[0].decide(RecordTooLargeError("the brokers' limit is lower"))
    wait_for(lambda: producer.num_refreshed)
    wait_for(lambda: isinstance(producer.sender.error, RecordTooLargeError))


def only_the_caller_sends(producer: Producer, patch: pytest.MonkeyPatch) -> None:
    """Let the sender's thread do nothing from now on."""
    sender: Any = producer.sender
    with sender._lock:
        patch.setattr(sender, "_round", lambda: False)


def test_what_comes_while_others_are_on_their_way_goes_together(producer: Producer, brokers: PlayedBrokers) -> None:
    brokers.acknowledges = False
    producer.send(0)
    wait_for(lambda: brokers.firsts() == [0])
    with pytest.MonkeyPatch.context() as patch:
        only_the_caller_sends(producer, patch)
        producer.send(1, 2, 3)
        assert brokers.firsts() == [0]
    brokers.events()[0].decide()
    wait_for(lambda: brokers.firsts() == [0, 1, 2, 3])
    for pending in brokers.events()[1:]:
        pending.decide()
    producer.wait(3)


def test_what_others_follow_at_once_waits_for_them(producer: Producer, brokers: PlayedBrokers) -> None:
    producer.send(0)
    producer.wait(0)
    with pytest.MonkeyPatch.context() as patch:
        only_the_caller_sends(producer, patch)
        producer.send(1, 2, more=True)
        assert brokers.firsts() == [0]
        # The thread may hold the lock for a moment; then the next record takes these along.
        numbers = itertools.count(3)

        def sends_all() -> bool:
            producer.send(next(numbers))
            return len(brokers.firsts()) > 1

        wait_for(sends_all)
    assert brokers.firsts()[:4] == [0, 1, 2, 3]
    producer.wait(next(numbers) - 1)


def test_what_others_were_to_follow_goes_without_them(producer: Producer, brokers: PlayedBrokers) -> None:
    producer.send(0)
    producer.wait(0)
    producer.send(1, more=True)
    wait_for(lambda: brokers.firsts() == [0, 1])


def test_many_bytes_do_not_wait_for_an_acknowledgement(producer: Producer, brokers: PlayedBrokers) -> None:
    brokers.acknowledges = False
    producer.send(0)
    wait_for(lambda: brokers.firsts() == [0])
    numbers = itertools.count(1)

    def sends_at_once() -> bool:
        producer.send(next(numbers))
        return brokers.firsts()[1:2] == [1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rolltape.ingest.kafka.sender._BURST_BYTES", 1)
        only_the_caller_sends(producer, patch)
        # The thread may hold the lock for a moment; then the next record takes this one along.
        wait_for(sends_at_once)
    for pending in brokers.events():
        pending.decide()
    brokers.acknowledges = True
    producer.wait(next(numbers) - 1)
