"""noida-db: a small broker out of a package, up in milliseconds, for machines with nothing but pip.

It speaks Kafka's protocol and keeps its data in ``folder``, but promises no durability: a kill loses the last second.
A member of a group that was killed keeps its partitions here: what takes over from the dead is tested on real Kafka.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from tests.servers.process import Server, ServerError, ServerProcess, free_port, is_open


class NoidaDb(Server):
    """One broker; use it as a context manager."""

    name = "noida-db"

    def __init__(self, folder: Path, port: int | None = None) -> None:
        """Data and log go to ``folder``; it listens on ``port``, or on a free one."""
        program = Path(str(importlib.resources.files("noida_db") / "noida-db"))
        if not os.access(program, os.X_OK):
            program.chmod(0o755)
        self.port = port or free_port()
        command = [str(program), "start", "--data-dir", str(folder / "data"), "--host", "127.0.0.1"]
        command += ["--only", "kafka", "--kafka-port", str(self.port)]
        self.process = ServerProcess(self.name, command, folder / "noida-db.out")

    @property
    def bootstrap(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or start it again on its data; returns once it answers."""
        num_before = len(self._said_ports())
        self.process.start()
        said = self.process.wait_until(lambda: self._said_ports()[num_before:], 30)
        # Where the port is taken, it takes another one, and somebody else would answer here.
        if said != [str(self.port)]:
            raise ServerError(f"expected {self.name} on port {self.port}, got: {self.process.last_words()}")
        self.process.wait_until(lambda: is_open(self.port), 30)

    def _said_ports(self) -> list[str]:
        """The port of each start so far."""
        return re.findall(r"kafka\s+127\.0\.0\.1:(\d+)", self.process.last_words())
