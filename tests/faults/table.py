"""The table of faults: one row each, and how a row is played and judged."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.faults.brokers import kill_leader, kill_two, pause_leader
from tests.faults.chaos import anything
from tests.faults.delivery import corrupt, disordered, huge_action, long_action
from tests.faults.identity import clock_off, same_id_again, topic_cut, topic_recreated
from tests.faults.network import cut, swallow_answers
from tests.faults.processes import (
    kill_producer,
    kill_sink_after_commit,
    kill_sink_before_commit,
    kill_trainer,
    rebalance_storm,
)
from tests.faults.servers import Servers
from tests.faults.stage import MIN_EVENTS, Place, Stage, local_place
from tests.faults.storage import (
    bucket,
    bucket_behind_faulty_http,
    bucket_behind_toxiproxy,
    fill_disk,
    kill_s3,
    refuse_s3,
    slow_s3,
    small_disk,
)

Play = Callable[[Stage, Servers], None]


@contextmanager
def _local(folder: Path, servers: Servers) -> Iterator[Place]:
    yield local_place(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault.

    Attributes:
        name: short name, also of its topics.
        fault: as the table says it.
        play: starts the pipeline, strikes, mends, settles.
        place: where the lake is kept.
        needs: servers beside the three brokers.
        soak_only: not a row of the table, played by the soak beside them.
    """

    name: str
    fault: str
    play: Play
    place: Callable[[Path, Servers], AbstractContextManager[Place]] = _local
    needs: frozenset[str] = frozenset()
    soak_only: bool = False


ROWS: Final = (
    Row(name="kill_producer", fault="kill -9 of producers", play=kill_producer),
    Row(
        name="sink_between_parquet_and_commit",
        fault="kill -9 of the sink between parquet and commit",
        play=kill_sink_before_commit,
    ),
    Row(
        name="sink_after_commit",
        fault="kill -9 of the sink after commit, before the answer",
        play=kill_sink_after_commit,
    ),
    Row(name="kill_trainer", fault="kill -9 of the trainer", play=kill_trainer),
    Row(name="kill_leader", fault="kill -9 of the leader broker", play=kill_leader),
    Row(name="kill_two_brokers", fault="two of three brokers killed, then back", play=kill_two),
    Row(name="broker_paused", fault="leader paused for 60 s", play=pause_leader),
    Row(name="disk_full", fault="disk full at the sink", play=fill_disk, place=small_disk),
    Row(
        name="network_cut",
        fault="network cut between producers and brokers",
        play=cut,
        needs=frozenset({"toxiproxy"}),
    ),
    Row(
        name="answers_swallowed",
        fault="answers of the brokers swallowed",
        play=swallow_answers,
        needs=frozenset({"toxiproxy"}),
    ),
    Row(
        name="s3_killed",
        fault="S3 server killed -9 again and again",
        play=kill_s3,
        place=bucket,
        needs=frozenset({"s3"}),
    ),
    Row(
        name="s3_slow",
        fault="S3 server slow",
        play=slow_s3,
        place=bucket_behind_toxiproxy,
        needs=frozenset({"s3", "toxiproxy"}),
    ),
    Row(
        name="s3_503",
        fault="S3 server answers 503, or its answers are lost",
        play=refuse_s3,
        place=bucket_behind_faulty_http,
        needs=frozenset({"s3"}),
    ),
    Row(name="rebalance_storm", fault="sinks join and leave every 2 s", play=rebalance_storm),
    Row(name="disordered", fault="duplicate and reordered delivery", play=disordered),
    Row(name="corrupt_record", fault="corrupt records in the middle", play=corrupt),
    Row(name="long_action", fault="actions of 300,000 tokens, 2.4 MB", play=long_action),
    Row(name="huge_action", fault="an action of 40 MB", play=huge_action),
    Row(name="clock_off", fault="clocks 10 minutes off", play=clock_off),
    Row(name="same_id_again", fault="producer restarted with the same id", play=same_id_again),
    Row(name="topic_recreated", fault="topic recreated", play=topic_recreated),
    Row(name="topic_cut", fault="topic cut on the brokers' disks, and filled again", play=topic_cut),
    Row(
        name="anything",
        fault="anything killed, in any order",
        play=anything,
        soak_only=True,
    ),
)


@dataclass(slots=True, kw_only=True)
class Result:
    """What a row came to. ``unacknowledged`` is the smallest count of its strikes."""

    row: str
    seed: int
    events: int = 0
    acknowledged: int = 0
    strikes: int = 0
    unacknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the fault struck something and nothing came of it."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As one line of the printed table."""
        return asdict(self)


_COLUMNS: Final = ("row", "seed", "events", "acknowledged", "strikes", "unacknowledged", "lost", "doubled", "seconds")


def lines(results: Iterable[Result]) -> list[str]:
    """A table of results, a line a row."""
    rows = [[str(getattr(result, name)) for name in _COLUMNS] + ["" if result.ok else "FAILED"] for result in results]
    head = [*_COLUMNS, ""]
    widths = [max(len(line[at]) for line in [head, *rows]) for at in range(len(head))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *rows]
    ]


def play_row(row: Row, servers: Servers, folder: Path, seed: int) -> Result:
    """Play a row and judge it.

    Raises:
        StageError: it could not be played to its end.
    """
    result = Result(row=row.name, seed=seed)
    started = time.monotonic()
    with row.place(folder, servers) as place:
        prefix = f"{row.name}-{uuid.uuid4().hex[:8]}"
        with Stage(folder, seed=seed, bootstrap=servers.cluster.bootstrap, prefix=prefix, place=place) as stage:
            row.play(stage, servers)
            verdict = stage.verdict()
    result.seconds = round(time.monotonic() - started, 1)
    result.events, result.acknowledged = verdict.num_events, verdict.num_acknowledged
    result.lost, result.doubled = len(verdict.lost), len(verdict.doubled)
    result.strikes, result.unacknowledged = len(stage.strikes), min(stage.strikes, default=0)
    if not verdict.ok:
        result.problems.append(str(verdict))
    if result.unacknowledged == 0:
        result.problems.append(f"the fault struck while nothing was unacknowledged: {stage.strikes}")
    if result.acknowledged < MIN_EVENTS:
        result.problems.append(f"expected at least {MIN_EVENTS} acknowledged events, got {result.acknowledged}")
    result.problems += stage.problems
    return result
