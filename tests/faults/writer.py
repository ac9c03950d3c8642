"""A producer process of the fault suite: ``python -m tests.faults.writer JSON``.

It records its workload through a real recorder. One thread records; another flushes to level ``logged`` again and again
and then, and only then, appends the ids to the ledger and syncs it. So some events are always on their way, and the
ledger never claims what the log did not acknowledge. Started again it goes on with the next block.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tests.faults.ledger import Ledger, wait_for_gate
from tests.faults.workload import RUN_ID, Workload

from rolltape.ingest import EventLog, Recorder, open_log
from rolltape.schema.kinds import kind_named

PATIENCE_S: Final = 300.0

Delivery = Literal["in_order", "disordered", "corrupt"]


@dataclass(frozen=True)
class WriterJob:
    """What a writer is told: where log, ledger and spool are, what to record, and how that travels."""

    log_url: str
    folder: str
    workload: Workload
    spool: str | None = None
    delivery: Delivery = "in_order"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WriterJob:
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload.from_json(json.dumps(fields["workload"]))})


class Acknowledger(threading.Thread):
    """Flushes what was recorded and enters it in the ledger."""

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        super().__init__(name="acknowledger", daemon=True)
        self._recorder = recorder
        self._ledger = ledger
        self._recorded: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self.error: BaseException | None = None

    def recorded(self, event_ids: list[str]) -> None:
        with self._changed:
            self._recorded += event_ids
            self._changed.notify()

    def _take(self) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: self._recorded or self._is_over)
            taken, self._recorded = self._recorded, []
            return taken

    def run(self) -> None:
        try:
            while taken := self._take():
                self._recorder.flush("logged", PATIENCE_S)
                self._ledger.acknowledge(taken)
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self.error = error

    def finish(self) -> None:
        """Return once everything is acknowledged; raise what went wrong."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self.join()
        if self.error is not None:
            raise self.error


def open_job_log(job: WriterJob) -> EventLog:
    """The log of a job: a real one, or one that delivers as bad networks would."""
    if job.delivery != "in_order":
        from tests.faults.disorder import DisorderedLog

        return DisorderedLog(job.log_url, Path(job.folder), job.workload.seed, corrupt=job.delivery == "corrupt")
    elsewhere: dict[str, Any] = {} if job.spool is None else {"spool": Path(job.spool)}
    return open_log(job.log_url, committer="external", **elsewhere)


def write(job: WriterJob) -> None:
    """Record every block that no earlier start of this writer began."""
    workload = job.workload
    ledger = Ledger(Path(job.folder), workload.producer_id)
    with (
        open_job_log(job) as log,
        Recorder(log, producer_id=workload.producer_id, run_id=RUN_ID, backpressure_timeout_s=PATIENCE_S) as recorder,
    ):
        acknowledger = Acknowledger(recorder, ledger)
        acknowledger.start()
        for block in range(ledger.next_block(), workload.num_blocks):
            wait_for_gate(Path(job.folder), workload.producer_id, block)
            for call, (kind, columns) in enumerate(workload.calls(block)):
                ledger.begin(block, call)
                receipt = recorder.record_batch(kind_named(kind).name, columns)
                if receipt.refused:
                    raise AssertionError(f"expected every row to be fit, got {receipt.refused[0]}")
                acknowledger.recorded(receipt.event_ids)
                if acknowledger.error is not None:
                    raise acknowledger.error
            time.sleep(workload.pause_s)
        acknowledger.finish()
        # An earlier start may have left records in the spool that nobody waited for.
        recorder.wait_for_older_epochs(PATIENCE_S)


if __name__ == "__main__":
    write(WriterJob.from_json(sys.argv[1]))
    os.write(1, b"done\n")
