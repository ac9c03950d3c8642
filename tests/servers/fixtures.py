"""The servers as fixtures: started by the first test that asks, ended with the run (three brokers: with the file).

A test keeps to itself by names of its own: ``topic_prefix`` and ``s3_bucket`` are new for each test.

Which servers there are, the environment says:

* ``ROLLTAPE_KAFKA_HOME``: a folder with ``libs/`` of Apache Kafka 4; brokers are started from it (Java 17).
* ``ROLLTAPE_KAFKA_BOOTSTRAP``: brokers that run already; suites that stop no brokers use them, as whoever the other
  ``ROLLTAPE_KAFKA_…`` variables say.
* ``ROLLTAPE_S3_SERVER``: the program versitygw; or ``ROLLTAPE_S3_ENDPOINT``: a server that runs already, with the
  usual AWS variables, and buckets made there unless ``ROLLTAPE_S3_BUCKET`` names one.
* ``ROLLTAPE_TOXIPROXY``: the program toxiproxy-server.

A test that needs a server that the environment does not name is deselected, and the summary says so. A server that is
named and does not start is an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import pyarrow.fs as pafs
import pytest
from tests.servers.apache_kafka import KafkaCluster, Secure
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.noida_db import NoidaDb
from tests.servers.s3_server import Bucket, S3Server
from tests.servers.toxiproxy import Toxiproxy

from rolltape.ingest.kafka.client import KafkaClient
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.topics import ALL_TOPICS
from rolltape.store.location import Location

SCRAM_USERS: Final = {"alice": "alice-of-the-tests", "bob": "bob-of-the-tests"}

# A node that is dead is replaced, and let in again, after three seconds; by default after nine.
QUICK: Final = {"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500}


class Broker(Protocol):
    """Brokers under test, one or many."""

    @property
    def name(self) -> str:
        """What they are."""
        ...

    @property
    def bootstrap(self) -> str:
        """Where clients connect."""
        ...


@dataclass(frozen=True, slots=True)
class GivenBroker:
    """Brokers that ran before the tests and go on after them."""

    bootstrap: str
    name: str = "given brokers"


def client_environment(broker: Broker) -> Mapping[str, str]:
    """The environment that clients of a broker take their configuration from: the user's for brokers of the user."""
    return os.environ if isinstance(broker, GivenBroker) else {}


@dataclass(frozen=True, slots=True)
class Absence:
    """A server that the environment does not name: what does not run without it, and how to run that."""

    what: str
    how: str


def absences(environment: Mapping[str, str]) -> dict[str, Absence]:
    """The fixtures that cannot be had, with what to say about each."""
    absent: dict[str, Absence] = {}
    home, given = environment.get("ROLLTAPE_KAFKA_HOME"), environment.get("ROLLTAPE_KAFKA_BOOTSTRAP")
    own = "set ROLLTAPE_KAFKA_HOME to a folder with libs/ of Apache Kafka 4 (Java 17)"
    if not home:
        absent["apache_kafka"] = Absence("tests that stop, cut or secure a real Kafka broker", own)
        absent["kafka_cluster3"] = Absence("faults of a real Kafka cluster of three nodes", own)
    if not (home or given):
        absent["real_kafka"] = Absence(
            "the log on real Kafka", f"{own}, or ROLLTAPE_KAFKA_BOOTSTRAP to the addresses of brokers that run"
        )
    server = "set ROLLTAPE_S3_SERVER to the program versitygw"
    if not environment.get("ROLLTAPE_S3_SERVER"):
        absent["s3_server"] = Absence("faults of an S3 server", server)
        if not environment.get("ROLLTAPE_S3_ENDPOINT"):
            absent["s3_bucket"] = Absence(
                "lakes in an object store",
                f"{server}, or ROLLTAPE_S3_ENDPOINT to the URL of an S3 server, with the usual AWS variables",
            )
    if not environment.get("ROLLTAPE_TOXIPROXY"):
        absent["toxiproxy"] = Absence("faults of the network", "set ROLLTAPE_TOXIPROXY to the program toxiproxy-server")
    if shutil.which("kcat") is None:
        absent["kcat"] = Absence("kcat as a reader of our topics", "install kcat (a package of that name in Debian)")
    if not Path(sys.prefix, "oracles", "verl").is_dir():
        absent["peers"] = Absence("agreement of our losses with verl, TRL and OpenRLHF", "run make oracles")
    return absent


# Kafka


