"""Trainer batches into packed tensors: ``python benchmarks/bench_assembly.py``.

1,024 trajectories of 4,000 tokens in 64 groups, from the lake (every file opened anew) and from the recent window:
read, folded (prefix proofs and integrity included), filtered, grouped and packed. ``times_memcpy`` is against one
copy of the batch's bytes in the same run; memory is the growth of the process's resident anonymous pages, sampled
while a batch is assembled, over the batch's bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from bench_fold import make_tape

from rolltape.store import Lake, Location, Window, parquet
from rolltape.store.maintenance import compact
from rolltape.trainers.assembly import VersionRules
from rolltape.trainers.recorded import read_events
from rolltape.trainers.replayed import Assembled, assemble

NUM_TRAJECTORIES = 1_024
GROUP_SIZE = 16
ROWS_PER_COMMIT = 64
RULES = VersionRules(current=3, newest=3)


def fill(lake: Lake) -> list[list[str]]:
    """Commit the trajectories as workers would, 64 at a time; returns the groups' ids."""
    tape = make_tape(NUM_TRAJECTORIES, 200, 3_800, 1, 0)
    ids = tape["rollout_started"]["trajectory_id"].to_pylist()
    group_of = pa.array([f"g{row // GROUP_SIZE}" for row in range(NUM_TRAJECTORIES)])
    offset = 0
    for first in range(0, NUM_TRAJECTORIES, ROWS_PER_COMMIT):
        tables = {}
        for kind, table in tape.items():
            part = table.slice(first, ROWS_PER_COMMIT)
            for name, values in (
                ("group_id", group_of.slice(first, ROWS_PER_COMMIT)),
                ("log_offset", pa.array([offset] * ROWS_PER_COMMIT, pa.int64())),
            ):
                part = part.set_column(part.column_names.index(name), part.schema.field(name), values)
            tables[kind] = part
            offset += 1
        lake.append(tables, {"log/rollout/0": offset - 1})
    return [ids[row : row + GROUP_SIZE] for row in range(0, NUM_TRAJECTORIES, GROUP_SIZE)]


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process: mapped files do not count."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


class Peak:
    """Largest anonymous memory while the block runs, over what it was before."""

    def __enter__(self) -> Self:
        pa.default_memory_pool().release_unused()
        self._before = anonymous_bytes()
        self.num_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.num_bytes = max(self.num_bytes, anonymous_bytes() - self._before)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(source: str, folder: pathlib.Path, groups: Sequence[Sequence[str]]) -> None:
    """Measure one source, in a process that did nothing else, and print a line."""
    lake = Lake.open(folder / "lake")
    window = Window(lake, folder=Location.parse(folder / "window"))

    def cold(ids: Sequence[str]) -> Mapping[str, pa.Table]:
        at = lake.snapshot()
        return read_events(lambda kind, names: lake.read(kind, columns=names, trajectory_ids=ids, snapshot=at))

    def recent(ids: Sequence[str]) -> Mapping[str, pa.Table]:
        return read_events(lambda kind, names: window.read(kind, columns=names, trajectory_ids=ids))

    if source == "recent window":
        window.refresh()

    def act(chosen: Sequence[Sequence[str]] = groups) -> Assembled:
        if source == "recent window":
            return assemble(recent, chosen, RULES, trajectories_per_part=None)
        parquet.forget_footers()
        return assemble(cold, chosen, RULES)

    act(groups[:2])  # imports, threads and code that a process has once
    with Peak() as peak:
        batch = act()
    assert len(batch.plan.members) == NUM_TRAJECTORIES, batch.plan.dropped_by_reason
    num_tokens, num_bytes = batch.packed.num_tokens, batch.packed.num_bytes
    copy_s = memcpy_s(num_bytes)
    del batch
    wall, processor = [], []
    for _ in range(7):
        began, began_cpu = time.perf_counter(), time.process_time()
        act()
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_cpu)
    figures = {
        "mtok_per_s": num_tokens / min(wall) / 1e6,
        "mtok_per_cpu_s": num_tokens / min(processor) / 1e6,
        "times_memcpy": min(wall) / copy_s,
        "memory_over_batch": peak.num_bytes / num_bytes,
    }
    print(
        json.dumps({"case": "assembly", "source": source, **{k: round(v, 3) for k, v in figures.items()}}), flush=True
    )


def memcpy_s(num_bytes: int) -> float:
    """Seconds to copy as many bytes into fresh memory, best of five."""
    source = np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        source.copy()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Run every source, each in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        groups = fill(Lake.create(folder / "lake"))
        Window(Lake.open(folder / "lake"), folder=Location.parse(folder / "window")).refresh()
        for source in ("recent window", "lake, cold, a file each commit", "lake, cold, compacted"):
            if source.endswith("compacted"):
                compact(Lake.open(folder / "lake"))
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(source, folder, groups))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
