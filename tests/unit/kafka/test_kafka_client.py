"""The vendor's client behind our names: errors that say what to do, and what a broker does with us."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError
from kafka.net.compat import KafkaNetClient
from kafka.record import memory_records
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.structs import TopicPartition

from rolltape.ingest.kafka.client import (
    BrokerAdmin,
    BrokerConsumer,
    KafkaClient,
    Message,
    connect,
    record_bytes,
)
from rolltape.ingest.kafka.client import (
    consumer as consumer_module,
)
from rolltape.ingest.kafka.client.vendor import receiver
from rolltape.ingest.kafka.config import KafkaConfig, Secret
from rolltape.ingest.kafka.sink_options import SinkOptions
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import ConfigError, LogUnreachableError, OffsetGoneError, TopicError

ONE, TWO = Partition("rollout", 0), Partition("rollout", 1)
QUICK: dict[str, Any] = {"bootstrap_timeout_s": 1.0, "prefix": "x"}


@pytest.fixture
def client(kafka_broker: Any, topic_prefix: str) -> KafkaClient:
    """A client of a broker that has the topic ``rollout`` with two partitions."""
    config = KafkaConfig(
        bootstrap=tuple(kafka_broker.bootstrap.split(",")), prefix=topic_prefix, bootstrap_timeout_s=3.0
    )
    with contextlib.closing(BrokerAdmin(config)) as admin:
        admin.create("rollout", 2, 1, {"max.message.bytes": str(1 << 20)})
    return connect(config)


@pytest.fixture
def consumer(client: KafkaClient) -> Iterator[BrokerConsumer]:
    """Assigned to nothing yet."""
    opened = client.consumer()
    yield opened
    opened.close()


def send(client: KafkaClient, *values: bytes, partition: Partition = ONE) -> list[int]:
    """Offsets of values that were sent and acknowledged."""
    with contextlib.closing(client.producer()) as producer:
        pending = [producer.send(partition, b"key", value, [("name", b"header")]) for value in values]
        producer.flush(20)
        assert [one.error() for one in pending] == [None] * len(values)
        return [one.offset for one in pending]


def read(consumer: BrokerConsumer, num_messages: int) -> list[Message]:
    """The next messages."""
    found: list[Message] = []
    for _ in range(60):
        found += [message for messages in consumer.poll(0.5).values() for message in messages]
        if len(found) >= num_messages:
            return found
    raise AssertionError(f"expected {num_messages} messages, got {found}")


def test_what_was_sent_is_read_with_key_value_and_headers(client: KafkaClient, consumer: BrokerConsumer) -> None:
    assert send(client, b"a", b"b") == [0, 1]
    consumer.assign([ONE])
    consumer.seek(ONE, 0)
    messages = read(consumer, 2)
    assert [message[:5] for message in messages] == [
        (ONE, 0, b"key", b"a", [("name", b"header")]),
        (ONE, 1, b"key", b"b", [("name", b"header")]),
    ]
    assert consumer.position(ONE) == 2
    assert (consumer.begin_offsets([ONE, TWO]), consumer.end_offsets([ONE, TWO])) == (
        {ONE: 0, TWO: 0},
        {ONE: 2, TWO: 0},
    )


def test_what_is_sent_together_wakes_the_vendors_thread_once(
    client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[threading.Thread] = []
    wakeup = KafkaNetClient.wakeup

    def noting(self: Any) -> None:
        callers.append(threading.current_thread())
        wakeup(self)

    def mine() -> int:
        return callers.count(threading.current_thread())

    with contextlib.closing(client.producer()) as producer:
        # The first record of a topic also asks for its metadata.
        producer.send(ONE, b"key", b"first", [])
        producer.flush(20)
        monkeypatch.setattr(KafkaNetClient, "wakeup", noting)
        with producer.together():
            pending = [producer.send(partition, b"key", b"a", []) for partition in (ONE, TWO, ONE)]
            assert mine() == 0
        assert mine() == 1
        producer.flush(20)
        before = mine()
        pending += [producer.send(ONE, b"key", b"a", [])]
        assert mine() == before + 1
        producer.flush(20)
    assert [one.error() for one in pending] == [None] * 4


def test_long_values_are_read_where_they_lie(client: KafkaClient, consumer: BrokerConsumer) -> None:
    values = [bytes([number]) * size for number, size in enumerate((300_000, 1_000, 400_000, 250_000))]
    send(client, *values)
    consumer.assign([ONE])
    consumer.seek(ONE, 0)
    found = [message.value for message in read(consumer, 4)]
    assert found == values
    assert [isinstance(value, memoryview) for value in found] == [True, False, True, False]


def test_requests_wait_for_much_only_where_much_is_expected(
    client: KafkaClient, consumer: BrokerConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = consumer._consumer._manager
    sending, asked = manager.send, []

    def noting(request: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(getattr(request, "min_bytes", None))
        return sending(request, *arguments, **options)

    monkeypatch.setattr(manager, "send", noting)
    consumer.assign([ONE])
    consumer.seek(ONE, 0)
    for much in (False, True, False):
        send(client, b"a")
        consumer.gather(much=much)
        assert len(read(consumer, 1)) == 1
        # What is asked for next, is asked for like this one.
        consumer.poll(0.0)
    least = [number for number in asked if number is not None]
    assert least[0] == 1
    assert {1, 4 << 20} == set(least)
    assert least[-1] == 1


def test_a_position_outside_the_log_is_an_error_that_names_it(client: KafkaClient, consumer: BrokerConsumer) -> None:
    send(client, b"a")
    consumer.assign([ONE])
    consumer.seek(ONE, 5)
    with pytest.raises(OffsetGoneError, match="rollout/0 to hold offset 5, got 0 to 0") as found:
        read(consumer, 1)
    assert (found.value.partition, found.value.offset) == (ONE, 5)


def test_a_group_tells_in_the_callers_thread_and_starts_where_it_says(
    client: KafkaClient, consumer: BrokerConsumer
) -> None:
    send(client, b"a", b"b", b"c")
    member = client.consumer("group-" + client.config.prefix)
    assigned: list[set[Partition]] = []

    def on_assigned(partitions: set[Partition]) -> None:
        # Asking the brokers is allowed here.
        assigned.append(set(member.begin_offsets(partitions)))
        for partition in partitions:
            member.seek(partition, 1 if partition == ONE else 0)

    member.subscribe(["rollout"], lambda _: None, on_assigned)
    assert [message.value for message in read(member, 2)] == [b"b", b"c"]
    # A group may decide anew while its first member settles in.
    assert assigned
    assert all(found == {ONE, TWO} for found in assigned)
    member.commit({ONE: 3})
    member.close()


class PlayedConsumer:
    """A vendor's consumer whose group decides anew while records are on their way."""

    def __init__(self, **settings: Any) -> None:
        self.place = ("x.rollout", 0)
        self.paused: set[Any] = set()
        self.positions: dict[Any, int] = {}
        self.rounds = 0
        self._coordinator = SimpleNamespace(rejoining=False)

    def subscribe(self, names: list[str], listener: Any) -> None:
        self.listener = listener

    def partitions_for_topic(self, name: str) -> set[int]:
        return {0}

    def assignment(self) -> set[Any]:
        return set(self.positions)

    def seek(self, place: Any, offset: int) -> None:
        self.positions[place] = offset

    def pause(self, *places: Any) -> None:
        self.paused |= set(places)

    def resume(self, *places: Any) -> None:
        self.paused -= set(places)

    def poll(self, timeout_ms: int, max_records: int | None) -> dict[Any, list[Any]]:
        place = TopicPartition(*self.place)
        if place in self.paused:
            return {}
        first = self.positions.get(place, 40)
        record = SimpleNamespace(offset=first, key=b"k", value=b"v", headers=[], timestamp=0)
        self.positions[place] = first + 1
        self.rounds += 1
        if self.rounds in {1, 3}:
            self.listener.on_partitions_revoked({place})
            self.listener.on_partitions_assigned({place})
        return {place: [record]}