@pytest.fixture(scope="session")
def noida_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NoidaDb]:
    """The small broker out of a package."""
    with NoidaDb(tmp_path_factory.mktemp("noida-db")) as broker:
        yield broker


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority, what it signed for the brokers, and a stranger."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[KafkaCluster]:
    """One node of real Kafka that the tests may strike: plain, secured (``SCRAM_USERS``) and proxied listeners."""
    home = os.environ["ROLLTAPE_KAFKA_HOME"]
    secure = Secure(certificates=certificates, users=SCRAM_USERS)
    folder = tmp_path_factory.mktemp("kafka")
    with KafkaCluster(home, folder, 1, QUICK, secure=secure, proxied=True, optimise=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kafka_cluster3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three nodes of real Kafka, plain and proxied listeners, ended with the file. Leave all of them running."""
    home = os.environ["ROLLTAPE_KAFKA_HOME"]
    with KafkaCluster(home, tmp_path_factory.mktemp("kafka3"), 3, QUICK, proxied=True, optimise=False) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def real_kafka(request: pytest.FixtureRequest) -> Broker:
    """Real Kafka that no test may strike: the brokers that the environment gives, or one node of our own."""
    given = os.environ.get("ROLLTAPE_KAFKA_BOOTSTRAP")
    broker: Broker = GivenBroker(given) if given else request.getfixturevalue("apache_kafka")
    return broker


@pytest.fixture(scope="session")
def kafka_broker(request: pytest.FixtureRequest) -> Broker:
    """The most real broker that there is here: real Kafka, else noida-db."""
    absent = "real_kafka" in absences(os.environ)
    broker: Broker = request.getfixturevalue("noida_broker" if absent else "real_kafka")
    return broker


@pytest.fixture
def topic_prefix() -> Iterator[str]:
    """A prefix that no other test uses: the topics of one Kafka log. Brokers of others get rid of them afterwards."""
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    yield prefix
    given = os.environ.get("ROLLTAPE_KAFKA_BOOTSTRAP")
    if given:
        with contextlib.closing(KafkaClient(KafkaConfig.from_url(f"kafka://{given}/{prefix}")).admin()) as admin:
            admin.delete([name for name, info in admin.describe(ALL_TOPICS).items() if info is not None])


@pytest.fixture(scope="session")
def kcat() -> str:
    """The program kcat: a reader that is not ours."""
    program = shutil.which("kcat")
    assert program is not None
    return program


# S3


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server that the tests may strike. Leave it running."""
    with S3Server(os.environ["ROLLTAPE_S3_SERVER"], tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A place in an object store that no other test uses. Servers of others get rid of it afterwards."""
    endpoint = os.environ.get("ROLLTAPE_S3_ENDPOINT")
    if not endpoint:
        yield request.getfixturevalue("s3_server").bucket()
        return
    options = _given_options(endpoint)
    existing, name = os.environ.get("ROLLTAPE_S3_BUCKET"), f"test-{uuid.uuid4().hex[:16]}"
    with _given_place(options, existing, name) as url:
        yield Bucket(url=url, options=options)


@contextlib.contextmanager
def _given_place(options: Mapping[str, str], existing: str | None, name: str) -> Iterator[str]:
    """A new bucket, or a new folder of one that exists; gone at the end of the block."""
    servers = _buckets_of(options)
    if not existing:
        servers.create_dir(name)
    url = f"s3://{existing}/{name}" if existing else f"s3://{name}"
    yield url
    place = Location.parse(url, options)
    for file in place.list(recursive=True):
        place.child(file.path).delete()
    if not existing:
        servers.delete_dir(name)


def _given_options(endpoint: str) -> dict[str, str]:
    options = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    options["AWS_ENDPOINT_URL"] = endpoint
    options.setdefault("AWS_REGION", "us-east-1")
    if endpoint.startswith("http://"):
        options["AWS_ALLOW_HTTP"] = "true"
    return options


def _buckets_of(options: Mapping[str, str]) -> pafs.FileSystem:
    """A client that makes and deletes buckets."""
    scheme, _, host = options["AWS_ENDPOINT_URL"].partition("://")
    return pafs.S3FileSystem(
        access_key=options.get("AWS_ACCESS_KEY_ID"),
        secret_key=options.get("AWS_SECRET_ACCESS_KEY"),
        session_token=options.get("AWS_SESSION_TOKEN"),
        region=options["AWS_REGION"],
        endpoint_override=host,
        scheme=scheme,
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )


# The network


@pytest.fixture(scope="session")
def toxiproxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    """A server of proxies; make one of your own and remove it."""
    with Toxiproxy(os.environ["ROLLTAPE_TOXIPROXY"], tmp_path_factory.mktemp("toxiproxy")) as server:
        yield server
