"""The servers of the tests do what the suites that use them rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.faulty_http import FaultyHttp
from tests.servers.fixtures import Broker, absences
from tests.servers.noida_db import NoidaDb
from tests.servers.process import ServerError, ServerProcess, free_port, is_open
from tests.servers.s3_server import Bucket, S3Server
from tests.servers.toxiproxy import Toxiproxy

ROOT = Path(__file__).parents[3]

EVERYTHING = {
    "ROLLTAPE_KAFKA_HOME": "a",
    "ROLLTAPE_S3_SERVER": "b",
    "ROLLTAPE_TOXIPROXY": "c",
}


def send_one(bootstrap: str, topic: str, timeout_s: float = 20) -> int:
    """Offset of a record that the broker acknowledged."""
    answers: list[Any] = []
    settings = {"bootstrap.servers": bootstrap, "message.timeout.ms": int(timeout_s * 1000), "log_level": 2}
    producer = Producer(settings)
    producer.produce(topic, b"value", on_delivery=lambda error, message: answers.append((error, message)))
    producer.flush(timeout_s + 10)
    ((error, message),) = answers
    if error is not None:
        raise KafkaException(error)
    return int(message.offset())


def object_store(options: Mapping[str, str]) -> pafs.FileSystem:
    """The file system of a server's clients."""
    return pafs.S3FileSystem(
        access_key=options["AWS_ACCESS_KEY_ID"],
        secret_key=options["AWS_SECRET_ACCESS_KEY"],
        endpoint_override=options["AWS_ENDPOINT_URL"].removeprefix("http://"),
        scheme="http",
    )


def put(fs: pafs.FileSystem, place: str, content: bytes) -> None:
    with fs.open_output_stream(place) as stream:
        stream.write(content)


def get(fs: pafs.FileSystem, place: str) -> bytes:
    with fs.open_input_stream(place) as stream:
        content: bytes = stream.read()
        return content


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    process = ServerProcess(
        "broken", [sys.executable, "-c", "print('no such luck'); raise SystemExit(3)"], tmp_path / "o"
    )
    process.start()
    with pytest.raises(ServerError, match="no such luck"):
        process.wait_until(lambda: False, 30)


def test_a_test_run_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    port = free_port()
    program = "import sys; from pathlib import Path; from tests.servers.noida_db import NoidaDb; "
    program += "NoidaDb(Path(sys.argv[1]), int(sys.argv[2])).start(); print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        assert is_open(port)
        run.send_signal(signal.SIGKILL)
        run.wait(30)
    deadline = time.monotonic() + 30
    while is_open(port):
        assert time.monotonic() < deadline, "the server outlives its run"
        time.sleep(0.05)


def test_ports_are_not_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first for _ in range(50))


def test_every_suite_says_which_server_it_lacks() -> None:
    servers = {"apache_kafka", "kafka_cluster3", "real_kafka", "s3_server", "s3_bucket", "toxiproxy"}
    assert absences(EVERYTHING).keys() & servers == set()
    assert absences({}).keys() & servers == servers
    given = {"ROLLTAPE_KAFKA_BOOTSTRAP": "host:9092", "ROLLTAPE_S3_ENDPOINT": "https://host"}
    assert absences(given).keys() & servers == servers - {"real_kafka", "s3_bucket"}
    assert "ROLLTAPE_KAFKA_BOOTSTRAP" in absences({})["real_kafka"].how
    assert "ROLLTAPE_S3_ENDPOINT" in absences({})["s3_bucket"].how


def test_the_small_broker_takes_records(noida_broker: NoidaDb, topic_prefix: str) -> None:
    assert send_one(noida_broker.bootstrap, topic_prefix) == 0


def test_real_kafka_is_real(real_kafka: Broker) -> None:
    assert real_kafka.name != "noida-db"


def test_a_node_that_was_killed_keeps_what_it_acknowledged(apache_kafka: KafkaCluster, topic_prefix: str) -> None:
    create = ["--bootstrap-server", apache_kafka.bootstrap, "--create", "--topic", topic_prefix]
    assert "Created" in apache_kafka.tool("org.apache.kafka.tools.TopicCommand", *create)
    assert send_one(apache_kafka.bootstrap, topic_prefix) == 0
    apache_kafka.kill(1)
    apache_kafka.start(1)
    assert send_one(apache_kafka.bootstrap, topic_prefix) == 1


