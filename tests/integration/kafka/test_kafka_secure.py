"""TLS and SCRAM on a real broker, by configuration alone; what does not fit is an error that says so, and no secret."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.certificates import Certificates
from tests.servers.fixtures import SCRAM_USERS

from rolltape.ingest import Recorder, open_log
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.sink import Sink, SinkOptions
from rolltape.recipes.cli import main
from rolltape.schema import Cursor
from rolltape.schema.errors import LogAuthenticationError, LogError, LogUnreachableError
from rolltape.store import Lake

PASSWORD = SCRAM_USERS["alice"]


@pytest.fixture
def secured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, apache_kafka: KafkaCluster, certificates: Certificates
) -> pytest.MonkeyPatch:
    """The environment of a user who may: protocol, user, password in a file, authority."""
    (tmp_path / "password").write_text(PASSWORD + "\n")
    monkeypatch.setenv("ROLLTAPE_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("ROLLTAPE_KAFKA_SASL_MECHANISM", "SCRAM-SHA-256")
    monkeypatch.setenv("ROLLTAPE_KAFKA_SASL_USERNAME", "alice")
    monkeypatch.setenv("ROLLTAPE_KAFKA_SASL_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("ROLLTAPE_KAFKA_SSL_CAFILE", str(certificates.ca_file))
    return monkeypatch


@pytest.fixture
def url(apache_kafka: KafkaCluster, topic_prefix: str) -> str:
    """A log behind the secured listener."""
    return f"kafka://{apache_kafka.secure_bootstrap}/{topic_prefix}"


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_the_pipeline_runs_over_tls_with_scram(
    secured: pytest.MonkeyPatch, url: str, tmp_path: Path, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secured.setenv("ROLLTAPE_KAFKA_SASL_MECHANISM", mechanism)
    assert main(["topics", "--log", url, "--create"]) == 0
    lake = Lake.create(tmp_path / "lake")
    stop = threading.Event()
    sink = Sink(KafkaConfig.from_url(url), lake, options=SinkOptions(linger_s=0.02), alone=True)
    thread = threading.Thread(target=sink.run, args=(stop,))
    thread.start()
    try:
        with open_log(url, lake=str(lake.location)) as log:
            with Recorder(log, producer_id="worker", run_id="run") as recorder:
                ids = [recorder.record("rollout_started", trajectory_id=f"t{n}", attempt=0) for n in range(50)]
                recorder.flush()
            log.wait_until_archived(30)
            with contextlib.closing(log.reader(Cursor(), topics=["rollout"])) as reader:
                read: list[str] = []
                while len(read) < len(ids):
                    read += [i for delivery in reader.poll(5.0) for i in delivery.table["event_id"].to_pylist()]
    finally:
        stop.set()
        thread.join()
        sink.close()
    assert sorted(read) == sorted(ids)
    assert sorted(lake.read("rollout_started")["event_id"].to_pylist()) == sorted(ids)
    assert PASSWORD not in caplog.text


def wrong_password(environment: pytest.MonkeyPatch, certificates: Certificates) -> None:
    environment.setenv("ROLLTAPE_KAFKA_SASL_PASSWORD", "no-such-password")


def unknown_user(environment: pytest.MonkeyPatch, certificates: Certificates) -> None:
    environment.setenv("ROLLTAPE_KAFKA_SASL_USERNAME", "mallory")


def mechanism_that_the_broker_has_not(environment: pytest.MonkeyPatch, certificates: Certificates) -> None:
    environment.setenv("ROLLTAPE_KAFKA_SASL_MECHANISM", "PLAIN")


def stranger_as_authority(environment: pytest.MonkeyPatch, certificates: Certificates) -> None:
    environment.setenv("ROLLTAPE_KAFKA_SSL_CAFILE", str(certificates.stranger_ca_file))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (wrong_password, r"(?i)user 'alice'.*password|password.*user 'alice'"),
        (unknown_user, r"(?i)user 'mallory'.*password|password.*user 'mallory'"),
        (mechanism_that_the_broker_has_not, r"PLAIN"),
        (stranger_as_authority, r"(?i)certificate"),
    ],
)
def test_who_may_not_in_is_told_why(
    secured: pytest.MonkeyPatch,
    certificates: Certificates,
    url: str,
    spoil: Any,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    spoil(secured, certificates)
    with pytest.raises(LogAuthenticationError, match=said) as caught:
        open_log(url)
    for secret in (PASSWORD, "no-such-password"):
        assert secret not in str(caught.value)
        assert secret not in caplog.text


def test_the_command_line_says_that_the_password_is_wrong(
    secured: pytest.MonkeyPatch, certificates: Certificates, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_password(secured, certificates)
    assert main(["topics", "--log", url]) != 0
    said = capsys.readouterr().err
    assert "alice" in said
    assert "password" in said
    assert "Traceback" not in said
    assert "no-such-password" not in said


def test_plain_text_to_a_secured_listener_names_the_protocol(url: str) -> None:
    with pytest.raises(LogError, match="security_protocol"):
        open_log(f"{url}?bootstrap_timeout_s=3")


def test_tls_to_a_plain_listener_names_the_protocol(
    secured: pytest.MonkeyPatch, apache_kafka: KafkaCluster, topic_prefix: str
) -> None:
    with pytest.raises(LogError, match="security_protocol"):
        open_log(f"kafka://{apache_kafka.bootstrap}/{topic_prefix}?bootstrap_timeout_s=3")


def test_a_port_that_nobody_listens_on_is_no_question_of_passwords(secured: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LogUnreachableError) as caught:
        open_log("kafka://127.0.0.1:1/x?bootstrap_timeout_s=1")
    assert "password" not in str(caught.value)
