"""A real broker that asks for client certificates, and refuses all but the rights that docs/cluster.md names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trustme
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from cryptography.hazmat.primitives import serialization
from tests.servers.apache_kafka import KafkaCluster, Secure
from tests.servers.certificates import Certificates
from tests.servers.fixtures import QUICK

from rolltape.ingest import Recorder, open_log
from rolltape.recipes.cli import main
from rolltape.schema import Cursor
from rolltape.schema.errors import LogError
from rolltape.store import Lake

PREFIX: Final = "runs"
USERS: Final = {"worker": "worker-of-the-tests", "recorder": "recorder-of-the-tests", "sink": "sink-of-the-tests"}
PAGE: Final = Path(__file__).parents[3] / "docs" / "cluster.md"
AUTHORIZER: Final = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    # Whoever comes through the listener without a password sets things up.
    "super.users": "User:ANONYMOUS",
    "listener.name.secure.ssl.client.auth": "required",
}
KEY_PASSWORD: Final = "key-of-the-tests"


def rights(who: str) -> list[AclBinding]:
    """What the page grants: ``*Right*, *Right* on `topic```, parts joined by semicolons, in the row of ``who``."""
    (row,) = re.findall(rf"^\| {who}s?\b[^|]*\| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    found = []
    for part in row.split("; "):
        granted, _, place = part.partition(" on ")
        kind, pattern, name = ResourceType.TOPIC, ResourcePatternType.LITERAL, place.strip("`* ")
        if place.startswith("group"):
            kind, name = ResourceType.GROUP, place.removeprefix("group ").strip("`")
        if place.rstrip("`").endswith("*"):
            pattern = ResourcePatternType.PREFIXED
        name = name.replace("<prefix>", PREFIX)
        for right in re.findall(r"\*(\w+)\*", granted):
            operation = AclOperation[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", right).upper()]
            found.append(AclBinding(kind, name, pattern, f"User:{who}", "*", operation, AclPermissionType.ALLOW))
    return found


@pytest.fixture(scope="module")
def client_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a client's certificate (``client.pem``), its encrypted key (``key.pem``) and their authority."""
    folder = tmp_path_factory.mktemp("client")
    authority = trustme.CA()
    client = authority.issue_cert("client.example")
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    client.cert_chain_pems[0].write_to_path(str(folder / "client.pem"))
    key = serialization.load_pem_private_key(client.private_key_pem.bytes(), None)
    locked = serialization.BestAvailableEncryption(KEY_PASSWORD.encode())
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(pem, pkcs8, locked))
    return folder


@pytest.fixture(scope="module")
def strict_kafka(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, client_files: Path
) -> Iterator[KafkaCluster]:
    """A node with access control, and the page's rights for its users."""
    secure = Secure(certificates=certificates, users=USERS)
    folder = tmp_path_factory.mktemp("strict-kafka")
    home = os.environ["ROLLTAPE_KAFKA_HOME"]
    trust = {"ssl.truststore.type": "PEM", "ssl.truststore.location": client_files / "authority.pem"}
    with KafkaCluster(home, folder, 1, {**QUICK, **AUTHORIZER, **trust}, secure=secure, optimise=False) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 2})
        for future in admin.create_acls([right for who in USERS for right in rights(who)]).values():
            future.result()
        assert main(["topics", "--log", f"kafka://{cluster.bootstrap}/{PREFIX}", "--create"]) == 0
        yield cluster


def test_the_rights_that_the_page_names_are_enough(
    apache_kafka: KafkaCluster,  # a machine without real Kafka says so by this fixture
    strict_kafka: KafkaCluster,
    certificates: Certificates,
    client_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = Lake.create(tmp_path / "lake")
    url: Any = f"kafka://{strict_kafka.secure_bootstrap}/{PREFIX}"
    monkeypatch.setenv("ROLLTAPE_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("ROLLTAPE_KAFKA_SASL_MECHANISM", "SCRAM-SHA-512")
    monkeypatch.setenv("ROLLTAPE_KAFKA_SSL_CAFILE", str(certificates.ca_file))

    monkeypatch.setenv("ROLLTAPE_KAFKA_SSL_KEYFILE", str(client_files / "key.pem"))
    monkeypatch.setenv("ROLLTAPE_KAFKA_SSL_CERTFILE", str(client_files / "client.pem"))
    monkeypatch.setenv("ROLLTAPE_KAFKA_SSL_KEY_PASSWORD", KEY_PASSWORD)

    def become(who: str) -> None:
        monkeypatch.setenv("ROLLTAPE_KAFKA_SASL_USERNAME", who)
        monkeypatch.setenv("ROLLTAPE_KAFKA_SASL_PASSWORD", USERS[who])

    def record(who: str, number: int) -> None:
        become(who)
        with (
            open_log(url, lake=str(tmp_path / "lake"), spool=tmp_path / "spool") as log,
            Recorder(log, producer_id=who, run_id="run") as recorder,
        ):
            recorder.record("rollout_started", trajectory_id=f"{who}-{number}", attempt=0)
            if who == "worker":
                recorder.record("weights_committed", policy_id="p", policy_run_epoch=1, version=number)
            recorder.flush("logged", 20.0)

    # The second start of each finds what the first left in the compacted topics.
    for number in (1, 2):
        for who in ("worker", "recorder"):
            record(who, number)
    become("sink")
    assert main(["topics", "--log", url]) == 0
    assert main(["sink", "--log", url, "--lake", str(tmp_path / "lake"), "--once"]) == 0
    assert lake.read("rollout_started").num_rows == 4
    become("worker")
    with open_log(url, lake=str(tmp_path / "lake")) as log:
        assert [
            delivery.table["weights_committed"].to_pylist()[0]["version"] for delivery in log.newest_versions()
        ] == [2]
        reader = log.reader(Cursor(), topics=["rollout"])
        rows = 0
        while rows < 4:
            rows += sum(delivery.table.num_rows for delivery in reader.poll(5.0))
        reader.close()
    # Who shows no certificate is not let in.
    monkeypatch.delenv("ROLLTAPE_KAFKA_SSL_KEYFILE")
    monkeypatch.delenv("ROLLTAPE_KAFKA_SSL_CERTFILE")
    monkeypatch.setenv("ROLLTAPE_KAFKA_BOOTSTRAP_TIMEOUT_S", "2")
    with pytest.raises(LogError):
        open_log(url)