def test_a_proxy_before_a_broker_cuts_and_mends(
    apache_kafka: KafkaCluster, toxiproxy: Toxiproxy, topic_prefix: str
) -> None:
    create = ["--bootstrap-server", apache_kafka.bootstrap, "--create", "--topic", topic_prefix]
    apache_kafka.tool("org.apache.kafka.tools.TopicCommand", *create)
    proxies = apache_kafka.proxies(toxiproxy)
    assert send_one(apache_kafka.proxied_bootstrap, topic_prefix) == 0
    proxies[1].cut()
    with pytest.raises(KafkaException):
        send_one(apache_kafka.proxied_bootstrap, topic_prefix, timeout_s=0.5)
    assert send_one(apache_kafka.bootstrap, topic_prefix) == 1
    proxies[1].mend()
    proxies[1].slow(50)
    started = time.monotonic()
    assert send_one(apache_kafka.proxied_bootstrap, topic_prefix) == 2
    assert time.monotonic() - started > 0.05
    for proxy in proxies.values():
        proxy.remove()


def test_a_bucket_keeps_its_objects_over_a_kill(s3_server: S3Server, s3_bucket: Bucket) -> None:
    place = f"{s3_bucket.url.removeprefix('s3://')}/one"
    fs = object_store(s3_bucket.options)
    put(fs, place, b"kept")
    s3_server.kill()
    s3_server.start()
    assert get(fs, place) == b"kept"


def test_what_does_not_run_is_counted_and_explained(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAPE_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "real_kafka_is or ports_are"]
    done = subprocess.run(
        [*command, str(Path(__file__))], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 passed" in done.stdout, done.stdout
    assert "NOT RUN: the log on real Kafka (1 tests). To run them, set ROLLTAPE_KAFKA_HOME" in done.stdout
    assert "ROLLTAPE_KAFKA_BOOTSTRAP" in done.stdout


def test_a_faulty_way_to_a_server_refuses_and_swallows(s3_server: S3Server, s3_bucket: Bucket) -> None:
    name = s3_bucket.url.removeprefix("s3://")
    with FaultyHttp(s3_server.address, seed=3) as way:
        through, direct = object_store(s3_server.options_through(way.listen)), object_store(s3_server.options)
        content = bytes(range(256)) * 40_000
        put(through, f"{name}/passed", content)
        assert get(through, f"{name}/passed") == content
        way.answer_503(next_requests=1000)
        with pytest.raises(OSError, match=r"(?i)slow.?down"):
            put(through, f"{name}/refused", b"x")
        way.clear()
        assert way.counts["refused"] > 0
        assert direct.get_file_info(f"{name}/refused").type == pafs.FileType.NotFound
        way.swallow_answers(next_requests=1)
        put(through, f"{name}/swallowed", b"kept")
        assert get(direct, f"{name}/swallowed") == b"kept"
        way.deny(next_requests=1)
        put(through, f"{name}/denied", b"kept")
        assert get(direct, f"{name}/denied") == b"kept"
        assert (way.counts["swallowed"], way.counts["denied"]) == (1, 1)


def test_servers_that_run_already_are_used_and_left_clean(noida_broker: NoidaDb, s3_server: S3Server) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLTAPE_", "AWS_"))}
    environment |= {"ROLLTAPE_KAFKA_BOOTSTRAP": noida_broker.bootstrap, **s3_server.options}
    environment["ROLLTAPE_S3_ENDPOINT"] = environment.pop("AWS_ENDPOINT_URL")
    client = AdminClient({"bootstrap.servers": noida_broker.bootstrap})
    topics, buckets = set(client.list_topics(timeout=10).topics), {place.name for place in s3_server.objects.iterdir()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "contract")]
    chosen = "test_it_keeps_the_protocols and (kafka or s3)"
    command += ["-k", chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout
    assert {topic for topic in client.list_topics(timeout=10).topics if topic.startswith("test-")} <= topics
    assert {place.name for place in s3_server.objects.glob("test-*")} <= buckets
