"""The harness itself, on the embedded log: it passes a sound lake, and sees each thing that could be wrong with one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.faults.judge import judge
from tests.faults.ledger import Ledger, begun_calls, standing
from tests.faults.stage import Child, Stage, local_place
from tests.faults.workload import EVENTS_PER_BLOCK, NUM_ROWS, LongAction, Workload
from tests.faults.writer import WriterJob, write

from rolltape.store.lake import Lake


class EmbeddedStage(Stage):
    """The same stage over the embedded log: the lake's path is the log's URL, its committer the sink."""

    def log_url(self, bootstrap: str | None = None) -> str:
        return self.place.url

    def create_topics(self) -> None:
        Lake.create(self.place.url)

    def sink_command(self, name: str, *arguments: str, crash: str = "") -> Child:
        return self.command(
            name, "rolltape.ingest.committer", self.place.url, *arguments, environment={"ROLLTAPE_CRASH": crash}
        )


def embedded_stage(folder: Path, seed: int = 7) -> EmbeddedStage:
    stage = EmbeddedStage(folder, seed=seed, bootstrap="", prefix="", num_producers=2, num_blocks=4)
    stage.spool = None  # the lake's own
    return stage


def test_kills_of_writer_and_committer_are_judged_sound(tmp_path: Path) -> None:
    with embedded_stage(tmp_path) as stage:
        stage.start()
        stage.strike(stage.writers["p0"].kill, share=0.3)
        stage.start_writer(stage.workloads[0])
        stage.strike(stage.sinks["sink-0"].kill, share=0.6)
        stage.start_sink("sink-0")
        stage.start_reader()
        stage.settle()
        stage.until_read()
        verdict = stage.verdict()
        assert verdict.ok, str(verdict)
        assert min(stage.strikes) > 0
        assert verdict.num_events >= verdict.num_acknowledged >= stage.num_planned - EVENTS_PER_BLOCK
        assert stage.reading().ok, str(stage.reading())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Workload]:
    """A lake that one writer wrote, and its ledger, at rest."""
    folder = tmp_path_factory.mktemp("sound")
    Lake.create(folder / "lake")
    workload = Workload(seed=5, producer_id="p0", num_blocks=1, pause_s=0.0)
    with embedded_stage(folder) as stage:
        stage.workloads = [workload]
        stage.start_sink("sink-0")
        stage.flow()
        write(WriterJob(log_url=str(folder / "lake"), folder=str(stage.ledgers), workload=workload))
        stage.settle()
    return folder, workload


def test_a_sound_lake_passes(sound: tuple[Path, Workload]) -> None:
    folder, workload = sound
    verdict = judge(Lake.open(folder / "lake"), folder / "ledgers", [workload], table_path=folder / "lake")
    assert verdict.ok, str(verdict)
    assert verdict.num_events == verdict.num_acknowledged == EVENTS_PER_BLOCK


def test_an_acknowledged_event_that_is_missing_is_lost(sound: tuple[Path, Workload], tmp_path: Path) -> None:
    folder, workload = sound
    ledger = Ledger(tmp_path, "p0")
    for block, call in begun_calls(folder / "ledgers", "p0"):
        ledger.begin(block, call)
    ledger.acknowledge(["p0-00001-000-000"])
    verdict = judge(Lake.open(folder / "lake"), tmp_path, [workload])
    assert verdict.lost == ["p0-00001-000-000"]


def test_other_tokens_are_seen_and_so_are_events_of_nobody(sound: tuple[Path, Workload]) -> None:
    folder, workload = sound
    verdict = judge(Lake.open(folder / "lake"), folder / "ledgers", [replace(workload, seed=6)])
    assert any("were changed" in problem for problem in verdict.problems), str(verdict)
    verdict = judge(Lake.open(folder / "lake"), folder / "ledgers", [])
    assert any("written by nobody" in problem for problem in verdict.problems), str(verdict)


@pytest.mark.parametrize("damage", ["again", "late", "behind"])
def test_doubled_and_disordered_events_are_seen(sound: tuple[Path, Workload], tmp_path: Path, damage: str) -> None:
    folder, workload = sound
    lake = Lake.open(folder / "lake", read_only=True)
    copy = Lake.create(tmp_path / "lake")
    for kind in ("rollout_started", "action_sampled", "rollout_ended"):
        table = lake.read(kind)
        if damage == "again" and kind == "action_sampled":
            table = pa.concat_tables([table, table.slice(3, 1)])
        if damage == "late" and kind == "rollout_started":
            # The attempts' first events stand behind all others.
            table = _with(table, "log_offset", [1000] * table.num_rows)
        if damage == "behind" and kind == "action_sampled":
            table = _with(table, "log_offset", [1000 - offset for offset in table["log_offset"].to_pylist()])
        copy.append({kind: table}, transactions=dict(lake.snapshot().transactions) if kind == "rollout_ended" else {})
    verdict = judge(copy, folder / "ledgers", [workload])
    if damage == "again":
        assert len(verdict.doubled) == 1
    else:
        assert any("out of the order" in problem for problem in verdict.problems), str(verdict)


def _with(table: pa.Table, name: str, values: list[int]) -> pa.Table:
    at = table.column_names.index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def test_the_content_of_a_call_is_a_function_of_the_seed() -> None:
    one, two = Workload(seed=1, producer_id="p0", num_blocks=1), Workload(seed=2, producer_id="p0", num_blocks=1)
    assert one.digests(0, 3) == replace(one, pause_s=1.0).digests(0, 3) != two.digests(0, 3)
    again = Workload.from_json(replace(one, long_actions=(LongAction(0, 2, 5000),)).to_json())
    assert lengths_of(again, 2)[0] == 5000
    assert lengths_of(again, 3) == lengths_of(one, 3)


def lengths_of(workload: Workload, call: int) -> list[int]:
    lengths: list[int] = np.diff(workload.content(0, call).ends).tolist()
    return lengths


def test_what_was_handed_over_leaves_the_present_call_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "p0")
    assert standing(tmp_path, ["p0", "p1"]) == (0, 0)
    ledger.begin(0, 0)
    assert standing(tmp_path, ["p0", "p1"]) == (0, 0)
    ledger.begin(0, 1)
    ledger.acknowledge(Workload(seed=1, producer_id="p0", num_blocks=1).event_ids(0, 0)[:5])
    assert standing(tmp_path, ["p0", "p1"]) == (NUM_ROWS, 5)
    with (tmp_path / "p0.acknowledged").open("ab") as file:
        file.write(b"half a li")
    assert Ledger(tmp_path, "p0").next_block() == 1
    assert (tmp_path / "p0.acknowledged").stat().st_size == 5 * 17


def test_a_strike_waits_for_something_on_its_way(tmp_path: Path) -> None:
    with embedded_stage(tmp_path) as stage:
        stage.create_topics()
        stage.start_writers()
        struck: list[int] = []
        stage.strike(lambda: struck.append(os.getpid()), share=0.0)
        assert struck
        assert stage.strikes[0] > 0
        for child in stage.writers.values():
            os.kill(child.pid, signal.SIGKILL)


def test_a_place_of_a_lake_is_its_folder(tmp_path: Path) -> None:
    assert local_place(tmp_path).table == tmp_path / "lake"
