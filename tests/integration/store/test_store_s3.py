"""The same lake in an object store: commits through conditional puts, fencing, maintenance, tail.

A server is found through ``ROLLTAPE_S3_SERVER`` (versitygw); where that is not set, the test run's summary says so.
"""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rolltape.schema.errors import CommitterFencedError
from rolltape.store import Lake, Tail
from rolltape.store.maintenance import checkpoint, clean_logs, compact, vacuum

SERVER = os.environ.get("ROLLTAPE_S3_SERVER")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, "the S3 server ended at once"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the S3 server did not open its port within 30 s")


if SERVER:

    @pytest.fixture
    def options(tmp_path: pathlib.Path) -> Iterator[dict[str, str]]:
        """Storage options of a server with an empty bucket ``lakes``."""
        assert SERVER is not None
        (tmp_path / "s3" / "lakes").mkdir(parents=True)
        (tmp_path / "meta").mkdir()
        port = free_port()
        command = [SERVER, "--port", f"127.0.0.1:{port}", "posix"]
        command += ["--sidecar", str(tmp_path / "meta"), str(tmp_path / "s3")]
        environment = {**os.environ, "ROOT_ACCESS_KEY": "key", "ROOT_SECRET_KEY": "secret"}
        with (tmp_path / "server.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                wait_until_open(port, process)
                yield {
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                    "AWS_ALLOW_HTTP": "true",
                    "AWS_REGION": "us-east-1",
                    "AWS_ACCESS_KEY_ID": "key",
                    "AWS_SECRET_ACCESS_KEY": "secret",
                }
            finally:
                process.terminate()
                process.wait(timeout=30)

    def test_lake_in_an_object_store(options: dict[str, str], feed: Any) -> None:
        lake = Lake.create("s3://lakes/one", options=options)
        tail = Tail(lake)
        for _ in range(3):
            tables, transactions = feed.commit()
            lake.append(tables, transactions)
            deliveries = tail.poll(timeout_s=20)
            assert {d.kind: d.table for d in deliveries} == tables
        second = Lake.open(lake.location)
        late, marks = feed.commit()
        lake.append(late, marks)
        with pytest.raises(CommitterFencedError):
            second.append(late, marks)
        second.append({}, {"lane/b/1/rollout/0": 0})
        compact(lake)
        checkpoint(lake)
        assert clean_logs(lake, safe_age_s=0) > 4
        assert len(vacuum(lake, safe_age_s=-100)) == 8
        lake.append(*feed.commit())
        again = Lake.open("s3://lakes/one", options=options)
        assert again.read("reward_assigned").num_rows == 20
        assert again.snapshot().transactions["lane/b/1/rollout/0"] == 0
        tail.poll(timeout_s=20)
        assert tail.cursor == lake.cursor()
        assert not again.spool_path.is_relative_to("/lakes")