def test_nothing_of_before_a_rebalance_is_delivered_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka.KafkaConsumer", PlayedConsumer)
    consumer = BrokerConsumer(KafkaConfig(bootstrap=("played:1",), prefix="x"), group="g")
    told: list[str] = []

    def on_assigned(partitions: set[Partition]) -> None:
        told.append("assigned")
        for partition in partitions:
            consumer.seek(partition, 7)

    consumer.subscribe(["rollout"], lambda _: told.append("revoked"), on_assigned)
    offsets = [[message.offset for message in consumer.poll(0.1).get(ONE, [])] for _ in range(4)]
    # A sink that goes back to 7 must not see the 40 (and 8) that were on their way meanwhile.
    assert offsets == [[], [7], [], [7]]
    assert told == ["revoked", "assigned"] * 2


def test_a_partition_or_topic_that_is_not_there_is_named(client: KafkaClient) -> None:
    with contextlib.closing(client.producer()) as producer:
        with pytest.raises(TopicError, match="partition 7"):
            producer.send(Partition("rollout", 7), b"k", b"v", [])
        with contextlib.closing(client.admin()) as admin:
            assert admin.describe(["training"]) == {"training": None}
    # Asking for a topic does not make it.
    with contextlib.closing(client.admin()) as admin:
        assert admin.describe(["training"]) == {"training": None}


