"""The judge: the lake against the ledgers and against what the seeds say that was written.

Every acknowledged event once; nothing doubled; nothing that nobody wrote; tokens and log-probs to the bit; each lane
and each attempt in order. Then ``verify`` must be silent, and Delta Kernel must count the same rows and transactions.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tests.faults.ledger import RefusedEvent, acknowledged_ids, begun_calls, count_strangers, refused_events
from tests.faults.reader import entries
from tests.faults.workload import Workload, digests_of

from rolltape.schema import reasons
from rolltape.schema.kinds import kind_named
from rolltape.store.lake import Lake
from rolltape.store.location import Location
from rolltape.store.verify import verify

KINDS_WRITTEN: Final = ("rollout_started", "action_sampled", "rollout_ended")
_PLACE: Final = ["event_id", "trajectory_id", "attempt", "event_index", "producer_id", "producer_epoch", "lane_seq"]
_LOG: Final = ["log_topic", "log_partition", "log_offset"]
_SHOWN: Final = 3


@dataclass(slots=True)
class Verdict:
    """What became of the events of one row. All but ``num_events`` and ``num_acknowledged`` must be empty."""

    num_acknowledged: int = 0
    num_events: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.doubled or self.problems)

    def __str__(self) -> str:
        parts = [f"{self.num_acknowledged} acknowledged, {self.num_events} in the lake"]
        for name, ids in (("lost", self.lost), ("doubled", self.doubled)):
            parts += [f"{len(ids)} {name}: {ids[:_SHOWN]}"] if ids else []
        return "; ".join(parts + self.problems)


def judge(
    lake: Lake,
    folder: Path,
    workloads: Sequence[Workload],
    *,
    table_path: Path | None = None,
) -> Verdict:
    """Judge a lake that everything was settled in.

    Args:
        lake: the lake, at rest.
        folder: where the ledgers are.
        workloads: what the producers were to record.
        table_path: the lake as a local folder, for Delta Kernel.

    What a ledger names as refused (damaged on purpose) must not be there, and a dead letter must account for it; there
    are no other dead letters than those and one for each message of a stranger.
    """
    acknowledged = [event_id for workload in workloads for event_id in acknowledged_ids(folder, workload.producer_id)]
    refused = {
        place.event_id: place for workload in workloads for place in refused_events(folder, workload.producer_id)
    }
    num_strangers = sum(count_strangers(folder, workload.producer_id) for workload in workloads)
    verdict = Verdict(num_acknowledged=len(acknowledged))
    tables = {kind: lake.read(kind_named(kind).name) for kind in KINDS_WRITTEN}
    counts = pa.concat_tables([table.select(["event_id"]) for table in tables.values()])["event_id"].value_counts()
    found = dict(zip(counts.field(0).to_pylist(), counts.field(1).to_pylist(), strict=True))
    verdict.num_events = len(found)
    verdict.lost = sorted(set(acknowledged) - found.keys() - refused.keys())
    verdict.doubled = sorted(event_id for event_id, count in found.items() if count > 1)
    verdict.problems += _contents(tables, folder, workloads, refused.keys())
    verdict.problems += _order(tables.values(), may_miss=bool(refused))
    verdict.problems += _dead_letters(lake, refused.values(), num_strangers)
    report = verify(lake)
    broken = [finding.message for check in report.checks for finding in check.findings]
    verdict.problems += [f"verify: {message}" for message in broken[:_SHOWN]]
    if table_path is not None and os.environ.get("ROLLTAPE_DELTA_KERNEL_HOME"):
        verdict.problems += _delta_kernel(table_path)
    return verdict


def judge_journal(journal: Path, folder: Path, workloads: Sequence[Workload]) -> Verdict:
    """Judge what a reader consumed: every acknowledged event once and to the bit, each attempt in order."""
    acknowledged = [event_id for workload in workloads for event_id in acknowledged_ids(folder, workload.producer_id)]
    consumed = [(event_id, digest) for entry in entries(journal) for event_id, digest in entry["events"]]
    counts = Counter(event_id for event_id, _ in consumed)
    expected = _expected(folder, workloads)
    verdict = Verdict(num_acknowledged=len(acknowledged), num_events=len(counts))
    verdict.lost = sorted(set(acknowledged) - counts.keys())
    verdict.doubled = sorted(event_id for event_id, count in counts.items() if count > 1)
    changed = sorted(event_id for event_id, digest in consumed if expected.get(event_id) != digest)
    verdict.problems += [f"reader: {len(changed)} events were changed: {changed[:_SHOWN]}"] if changed else []
    wrong, last_call = [], dict[str, int]()
    for event_id, _ in consumed:
        producer_id, block, call, row = event_id.split("-")
        attempt = f"{producer_id}-{block}-{row}"
        if int(call) != last_call.get(attempt, -1) + 1:
            wrong.append(f"{event_id} after call {last_call.get(attempt)}")
        last_call[attempt] = int(call)
    verdict.problems += [f"reader: {len(wrong)} events out of order: {wrong[:_SHOWN]}"] if wrong else []
    return verdict


def _expected(folder: Path, workloads: Iterable[Workload]) -> dict[str, str]:
    expected: dict[str, str] = {}
    for workload in workloads:
        for block, call in begun_calls(folder, workload.producer_id):
            expected |= workload.digests(block, call)
    return expected


def _contents(
    tables: Mapping[str, pa.Table], folder: Path, workloads: Iterable[Workload], refused: AbstractSet[str]
) -> list[str]:
    expected = _expected(folder, workloads)
    found: dict[str, str] = {}
    for kind, table in tables.items():
        found |= digests_of(kind, table)
    strangers = sorted(found.keys() - expected.keys())
    spoilt = sorted(event_id for event_id in found.keys() & refused)
    changed = sorted(event_id for event_id in found.keys() & expected.keys() if found[event_id] != expected[event_id])
    named = (("were written by nobody", strangers), ("were damaged and are there", spoilt), ("were changed", changed))
    return [f"{len(ids)} events {what}: {ids[:_SHOWN]}" for what, ids in named if ids]


def _order(tables: Iterable[pa.Table], *, may_miss: bool) -> list[str]:
    """Offsets grow with the lane's numbers and with the attempt's event indexes, of which ``may_miss`` allows gaps."""
    rows = pa.concat_tables([table.select(_PLACE + _LOG) for table in tables])
    trajectory = np.asarray(pc.dictionary_encode(rows["trajectory_id"]).combine_chunks().indices)
    lane_names = pc.binary_join_element_wise(
        *(pc.cast(rows[name], pa.string()) for name in ("producer_id", "producer_epoch", "log_topic", "log_partition")),
        "/",
    )
    lane = np.asarray(pc.dictionary_encode(lane_names).combine_chunks().indices)
    columns = {name: rows[name].to_numpy() for name in ("event_index", "lane_seq", "log_offset", "attempt")}
    problems = []
    for what, owner, number in (("attempt", trajectory, "event_index"), ("lane", lane, "lane_seq")):
        # Rows of one offset lie in one record, whose rows are in the order of the lane.
        order = np.lexsort((columns["lane_seq"], columns["log_offset"], owner))
        same = owner[order][1:] == owner[order][:-1]
        steps = np.diff(columns[number][order])[same]
        wrong = np.flatnonzero(steps < 1 if may_miss or what == "lane" else steps != 1)
        if len(wrong):
            at = rows["event_id"][int(order[1:][same][wrong[0]])].as_py()
            problems.append(f"{len(wrong)} events out of the order of their {what}, the first {at}")
    return problems


def _dead_letters(lake: Lake, refused: Collection[RefusedEvent], num_strangers: int) -> list[str]:
    """Dead letters account for what was damaged and for what strangers sent, and there are none of anything else."""
    letters = [row["dead_letter"] | {"offset": row["log_offset"]} for row in lake.read("dead_letter").to_pylist()]
    covered: Counter[tuple[str, int, int]] = Counter()
    for letter in letters:
        if letter["first_lane_seq"] is not None:
            lane = (letter["source_producer_id"], letter["source_partition"])
            covered.update((*lane, seq) for seq in range(letter["first_lane_seq"], letter["last_lane_seq"] + 1))
    due = Counter((event.event_id.split("-")[0], event.partition, event.lane_seq) for event in refused)
    foreign = [letter for letter in letters if letter["reason"] == reasons.FOREIGN_MESSAGE]
    problems = []
    if covered != due:
        problems.append(f"dead letters account for {covered.total()} events, {due.total()} were damaged")
    if len(foreign) != num_strangers:
        problems.append(f"expected {num_strangers} dead letters of strangers' messages, got {len(foreign)}")
    if not due and not num_strangers and letters:
        named = [(letter["reason"], letter["detail"]) for letter in letters[:_SHOWN]]
        problems.append(f"expected no dead letters, got {len(letters)}: {named}")
    return problems


def _delta_kernel(path: Path) -> list[str]:
    from tests.lake_readers import by_delta_kernel, by_rolltape

    transactions = Lake.open(path, read_only=True).snapshot().transactions
    # A writer that is killed often has many lanes; Kernel is asked for each by name, and some stand for all.
    apps = sorted(app for app in transactions if not app.startswith("lane/"))
    apps += sorted(app for app in transactions if app.startswith("lane/"))[:16]
    place = Location.parse(path)
    ours, kernels = by_rolltape(place, apps), by_delta_kernel(place, apps)
    names = ("counts", "sum_of_ids", "sum_of_bits", "transactions")
    return [
        f"Delta Kernel: expected {name} {getattr(ours, name)}, got {getattr(kernels, name)}"
        for name in names
        if getattr(ours, name) != getattr(kernels, name)
    ]
