"""The stage of one row: topics of its own, writer and sink processes, the strike, and the settling of everything after.

A row starts writers and sinks, strikes while events are on their way, mends what it broke, and settles. The stage
counts what was unacknowledged at each strike: a strike that hit nothing proves nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from tests.faults.judge import KINDS_WRITTEN, Verdict, judge, judge_journal
from tests.faults.ledger import (
    acknowledged_ids,
    gate_of,
    no_longer_waits,
    open_gate,
    refused_events,
    standing,
    waits_for,
)
from tests.faults.reader import ReaderJob, entries
from tests.faults.workload import EVENTS_PER_BLOCK, Workload
from tests.faults.writer import Delivery, WriterJob
from tests.servers.faulty_http import FaultyHttp
from tests.servers.process import ServerProcess
from tests.servers.toxiproxy import Proxy

from rolltape.schema.errors import RolltapeError
from rolltape.store.lake import Lake
from rolltape.store.location import Location

ROOT: Final = Path(__file__).resolve().parents[2]
NUM_PARTITIONS: Final = 4
MIN_EVENTS: Final = 20_000
NUM_PRODUCERS: Final = 3
NUM_BLOCKS: Final = 25
"""25 blocks of 3 producers are 24,000 events: a killed writer leaves the rest of its block out."""

FLOW_SHARE: Final = 0.2
"""What the writers do after one strike, at most, before the next is prepared."""

_ALL_BLOCKS: Final = 1 << 30
_POLL_S: Final = 0.002


class StageError(AssertionError):
    """A row that could not be played, or whose processes did not end as they should."""


class Child(ServerProcess):
    """A process of ours, ended by its own pid; a test run that is itself killed leaves none behind."""

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Exit status, once it ended.

        Raises:
            StageError: it did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self.status) is None:
            if time.monotonic() > deadline:
                raise StageError(f"expected {self.name} to end within {timeout_s} s; it said:\n{self.last_words()}")
            time.sleep(0.01)
        return status


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row keeps its lake.

    Attributes:
        url: the lake's path or URL.
        table: the same lake as a folder of this machine, for Delta Kernel (the S3 server keeps objects as files).
        environment: what processes that open it need in their environment.
        direct: the same for the harness, which looks at the lake past the fault; ``environment`` unless given.
        way: the proxy on the way of our processes to the lake, where there is one.
    """

    url: str
    table: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    direct: Mapping[str, str] | None = None
    way: Proxy | FaultyHttp | None = None


def local_place(folder: Path) -> Place:
    """A lake in a folder."""
    return Place(url=str(folder / "lake"), table=folder / "lake")