def test_sizes_are_counted_with_what_is_around_them(client: KafkaClient) -> None:
    headers = [("name", b"x" * 1000)]
    assert 2000 + 3 < record_bytes(b"key", b"v" * 1000, headers) < 2000 + 200


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(LogUnreachableError, match=r"no-such-host\.invalid:9092.*DNS"):
        connect(KafkaConfig(bootstrap=("no-such-host.invalid:9092",), **QUICK))


def test_a_closed_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(LogUnreachableError, match=f"127.0.0.1:{port}.*REFUSED.*is it running"):
            connect(KafkaConfig(bootstrap=(f"127.0.0.1:{port}",), **QUICK))


def test_somebody_who_never_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LogUnreachableError, match=f"127.0.0.1:{port}"):
            connect(KafkaConfig(bootstrap=(f"127.0.0.1:{port}",), **QUICK))


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("ssl_cafile", {"ssl_cafile": "/nowhere/at/all.pem"}),
        ("ssl_certfile", {"ssl_certfile": "/nowhere/at/all.pem", "ssl_key_password": Secret("hush")}),
    ],
)
def test_a_certificate_that_cannot_be_read_is_named_before_connecting(field: str, settings: dict[str, Any]) -> None:
    config = KafkaConfig(bootstrap=("127.0.0.1:1",), security_protocol="SSL", **QUICK, **settings)
    with pytest.raises(ConfigError, match=f"^{field}.*all.pem") as found:
        connect(config)
    assert "hush" not in str(found.value)


def test_a_password_is_not_logged_by_the_vendor_either(caplog: pytest.LogCaptureFixture) -> None:
    config = KafkaConfig(
        bootstrap=("127.0.0.1:1",),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username="alice",
        sasl_password=Secret("hush-hush"),
        **QUICK,
    )
    with caplog.at_level(logging.DEBUG, logger="kafka"), pytest.raises(LogUnreachableError) as found:
        connect(config)
    assert "alice" in caplog.text
    assert "hush-hush" not in caplog.text + str(found.value) + repr(found.value.__cause__)


@pytest.mark.parametrize("missing", ["crc32c", "kafka"])
def test_a_missing_library_is_an_error_at_the_start(missing: str) -> None:
    # Without crc32c the vendor's client works, at a twentieth of the speed.
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from rolltape.schema.errors import ConfigError\n"
        "from rolltape.ingest import open_log\n"
        "try: open_log('kafka://127.0.0.1:1/x')\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert missing in done.stdout
    assert "install rolltape[kafka]" in done.stdout


def test_opening_a_log_without_topics_says_how_to_make_them(client: KafkaClient, tmp_path: Path) -> None:
    from rolltape.ingest import open_log

    url = client.config.url
    with pytest.raises(TopicError, match=f"rolltape topics --log {url} --create"):
        open_log(url, spool=tmp_path)


def test_what_a_broker_says_before_it_hangs_up_is_heard() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    end = OSError("gone")
    received = receiver(SimpleNamespace(_sock=ours), lambda: (b"", end))
    with ours:
        assert received() == (b"", None)
        theirs.sendall(b"authentication failed")
        theirs.close()
        assert received() == (b"authentication failed", None)
        assert received() == (b"", end)


def test_much_is_received_in_few_pieces() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    content = np.random.default_rng(7).bytes(8 << 20)
    sender = threading.Thread(target=theirs.sendall, args=(content,))
    sender.start()
    received = receiver(SimpleNamespace(_sock=ours), lambda: (b"", None))
    found = b""
    while len(found) < len(content):
        select.select([ours], [], [])
        data, error = received()
        assert data
        assert error is None
        found += data
    sender.join()
    theirs.close()
    ours.close()
    assert found == content


