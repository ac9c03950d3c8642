"""The pipeline of the compose file by its own commands, without containers: topics, bucket and sink on real servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.process import ServerProcess, free_port
from tests.servers.s3_server import S3Server

from rolltape.ingest import Recorder, open_log
from rolltape.store.lake import Lake
from rolltape.store.location import Location

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
NUM_ROLLOUTS = 40

MODULES = {
    "frames": ("polars", "pandas"),
    "train": ("torch", "transformers", "safetensors"),
    "smollm2": ("accelerate", "gguf"),
    "kafka": ("kafka", "crc32c", "prometheus_client"),
    "s3": ("obstore",),
}
"""What each extra of the package installs."""

IMAGE = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, *_):
        if name in {absent}:
            raise ModuleNotFoundError("no module " + name, name=name)

sys.meta_path.insert(0, Absent)
from rolltape.recipes.cli import main
sys.exit(main())
"""


class Deployed:
    """Services of the compose file as processes here, with this machine's addresses in place of the containers'."""

    def __init__(self, kafka: KafkaCluster, s3: S3Server, prefix: str) -> None:
        self.port = free_port()
        self.log_url = f"kafka://{kafka.bootstrap}/{prefix}"
        self.lake_url = f"s3://{prefix}/main"
        self._names = {
            "kafka://kafka:19092/rolltape": self.log_url,
            "s3://lakes/main": self.lake_url,
            "lakes": prefix,
            "9464": str(self.port),
            "http://s3:7070": s3.options["AWS_ENDPOINT_URL"],
            "ROLLTAPE_S3_ACCESS_KEY": s3.options["AWS_ACCESS_KEY_ID"],
            "ROLLTAPE_S3_SECRET_KEY": s3.options["AWS_SECRET_ACCESS_KEY"],
        }

    def command(self, service: str) -> list[str]:
        """What the service's container runs: the image's entry point is the command line."""
        described = COMPOSE["services"][service]
        words = [self._names.get(str(word), str(word)) for word in described["command"]]
        if "entrypoint" not in described:
            return [sys.executable, "-c", _command_line_of_the_image(), *words]
        program = Path(described["entrypoint"][-1])
        assert f"WORKDIR {program.parent}\n" in DOCKERFILE
        assert f"COPY deploy/{program.name} ./\n" in DOCKERFILE
        return [sys.executable, str(ROOT / "deploy" / program.name), *words]

    def environment(self, service: str) -> Mapping[str, str]:
        """The service's variables, with what a user's ``.env`` says."""
        given: dict[str, str] = COMPOSE["services"][service]["environment"]
        filled = {name: re.sub(r"\$\{(\w+):\?[^}]*\}", r"\1", str(value)) for name, value in given.items()}
        return {name: self._names.get(value, value) for name, value in filled.items()}

    def run(self, service: str) -> None:
        """A service that ends by itself."""
        environment = {**os.environ, **self.environment(service)}
        done = subprocess.run(self.command(service), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _command_line_of_the_image() -> str:
    """The command line as a program that cannot import what the image does not install."""
    (extras,) = re.findall(r"pip install .* '\.\[([\w,]+)\]'", DOCKERFILE)
    absent = [module for extra, modules in MODULES.items() if extra not in extras.split(",") for module in modules]
    return IMAGE.format(absent=absent)


@pytest.fixture
def deployed(apache_kafka: KafkaCluster, s3_server: S3Server, topic_prefix: str) -> Deployed:
    """Names of this test's own."""
    return Deployed(apache_kafka, s3_server, topic_prefix)


def test_what_is_recorded_reaches_the_bucket(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        # `docker compose up` runs them at every start.
        deployed.run("topics")
        deployed.run("bucket")
    for name, value in deployed.environment("sink").items():
        monkeypatch.setenv(name, value)
    sink = ServerProcess("sink", deployed.command("sink"), tmp_path / "sink.log")
    sink.start()
    try:
        sink.wait_until(lambda: '"sink": "running"' in sink.last_words(), 60)
        url = f"{deployed.log_url}?lake={deployed.lake_url}"
        with open_log(url, spool=tmp_path / "spool") as log, Recorder(log, producer_id="p", run_id="run") as recorder:
            for number in range(NUM_ROLLOUTS):
                recorder.record("rollout_started", trajectory_id=f"t{number}", attempt=0, group_id=f"g{number}")
            recorder.flush()
            log.wait_until_archived(60)
        rows = f'rolltape_sink_rows_total{{kind="rollout_started"}} {NUM_ROLLOUTS}.0'
        sink.wait_until(lambda: rows in _metrics(deployed.port), 30)
        os.kill(sink.pid, signal.SIGTERM)
        _wait_for_end(sink, 60)
    finally:
        sink.kill()
    lake = Lake.open(Location.parse(deployed.lake_url), read_only=True)
    assert lake.sql("select count(*) as n from rollout_started").rows() == [{"n": NUM_ROLLOUTS}]


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def _wait_for_end(process: ServerProcess, timeout_s: float) -> None:
    """The grace that the compose file gives a sink."""
    deadline = time.monotonic() + timeout_s
    while process.is_alive:
        assert time.monotonic() < deadline, process.last_words()
        time.sleep(0.05)
