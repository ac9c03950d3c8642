"""A trainer's reader as a process: ``python -m tests.faults.reader JSON``.

It polls, and enters what it consumed together with its cursor in a journal, synced: as a trainer pins both in
``batch_formed``. Started again it goes on from the journal's last whole entry.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.workload import digests_of

from rolltape.ingest import Delivery, open_log
from rolltape.schema.cursor import Cursor


@dataclass(frozen=True)
class ReaderJob:
    """What a reader is told."""

    log_url: str
    journal: str
    kinds: tuple[str, ...] = ("rollout_started", "action_sampled", "rollout_ended")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def entries(journal: Path) -> Iterator[dict[str, Any]]:
    """The whole entries of a journal: ``cursor`` after them, and ``events`` as pairs of id and content digest."""
    content = journal.read_text() if journal.exists() else ""
    for line in content[: content.rfind("\n") + 1].splitlines():
        yield json.loads(line)


def in_log_order(deliveries: Iterable[Delivery]) -> list[tuple[str, str]]:
    """Ids and content digests. A poll delivers kind by kind; within it the log's numbers give the order."""
    found = [
        ((delivery.partition, offset, seq), event)
        for delivery in deliveries
        for offset, seq, event in zip(
            delivery.table["log_offset"].to_pylist(),
            delivery.table["lane_seq"].to_pylist(),
            digests_of(delivery.kind, delivery.table).items(),
            strict=True,
        )
    ]
    return [event for _, event in sorted(found)]


def read(job: ReaderJob, stop: threading.Event) -> None:
    """Consume until told to stop."""
    journal = Path(job.journal)
    cursor, length = Cursor(), 0
    for entry in entries(journal):
        cursor = Cursor.parse(entry["cursor"])
    if journal.exists():
        length = journal.read_bytes().rfind(b"\n") + 1
    fd = os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.ftruncate(fd, length)
    with open_log(job.log_url, committer="external") as log:
        reader = log.reader(cursor, topics=["rollout"], kinds=job.kinds)
        while not stop.is_set():
            events = in_log_order(reader.poll(0.2))
            if events:
                os.write(fd, f"{json.dumps({'cursor': str(reader.cursor), 'events': events})}\n".encode())
                os.fsync(fd)
        reader.close()


if __name__ == "__main__":
    stop_asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_asked.set())
    fields = json.loads(sys.argv[1])
    read(ReaderJob(**{**fields, "kinds": tuple(fields["kinds"])}), stop_asked)
