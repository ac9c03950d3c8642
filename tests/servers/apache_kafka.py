"""Real Apache Kafka (KRaft, no ZooKeeper) on this machine, from a folder with its jars: one node, or three.

With three nodes topics have three replicas, of which two must hold a record before it is acknowledged. Data lie in the
folder that is given, so a node that was killed comes back with them.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from tests.servers.certificates import Certificates
from tests.servers.process import ServerError, ServerProcess, free_port, is_open
from tests.servers.toxiproxy import Proxy, Toxiproxy

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Secure:
    """A second listener of each node: TLS, and SASL with SCRAM-SHA-256 or SCRAM-SHA-512.

    Attributes:
        certificates: the nodes show their server certificate.
        users: password by user name.
    """

    certificates: Certificates
    users: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """One node: its process, and the ports it listens on (``proxy_port`` is the one that a proxy listens on)."""

    process: ServerProcess
    settings_file: Path
    plain_port: int
    controller_port: int
    secure_port: int
    proxied_port: int
    proxy_port: int


class KafkaCluster:
    """One or three nodes, numbered from 1; use it as a context manager.

    Args:
        home: folder with ``libs/`` (any unpacked Kafka 4 release has it).
        folder: data, settings and what the nodes say.
        nodes: how many.
        extra: settings of every node, beside and above the ones here.
        secure: adds a TLS and SCRAM listener; clients take :attr:`secure_bootstrap`.
        proxied: adds a listener that is reached through proxies only: :meth:`proxies` makes them, clients take
            :attr:`proxied_bootstrap`.
        heap_mib: memory of each node's Java heap.
        optimise: let Java compile with its optimising compiler. Without it a node starts and serves tests for half the
            processor time; what is measured needs it.
    """

    name = "Apache Kafka"

    def __init__(
        self,
        home: Path | str,
        folder: Path,
        nodes: int = 1,
        extra: Mapping[str, Any] | None = None,
        *,
        secure: Secure | None = None,
        proxied: bool = False,
        heap_mib: int = 512,
        optimise: bool = True,
    ) -> None:
        """Nothing runs before the context is entered, or :meth:`start_all`."""
        self._jars = str(Path(home) / "libs" / "*")
        if not any(Path(home).glob("libs/kafka_*.jar")):
            raise ServerError(f"expected libs/ with Kafka's jars in {home}, got none; see ROLLTAPE_KAFKA_HOME")
        java = shutil.which("java")
        if java is None:
            raise ServerError("expected the program java (17 or newer) on PATH, got none: Kafka runs on it")
        self._java = java
        self._folder = folder
        self._extra = dict(extra or {})
        self._secure = secure
        self._proxied = proxied
        self._heap_mib = heap_mib
        self._optimise = optimise
        self.nodes: Mapping[int, _Node] = {number: self._node(number) for number in range(1, nodes + 1)}

    @property
    def bootstrap(self) -> str:
        """Where clients connect, without encryption or password."""
        return _addresses(node.plain_port for node in self.nodes.values())

    @property
    def secure_bootstrap(self) -> str:
        """Where clients connect with TLS and SCRAM (``secure``)."""
        return _addresses(node.secure_port for node in self.nodes.values())

    @property
    def proxied_bootstrap(self) -> str:
        """Where clients connect through the proxies of :meth:`proxies` (``proxied``)."""
        return _addresses(node.proxy_port for node in self.nodes.values())

    def proxies(self, toxiproxy: Toxiproxy) -> dict[int, Proxy]:
        """The proxy before each node: what goes to :attr:`proxied_bootstrap` stays behind them."""
        return {
            number: toxiproxy.proxy(
                f"kafka-{node.proxy_port}", f"127.0.0.1:{node.proxied_port}", f"127.0.0.1:{node.proxy_port}"
            )
            for number, node in self.nodes.items()
        }

    def start_all(self, timeout_s: float = 300) -> None:
        """Start every node that does not run; returns once the cluster lists all of them."""
        if not all(node.settings_file.exists() for node in self.nodes.values()):
            self._format()
        for node in self.nodes.values():
            node.process.start()
        for number in self.nodes:
            self._wait_for_node(number, timeout_s)

    def start(self, node: int, *, wait: bool = True) -> None:
        """Start a node again, on its data; returns once the cluster lists it."""
        self.nodes[node].process.start()
        if wait:
            self._wait_for_node(node, 300)

    def kill(self, node: int) -> None:
        """SIGKILL."""
        self.nodes[node].process.kill()

    def term(self, node: int, timeout_s: float = 60) -> None:
        """Graceful end: leadership moves away first."""
        self.nodes[node].process.terminate(timeout_s)

    def pause(self, node: int) -> None:
        """SIGSTOP: connections stay, answers do not come."""
        self.nodes[node].process.pause()

    def resume(self, node: int) -> None:
        """SIGCONT."""
        self.nodes[node].process.resume()

    def stop(self) -> None:
        """End all nodes at once. Not gracefully: their data go next."""
        for node in self.nodes.values():
            node.process.kill()

    def leader(self, topic: str, partition: int) -> int:
        """The node that leads a partition; -1 for none."""
        return int(self._metadata(self.bootstrap, 10).topics[topic].partitions[partition].leader)

    def cut(self, topic: str, partition: int, offset: int) -> None:
        """Take the end of a partition, from the first batch at or after ``offset``, from the disks of all nodes.

        As a disk that was restored from an earlier day; to be called while no node runs.
        """
        for node in self.nodes.values():
            folder = node.settings_file.parent / "data" / f"{topic}-{partition}"
            for file in folder.iterdir():
                if file.suffix in {".index", ".timeindex", ".snapshot"}:
                    file.unlink()
            (segment,) = folder.glob("*.log")
            content = segment.read_bytes()
            at = 0
            # Each batch begins with its first offset and its length: https://kafka.apache.org/documentation/#recordbatch.
            while at < len(content) and int.from_bytes(content[at : at + 8], "big") < offset:
                at += 12 + int.from_bytes(content[at + 8 : at + 12], "big")
            segment.write_bytes(content[:at])

    def tool(self, main_class: str, *arguments: str, timeout_s: float = 120) -> str:
        """What one of Kafka's own tools prints, e.g. ``org.apache.kafka.tools.TopicCommand``.

        Raises:
            ServerError: it failed; with what it said.
        """
        command = [*self._java_command(128, optimise=False), "-cp", self._jars, main_class, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise ServerError(f"{main_class} {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def __enter__(self) -> Self:
        try:
            self.start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # How a node is made

    def _node(self, number: int) -> _Node:
        folder = self._folder / f"node{number}"
        settings_file = folder / "server.properties"
        java = self._java_command(self._heap_mib, optimise=self._optimise)
        command = [*java, "-cp", self._jars, "kafka.Kafka", str(settings_file)]
        return _Node(
            process=ServerProcess(f"{self.name} node {number}", command, folder / "broker.out"),
            settings_file=settings_file,
            plain_port=free_port(),
            controller_port=free_port(),
            secure_port=free_port(),
            proxied_port=free_port(),
            proxy_port=free_port(),
        )

    def _java_command(self, heap_mib: int, *, optimise: bool) -> list[str]:
        log = ("defaultLogLevel=warn", "showDateTime=true", "dateTimeFormat=HH:mm:ss.SSS")
        options = [f"-Dorg.slf4j.simpleLogger.{setting}" for setting in log]
        options += [] if optimise else ["-XX:TieredStopAtLevel=1"]
        return [self._java, f"-Xmx{heap_mib}m", "-XX:+UseSerialGC", *options]

    def _settings(self, number: int) -> dict[str, Any]:
        node = self.nodes[number]
        copies, least = (3, 2) if len(self.nodes) >= 3 else (1, 1)
        voters = ",".join(f"{n}@127.0.0.1:{other.controller_port}" for n, other in self.nodes.items())
        return {
            "process.roles": "broker,controller",
            "node.id": number,
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self._folder / f"node{number}" / "data",
            "default.replication.factor": copies,
            "min.insync.replicas": least,
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": least,
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": least,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "false",
            "message.max.bytes": 16 * _MEBIBYTE,
            "replica.fetch.max.bytes": 16 * _MEBIBYTE,
            "log.cleaner.dedupe.buffer.size": 8 * _MEBIBYTE,
            # Hundreds of small topics of tests: do not set aside 10 MiB of index for each.
            "log.index.size.max.bytes": _MEBIBYTE,
            **self._listeners(node),
            **self._extra,
        }

    def _listeners(self, node: _Node) -> dict[str, Any]:
        listens = {"PLAINTEXT": node.plain_port, "CONTROLLER": node.controller_port}
        advertised = {"PLAINTEXT": node.plain_port}
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        settings: dict[str, Any] = {}
        if self._proxied:
            listens["PROXIED"], advertised["PROXIED"] = node.proxied_port, node.proxy_port
            protocols["PROXIED"] = "PLAINTEXT"
        if self._secure is not None:
            listens["SECURE"] = advertised["SECURE"] = node.secure_port
            protocols["SECURE"] = "SASL_SSL"
            login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            settings = {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": self._secure.certificates.server_file,
                "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
                "listener.name.secure.scram-sha-256.sasl.jaas.config": login,
                "listener.name.secure.scram-sha-512.sasl.jaas.config": login,
            }
        return {
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in listens.items()),
            "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in advertised.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{value}" for name, value in protocols.items()),
            **settings,
        }

    def _format(self) -> None:
        """Write the settings and prepare the data folders, of all nodes at once: each takes a Java of its own."""
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        users = [] if self._secure is None else list(self._secure.users.items())
        scram = [
            part
            for name, password in users
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for part in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]
        running: list[tuple[int, subprocess.Popen[str]]] = []
        for number, node in self.nodes.items():
            node.settings_file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{name}={value}\n" for name, value in self._settings(number).items())
            node.settings_file.write_text(text)
            command = [*self._java_command(128, optimise=False), "-cp", self._jars]
            # Glued to its name: an id may begin with a dash.
            command += ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}"]
            command += ["--config", str(node.settings_file), *scram]
            running.append(
                (number, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            )
        said = {number: (process.communicate(timeout=300)[0], process.returncode) for number, process in running}
        for number, (text, status) in said.items():
            if status:
                raise ServerError(f"Kafka could not prepare the data folder of node {number}:\n{text}")

    # Whether a node answers

    def _wait_for_node(self, number: int, timeout_s: float) -> None:
        node = self.nodes[number]
        node.process.wait_until(lambda: is_open(node.plain_port), timeout_s)
        # The port is open before the node serves: what counts is that the cluster lists it.
        node.process.wait_until(lambda: number in self._listed(node.plain_port), timeout_s)

    def _listed(self, port: int) -> set[int]:
        try:
            return set(self._metadata(f"127.0.0.1:{port}", 2).brokers)
        except KafkaException:
            return set()

    def _metadata(self, bootstrap: str, timeout_s: float) -> Any:
        # Only critical complaints: a node that is not ready yet is what this asks about.
        return AdminClient({"bootstrap.servers": bootstrap, "log_level": 2}).list_topics(timeout=timeout_s)


def _addresses(ports: Iterable[int]) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in ports)