class Stage:
    """One row being played. Use it as a context manager: its end kills whatever still runs."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        bootstrap: str,
        prefix: str,
        place: Place | None = None,
        num_producers: int = NUM_PRODUCERS,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.chance = random.Random(seed)
        self.prefix = prefix
        self.bootstrap = bootstrap
        self.place = place or local_place(folder)
        self.writer_bootstrap = bootstrap
        self.ledgers = folder / "ledgers"
        self.spool: Path | None = folder / "spool"
        self.ledgers.mkdir(parents=True, exist_ok=True)
        open_gate(self.ledgers, 0)
        self.workloads = [
            Workload(seed=seed, producer_id=f"p{number}", num_blocks=num_blocks) for number in range(num_producers)
        ]
        self.writers: dict[str, Child] = {}
        self.sinks: dict[str, Child] = {}
        self.reader: Child | None = None
        self.strikes: list[int] = []
        self.problems: list[str] = []
        self.options: dict[str, str] = {}
        self.delivery: Delivery = "in_order"
        self.wrapper: tuple[str, ...] = ()

    def pace(self, pause_s: float) -> None:
        """Write more slowly, for a fault that takes long."""
        self.workloads = [replace(workload, pause_s=pause_s) for workload in self.workloads]

    # Addresses

    def log_url(self, bootstrap: str | None = None) -> str:
        """URL of this row's log, through the brokers that are named."""
        query = {"lake": quote(self.place.url, safe=""), **self.options}
        options = "&".join(f"{name}={value}" for name, value in query.items())
        return f"kafka://{bootstrap or self.bootstrap}/{self.prefix}?{options}"

    def lake(self) -> Lake:
        """A fresh handle on the lake, to read it."""
        return Lake.open(self._location(), read_only=True)

    def _location(self) -> Location:
        options = self.place.environment if self.place.direct is None else self.place.direct
        return Location.parse(self.place.url, dict(options) or None)

    # Processes

    def command(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """A Python program of this project, not started yet."""
        search = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        paths = {"PYTHONPATH": search, "XDG_STATE_HOME": str(self.folder / "state"), "PYTHONFAULTHANDLER": "1"}
        given = {**paths, **self.place.environment, **(environment or {})}
        return Child(name, [sys.executable, "-m", *arguments], self.folder / "logs" / f"{name}.log", given)

    def create_topics(self) -> None:
        """Make this row's lake and topics, with :data:`NUM_PARTITIONS` partitions for rollouts."""
        Lake.create(self._location())
        arguments = ["--log", self.log_url(), "--create", "--partitions", f"rollout={NUM_PARTITIONS}"]
        made = self.command("topics", "rolltape.recipes.cli", "topics", *arguments)
        made.start()
        if made.wait(60):
            raise StageError(f"rolltape topics --create failed:\n{made.last_words()}")

    def start_writers(self) -> None:
        """One writer process a producer. They wait for :meth:`flow` or a strike."""
        for workload in self.workloads:
            self.start_writer(workload)

    def start_writer(self, workload: Workload) -> Child:
        """A writer process, or the same producer again."""
        no_longer_waits(self.ledgers, workload.producer_id)
        job = WriterJob(
            log_url=self.log_url(self.writer_bootstrap),
            folder=str(self.ledgers),
            workload=workload,
            spool=None if self.spool is None else str(self.spool),
            delivery=self.delivery,
        )
        child = self.command(f"writer-{workload.producer_id}", *self.wrapper, "tests.faults.writer", job.to_json())
        self.writers[workload.producer_id] = child
        child.start()
        return child

    def sink_command(self, name: str, *arguments: str, crash: str = "") -> Child:
        """A sink process, not started."""
        given = ["sink", "--log", self.log_url(), "--lake", self.place.url, *arguments]
        return self.command(name, *self.wrapper, "rolltape.recipes.cli", *given, environment={"ROLLTAPE_CRASH": crash})

    def start_sink(self, name: str = "sink", *arguments: str, crash: str = "") -> Child:
        """A sink process, or one of that name again."""
        child = self.sinks[name] = self.sink_command(name, *arguments, crash=crash)
        child.start()
        return child

    def start_reader(self) -> Child:
        """A trainer's reader, or the same one again: it goes on from its journal."""
        job = ReaderJob(log_url=self.log_url(), journal=str(self.journal))
        self.reader = self.command("reader", "tests.faults.reader", job.to_json())
        self.reader.start()
        return self.reader

    @property
    def journal(self) -> Path:
        """What the reader consumed."""
        return self.folder / "journal"

    def start(self, *, num_sinks: int = 1) -> None:
        """Topics, sinks and writers."""
        self.create_topics()
        for number in range(num_sinks):
            self.start_sink(f"sink-{number}")
        self.start_writers()

    # What stands where

    @property
    def num_planned(self) -> int:
        """Events of all workloads."""
        return sum(workload.num_blocks * EVENTS_PER_BLOCK for workload in self.workloads)

    def standing(self) -> Any:
        """What was handed over and what was acknowledged, in events."""
        return standing(self.ledgers, [workload.producer_id for workload in self.workloads])

    def num_archived(self) -> int:
        """Rows of the lake, 0 while there is none."""
        try:
            lake = self.lake()
        except RolltapeError:
            return 0
        return sum(lake.read(kind, columns=["event_id"]).num_rows for kind in KINDS_WRITTEN)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
        """The first true value of ``condition``; meanwhile no writer may fail.

        Raises:
            StageError: it did not come in time, or a process failed.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if self.writers and all(child.status == 0 for child in self.writers.values()):
                raise StageError(f"the writers were through before {what}")
            self._check_writers()
            if time.monotonic() > deadline:
                raise StageError(f"waited {timeout_s} s in vain for {what}\n{self._last_words()}")
            time.sleep(_POLL_S)
        return value

    def _check_writers(self) -> None:
        for child in self.writers.values():
            if child.status not in (None, 0, -signal.SIGKILL):
                raise StageError(f"{child.name} ended with {child.status}:\n{child.last_words()}")

    def _last_words(self) -> str:
        children = [*self.writers.values(), *self.sinks.values(), *filter(None, [self.reader])]
        return "\n".join(f"--- {child.name} ({child.status}):\n{child.last_words(1500)}" for child in children)

    # The strike

    def hold_at(self, share: float) -> None:
        """Have the writers do that share of their blocks and then wait: a loaded machine must not miss its strike."""
        blocks = self._blocks(share)
        open_gate(self.ledgers, blocks)
        self.until(lambda: all(self._has_done(workload, blocks) for workload in self.workloads), f"a share of {share}")

    def until_sinking(self, share: float) -> None:
        """Hold the writers at that share and return once the sink has all of it: a strike finds it at work."""
        self.hold_at(share)
        self.until_archived()

    def _has_done(self, workload: Workload, num_blocks: int) -> bool:
        waiting = waits_for(self.ledgers, workload.producer_id) >= num_blocks
        return waiting or self.writers[workload.producer_id].status == 0

    def _blocks(self, share: float) -> int:
        return max(1, round(share * max(workload.num_blocks for workload in self.workloads)))

    def flow(self, share: float = 1.0) -> None:
        """Let the writers go on to that share of their blocks."""
        open_gate(self.ledgers, self._blocks(share) if share < 1 else _ALL_BLOCKS)

    def strike(self, act: Callable[[], Any], *, share: float | None = None, of: str | None = None) -> None:
        """Do ``act`` while events are on their way (``of`` one producer, or of any), and count those.

        With ``share`` the writers wait there, so that what was looked up for the strike still holds, and then go on.
        """
        ids = [workload.producer_id for workload in self.workloads] if of is None else [of]
        if share is not None:
            self.hold_at(share)
            self.flow(share + FLOW_SHARE)
            time.sleep(self.chance.uniform(0.0, 0.3))
        caught = self._num_unacknowledged if share is None else self._num_caught
        self.strikes.append(self.until(partial(caught, ids), "events on their way"))
        act()

    def _num_caught(self, producer_ids: list[str]) -> int:
        """The same; where a quick log acknowledged everything before it was looked at, the writers go on by a block."""
        found = self._num_unacknowledged(producer_ids)
        gate = gate_of(self.ledgers)
        if not found and all(waits_for(self.ledgers, producer_id) >= gate for producer_id in producer_ids):
            open_gate(self.ledgers, gate + 1)
        return found

    def _num_unacknowledged(self, producer_ids: list[str]) -> int:
        """At least so many are with the log and not acknowledged: what was handed over is read first."""
        now = standing(self.ledgers, producer_ids)
        return max(0, int(now.handed_over - now.acknowledged))

    def strike_when(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a fault that strikes by itself; counts what is on its way then."""
        self.until(condition, what)
        ids = [workload.producer_id for workload in self.workloads]
        self.strikes.append(self.until(partial(self._num_unacknowledged, ids), "events on their way"))

    def until_crashed(self, child: Child, mark: Path) -> None:
        """Return once ``child`` died in its crash window."""
        status = child.wait(60)
        if status != -signal.SIGKILL or not mark.exists():
            raise StageError(f"{child.name} ended with {status} outside its window:\n{child.last_words()}")

    @property
    def live_writers(self) -> list[Workload]:
        """Workloads whose writer runs."""
        return [workload for workload in self.workloads if self.writers[workload.producer_id].is_alive]

    # After it

    def settle(self, *, patience_s: float = 150.0) -> None:
        """Return once the writers are through, everything acknowledged is archived, and the sinks ended in order."""
        self.flow()
        for child in self.writers.values():
            if (status := child.wait(patience_s)) != 0:
                raise StageError(f"{child.name} ended with {status}:\n{child.last_words()}")
        self.until_archived(patience_s)
        self.stop_sinks()

    def until_archiving(self, before: int, patience_s: float = 30.0) -> None:
        """Return once the lake has more than ``before`` rows."""
        deadline = time.monotonic() + patience_s
        while self.num_archived() <= before:
            if time.monotonic() > deadline:
                raise StageError(f"nothing archived for {patience_s} s\n{self._last_words()}")
            time.sleep(0.1)

    def until_archived(self, patience_s: float = 90.0) -> None:
        """Return once the lake has every acknowledged event. (Whether it has more, and what is in them, is judged.)"""
        deadline = time.monotonic() + patience_s
        refused = sum(len(refused_events(self.ledgers, workload.producer_id)) for workload in self.workloads)
        wanted = self.standing().acknowledged - refused
        while (archived := self.num_archived()) < wanted or self._missing():
            for child in self.sinks.values():
                # Some were killed or told to leave by the row.
                if child.status not in (None, 0, -signal.SIGKILL):
                    raise StageError(f"{child.name} ended with {child.status}:\n{child.last_words()}")
            if time.monotonic() > deadline:
                raise StageError(f"{archived} of {wanted} events archived after {patience_s} s\n{self._last_words()}")
            time.sleep(0.1)

    def _missing(self) -> set[str]:
        """What is acknowledged, neither damaged nor archived."""
        lake = self.lake()
        ids = [lake.read(kind, columns=["event_id"])["event_id"].to_pylist() for kind in KINDS_WRITTEN]
        refused = (refused_events(self.ledgers, workload.producer_id) for workload in self.workloads)
        known = {event.event_id for events in refused for event in events}.union(*ids)
        return set(self.acknowledged()) - known

    def stop_sinks(self) -> None:
        """SIGTERM to all sinks: each ends in order."""
        running = [child for child in self.sinks.values() if child.is_alive]
        for child in running:
            os.kill(child.pid, signal.SIGTERM)
        for child in running:
            status = child.wait(60)
            # One that was only just started has nothing to end in order yet.
            if status != 0 and not (status == -signal.SIGTERM and not child.last_words()):
                raise StageError(f"{child.name} ended with {status} after SIGTERM:\n{child.last_words()}")

    def verdict(self) -> Verdict:
        """What the judge says."""
        return judge(self.lake(), self.ledgers, self.workloads, table_path=self.place.table)

    def until_read(self, patience_s: float = 60.0) -> None:
        """Return once the reader consumed as many events as the lake has, and end it."""
        assert self.reader is not None
        wanted, consumed = self.num_archived(), 0
        deadline = time.monotonic() + patience_s
        while (consumed := sum(len(entry["events"]) for entry in entries(self.journal))) < wanted:
            if self.reader.status is not None or time.monotonic() > deadline:
                raise StageError(f"the reader consumed {consumed} of {wanted} events\n{self._last_words()}")
            time.sleep(0.1)
        os.kill(self.reader.pid, signal.SIGTERM)
        if (status := self.reader.wait(30)) != 0:
            raise StageError(f"the reader ended with {status} after SIGTERM:\n{self.reader.last_words()}")

    def reading(self) -> Verdict:
        """What the judge says about the reader's journal."""
        return judge_journal(self.journal, self.ledgers, self.workloads)

    def acknowledged(self) -> list[str]:
        """Ids of all ledgers."""
        return [i for workload in self.workloads for i in acknowledged_ids(self.ledgers, workload.producer_id)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in (*self.writers.values(), *self.sinks.values(), *filter(None, [self.reader])):
            child.kill()