def test_what_tls_has_decrypted_beyond_the_buffer_is_received_too() -> None:
    waiting = [b"abc", b"de"]

    def recv_into(buffer: memoryview) -> int:
        buffer[:] = bytes(len(buffer))
        return len(buffer)

    ours = SimpleNamespace(
        recv_into=recv_into, pending=lambda: sum(map(len, waiting)), recv=lambda _: waiting.pop(0) if waiting else b""
    )
    data, error = receiver(SimpleNamespace(_sock=ours), lambda: (b"", None))()
    assert error is None
    assert bytes(data).lstrip(b"\0") == b"abcde"


@given(
    st.lists(
        st.tuples(
            st.integers(1_700_000_000_000, 1_700_000_100_000),
            st.none() | st.binary(max_size=80),
            st.none() | st.integers(0, 20_000).map(bytes),
            st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=200)), max_size=3),
        ),
        max_size=8,
    ),
    st.sampled_from([DefaultRecordBatch.CODEC_NONE, DefaultRecordBatch.CODEC_GZIP]),
)
def test_batches_are_written_as_the_vendor_writes_them(records: list[tuple[Any, ...]], codec: int) -> None:
    theirs, ours = (
        make(
            magic=2,
            compression_type=codec,
            is_transactional=False,
            producer_id=7,
            producer_epoch=1,
            base_sequence=3,
            batch_size=40_000,
        )
        for make in (DefaultRecordBatchBuilder, vars(memory_records)["DefaultRecordBatchBuilder"])
    )
    assert type(ours) is not DefaultRecordBatchBuilder
    for offset, (timestamp, key, value, headers) in enumerate(records):
        shown = None if value is None else memoryview(value)
        expected = theirs.append(offset, timestamp, key, value, headers)
        found = ours.append(offset, timestamp, key, shown, headers)
        assert (found is None) == (expected is None)
        assert found is None or (found.offset, found.size, found.timestamp) == (offset, expected.size, timestamp)
        assert ours.size() == theirs.size()
    assert bytes(ours.build()) == bytes(theirs.build())


@pytest.mark.parametrize("codec", [DefaultRecordBatch.CODEC_NONE, DefaultRecordBatch.CODEC_GZIP])
def test_records_are_read_as_the_vendor_reads_them(codec: int) -> None:
    builder = DefaultRecordBatchBuilder(2, codec, False, 7, 1, 3, 1 << 20)
    some: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
        (b"key", b"v" * 70_000, [("name", b"header"), ("null", None), ("", b"")]),
        (None, None, []),
        (b"", b"", [("größe", b"\x00\xff")]),
    ]
    for number, (key, value, headers) in enumerate(some):
        builder.append(number * 3, 1_700_000_000_000 + number, key, value, headers)
    data = bytes(builder.build())
    batch_class: Any = vars(memory_records)["DefaultRecordBatch"]
    theirs, ours = DefaultRecordBatch(data), batch_class(memoryview(data))
    assert type(ours) is not DefaultRecordBatch
    assert ours.validate_crc()
    assert [told(record) for record in ours] == [told(record) for record in theirs]
    damaged = memoryview(data[:-1] + bytes([data[-1] ^ 1]))
    assert not batch_class(damaged).validate_crc()
    if codec == DefaultRecordBatch.CODEC_NONE:
        with pytest.raises(CorruptRecordError):
            list(batch_class(memoryview(data)[:-1]))


def told(record: Any) -> tuple[Any, ...]:
    """Everything that a record of the vendor's says."""
    return (
        *(record.offset, record.timestamp, record.timestamp_type),
        *(record.key, record.value, record.headers, record.size_in_bytes),
    )


class NotText(str):
    """A header name that no UTF-8 spells, as a client in another language may send it."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """The bytes that go to the broker."""
        return b"\xff\xfename"


def test_a_header_name_that_is_no_text_stops_nobody(client: KafkaClient, consumer: BrokerConsumer) -> None:
    with contextlib.closing(client.producer()) as producer:
        for name in ("name", NotText("name"), "name"):
            producer.send(ONE, b"key", b"value", [(name, b"header")])
        producer.flush(20)
    consumer.assign([ONE])
    consumer.seek(ONE, 0)
    found = read(consumer, 3)
    assert [(message.value, message.headers) for message in found] == [
        (b"value", [("name", b"header")]),
        (b"value", [("\\xff\\xfename", b"header")]),
        (b"value", [("name", b"header")]),
    ]


def test_what_gathers_is_no_pause_to_a_sink() -> None:
    """Else a steady load would be a commit for every request, each with data files of its own."""
    assert 2 * vars(consumer_module)["_GATHERED_S"] <= SinkOptions().linger_s
