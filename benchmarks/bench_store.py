"""What the lake costs: ``python benchmarks/bench_store.py [commit] [versions] [control] [read]`` (all by default).

* ``commit``: 2,048 rollouts from memory into one durable commit, against ``torch.save`` (synced too) and JSON lines in
  gzip of the same content. Token ids are words of real text (GSM8K solutions), log-probs are drawn from those of a real
  engine (NeMo Gym), with a jitter of 1 % so that no bit pattern repeats.
* ``versions``: the time of one commit around version 100 and around version 1,000, with maintenance running, measured
  by turns on two lakes.
* ``control``: a data file of four control events: its bytes, and what it adds to a commit.
* ``read``: tokens a second out of the lake (every file opened anew) and out of the recent window.

Prints one JSON line a case. Ratios are of one run on one machine, of the best of some rounds each, because other
programs disturb absolute times.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from rolltape.schema.build import build_batch
from rolltape.schema.columns import list_of
from rolltape.schema.identity import uuid7_many
from rolltape.store import Lake, Location, Window, parquet
from rolltape.store.maintenance import maintain

DATA = pathlib.Path(__file__).parent.parent / "tests" / "data"
NUM_ROLLOUTS = 2_048
GROUP_SIZE = 16
MEAN_TOKENS = 2_000


class Rollouts(NamedTuple):
    """Flat tokens and the row ends of 2,048 rollouts."""

    ends: np.ndarray
    token_ids: np.ndarray
    log_probs: np.ndarray
    prompt_ends: np.ndarray
    prompt_ids: np.ndarray
    rewards: np.ndarray
    trajectory_ids: list[str]
    group_ids: list[str]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return int(self.ends[-1] + self.prompt_ends[-1])


def report(case: str, **figures: Any) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"case": case, **rounded}), flush=True)


# Input


def words_as_ids() -> np.ndarray:
    """Real text as ids: one for each word, digit and sign, numbered at random below 50,000."""
    lines = (DATA / "gsm8k" / "gsm8k_model_solutions.jsonl").read_text().splitlines()
    texts = [text for line in lines for text in _texts(json.loads(line))]
    words = [word for text in texts for word in re.findall(r" ?[A-Za-z]+| ?\d|[^\sA-Za-z\d]|\s", text)]
    numbers = np.random.default_rng(0).permutation(50_000).astype(np.int32)
    place = {word: numbers[i] for i, word in enumerate(Counter(words))}
    return np.array([place[word] for word in words], np.int32)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in _texts(child)]


def real_log_probs() -> np.ndarray:
    """Every log-prob of the recorded rollouts, float32."""
    found: list[float] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for name, child in value.items():
                if "log_prob" in name and isinstance(child, list) and child and isinstance(child[0], float):
                    found.extend(child)
                else:
                    walk(child)
        elif isinstance(value, list):
            for child in value:
                walk(child)

    for line in (DATA / "nemogym" / "cc_rollouts_with_logprobs.jsonl").read_text().splitlines():
        walk(json.loads(line))
    return np.array(found, np.float32)


def make_rollouts(num_rollouts: int = NUM_ROLLOUTS, mean_tokens: int = MEAN_TOKENS) -> Rollouts:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean_tokens) - 0.18, 0.6, num_rollouts), 8, 8_000).astype(np.int32)
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    prompt_ends = np.arange(num_rollouts + 1, dtype=np.int32) * 100
    groups = uuid7_many(-(-num_rollouts // GROUP_SIZE))
    words, drawn = words_as_ids(), rng.choice(real_log_probs(), int(ends[-1]))
    log_probs = drawn * (1 + 0.01 * rng.random(len(drawn), np.float32))
    return Rollouts(
        ends=ends,
        token_ids=np.resize(words, int(ends[-1])),
        log_probs=log_probs.astype(np.float32),
        prompt_ends=prompt_ends,
        prompt_ids=np.resize(words[::-1], int(prompt_ends[-1])),
        rewards=rng.random(num_rollouts),
        trajectory_ids=sorted(uuid7_many(num_rollouts)),
        group_ids=[groups[i // GROUP_SIZE] for i in range(num_rollouts)],
    )


def lists(ends: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values), type=list_of(pa.from_numpy_dtype(values.dtype)))


def events_of(rollouts: Rollouts, first_offset: int = 0) -> dict[str, pa.Table]:
    """The four events of each rollout, as a committer hands them to the lake."""
    num_rows = len(rollouts.trajectory_ids)
    own: dict[str, dict[str, Any]] = {
        "rollout_started": {
            "event_index": 0,
            "environment": "words",
            "prompt_token_ids": lists(rollouts.prompt_ends, rollouts.prompt_ids),
        },
        "action_sampled": {
            "event_index": 1,
            "turn_index": 0,
            "action_kind": "execution",
            "token_ids": lists(rollouts.ends, rollouts.token_ids),
            "rollout_log_probs": lists(rollouts.ends, rollouts.log_probs),
            "sampling": {"temperature": 1.0, "top_p": 1.0, "logprobs_mode": "processed_logprobs"},
            "prefix_source": "engine",
        },
        "rollout_ended": {"event_index": 2, "status": "completed", "last_event_index": 2},
        "reward_assigned": {"state": "earned", "scalar": rollouts.rewards, "scalariser_version": "1"},
    }
    return {
        kind: stamped(
            kind,
            num_rows,
            first_offset,
            trajectory_id=rollouts.trajectory_ids,
            attempt=0,
            group_id=rollouts.group_ids,
            **columns,
        )
        for kind, columns in own.items()
    }


def stamped(kind: str, num_rows: int, first_offset: int, topic: str = "rollout", **columns: Any) -> pa.Table:
    stamps = {
        "event_id": uuid7_many(num_rows),
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": "worker-0",
        "producer_epoch": 1,
        "lane_seq": np.arange(num_rows) + first_offset,
        "log_topic": topic,
        "log_partition": 0,
        "log_offset": first_offset + np.arange(num_rows) // 64,
        "recorded_at": datetime(2026, 11, 30, tzinfo=UTC),
    }
    built = build_batch(kind, {**stamps, **columns}, num_rows)
    assert not built.refused, built.refused[0]
    return pa.Table.from_batches([built.batch])


# Commit against dumps


def dump_rows(rollouts: Rollouts) -> list[dict[str, Any]]:
    """The same content as a trainer dumps it: one dict of tensors and plain values a rollout."""
    rows = []
    for i, name in enumerate(rollouts.trajectory_ids):
        part = slice(rollouts.ends[i], rollouts.ends[i + 1])
        prompt = slice(rollouts.prompt_ends[i], rollouts.prompt_ends[i + 1])
        ids = torch.from_numpy(rollouts.token_ids[part].copy())
        rows.append(
            {
                "trajectory_id": name,
                "group_id": rollouts.group_ids[i],
                "run_id": "run",
                "attempt": 0,
                "prompt_token_ids": torch.from_numpy(rollouts.prompt_ids[prompt].copy()),
                "token_ids": ids,
                "rollout_log_probs": torch.from_numpy(rollouts.log_probs[part].copy()),
                "response_mask": torch.ones(len(ids), dtype=torch.bool),
                "temperature": 1.0,
                "status": "completed",
                "reward": float(rollouts.rewards[i]),
            }
        )
    return rows


def save_dump(rows: list[dict[str, Any]], path: pathlib.Path) -> int:
    torch.save(rows, path)
    sync(path)
    return path.stat().st_size


def save_json(rows: list[dict[str, Any]], path: pathlib.Path) -> int:
    with gzip.open(path, "wt") as file:
        for row in rows:
            plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}
            file.write(json.dumps(plain) + "\n")
    sync(path)
    return path.stat().st_size


def sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def bench_commit(folder: pathlib.Path) -> None:
    rollouts = make_rollouts()
    tables, rows = events_of(rollouts), dump_rows(rollouts)
    lake = Lake.create(folder / "commit")
    marks = iter(range(1_000_000))
    sizes: list[int] = []

    def commit() -> None:
        sizes.append(lake.append(tables, {"log/rollout/0": next(marks)}).num_bytes)

    # By turns, so that whatever else the machine does disturbs both.
    rounds = [(timed(commit)[2], timed(save_dump, rows, folder / "dump.pt")[2]) for _ in range(7)]
    lake_s, torch_s = np.min(rounds, axis=0).tolist()
    part = rows[: len(rows) // 16]
    part_tokens = int(rollouts.ends[len(part)] + rollouts.prompt_ends[len(part)])
    json_s = timed(save_json, part, folder / "dump.jsonl.gz")[2] * rollouts.num_tokens / part_tokens
    torch_bytes = (folder / "dump.pt").stat().st_size
    json_bytes = (folder / "dump.jsonl.gz").stat().st_size / part_tokens
    report(
        "commit",
        num_tokens=rollouts.num_tokens,
        mtok_per_cpu_s=rollouts.num_tokens / lake_s / 1e6,
        torch_save_mtok_per_cpu_s=rollouts.num_tokens / torch_s / 1e6,
        ratio_to_torch_save=torch_s / lake_s,
        ratio_to_jsonl_gz=json_s / lake_s,
        bytes_per_token=sizes[-1] / rollouts.num_tokens,
        torch_save_bytes_per_token=torch_bytes / rollouts.num_tokens,
        jsonl_gz_bytes_per_token=json_bytes,
        bytes_ratio_to_torch_save=sizes[-1] / torch_bytes,
    )


# Commits of a long run


class LongRun:
    """A lake that grows commit by commit, four files each, with the committer's maintenance between commits."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.lake = Lake.create(folder)
        self.base = events_of(make_rollouts(GROUP_SIZE, 60))
        self.num_commits = 0
        self.upkeep_s: list[float] = []
        self._since = 0

    def commit(self) -> tuple[float, float]:
        """One commit, then what maintenance is due; wall and CPU seconds of the commit alone."""
        tables = {kind: at_offset(table, self.num_commits) for kind, table in self.base.items()}
        marks = {"log/rollout/0": self.num_commits, "lane/worker-0/1/rollout/0": self.num_commits}
        _, wall_s, cpu_s = timed(self.lake.append, tables, marks)
        self.num_commits += 1
        self._since += 1
        began = time.perf_counter()
        if maintain(self.lake, self._since) is not None:
            self._since = 0
        self.upkeep_s.append(time.perf_counter() - began)
        return wall_s, cpu_s


def bench_versions(folder: pathlib.Path) -> None:
    """Two lakes side by side, so that whatever else the machine does slows both: versions 50–150 and 950–1,050."""
    old, young = LongRun(folder / "old"), LongRun(folder / "young")
    while old.num_commits < 950:
        old.commit()
    while young.num_commits < 50:
        young.commit()
    late, early = zip(*[(old.commit(), young.commit()) for _ in range(100)], strict=True)
    (late_s, late_cpu), (early_s, early_cpu) = (np.median(np.array(spent), axis=0).tolist() for spent in (late, early))
    report(
        "versions",
        files_per_commit=len(old.base),
        commit_ms_at_100=early_s * 1e3,
        commit_ms_at_1000=late_s * 1e3,
        ratio=late_s / early_s,
        cpu_ms_at_1000=late_cpu * 1e3,
        cpu_ratio=late_cpu / early_cpu,
        maintenance_ms_per_commit=sum(old.upkeep_s) / len(old.upkeep_s) * 1e3,
        longest_maintenance_ms=max(old.upkeep_s) * 1e3,
        files_at_end=len(old.lake.snapshot().files),
        log_files_at_end=len(old.lake.log.folder.list()),
    )


def at_offset(table: pa.Table, offset: int) -> pa.Table:
    place = table.column_names.index("log_offset")
    return table.set_column(place, table.schema.field(place), pa.array(np.full(table.num_rows, offset)))


# Control events


def bench_control(folder: pathlib.Path) -> None:
    lake = Lake.create(folder / "control")
    base = events_of(make_rollouts(GROUP_SIZE, 60))
    control = {
        "weights_staged": stamped(
            "weights_staged", 4, 0, "weights", policy_id="actor", version=3, engine_id=[f"engine-{i}" for i in range(4)]
        ),
        "engine_joined": stamped(
            "engine_joined", 4, 0, "control", engine_id=[f"engine-{i}" for i in range(4)], incarnation="1"
        ),
        "alarm_raised": stamped("alarm_raised", 4, 0, "control", alarm="entropy_collapse"),
    }
    for kind, table in control.items():
        without, beside, file_bytes = [], [], 0
        for offset in range(60):
            tables = {name: at_offset(rows, offset) for name, rows in base.items()}
            _, *spent = timed(lake.append, tables, {f"log/{kind}/0": 2 * offset})
            without.append(spent)
            tables[kind] = at_offset(table, offset)
            commit, *spent = timed(lake.append, tables, {f"log/{kind}/0": 2 * offset + 1})
            beside.append(spent)
            file_bytes = max([file_bytes, *(file.size_bytes for file in commit.files if file.kind == kind)])
        plain, with_control = np.array(without), np.array(beside)
        beyond_s, beyond_cpu_s = np.median(with_control - plain, axis=0).tolist()
        report(
            "control",
            kind=kind,
            num_events=4,
            file_bytes=file_bytes,
            commit_ms=float(np.median(plain[:, 0])) * 1e3,
            beyond_the_commit_ms=beyond_s * 1e3,
            beyond_the_commit_cpu_ms=beyond_cpu_s * 1e3,
        )


def timed(act: Callable[..., Any], *args: Any) -> tuple[Any, float, float]:
    """What a call returns, and its wall and CPU seconds."""
    began, began_cpu = time.perf_counter(), time.process_time()
    answer = act(*args)
    return answer, time.perf_counter() - began, time.process_time() - began_cpu


# Reading


def bench_read(folder: pathlib.Path) -> None:
    rollouts = make_rollouts(1_024, 4_000)
    lake = Lake.create(folder / "read")
    for offset, (kind, table) in enumerate(events_of(rollouts).items()):
        lake.append({kind: table}, {f"log/rollout-{kind}/0": offset})
    lake.append({}, {"log/rollout/0": 1_000})
    wanted = rollouts.trajectory_ids
    tokens = int(rollouts.ends[-1])

    def cold() -> None:
        parquet.forget_footers()
        table = Lake.open(lake.location).read("action_sampled", trajectory_ids=wanted)
        assert table.num_rows == len(wanted)

    window = Window(lake, folder=Location.parse(folder / "window"))
    window.refresh()

    def recent() -> None:
        table = window.read("action_sampled", trajectory_ids=wanted)
        assert table.num_rows == len(wanted)

    def opened() -> None:
        again = Window(lake, folder=Location.parse(folder / "window"))
        again.refresh()
        assert again.read("action_sampled", trajectory_ids=wanted).num_rows == len(wanted)

    for name, act in (("lake, opened anew", cold), ("window", recent), ("window, mapped anew", opened)):
        wall_s, spent_s = np.min([timed(act)[1:] for _ in range(9)], axis=0).tolist()
        report("read", source=name, mtok_per_s=tokens / wall_s / 1e6, mtok_per_cpu_s=tokens / spent_s / 1e6)


BENCHES = {"commit": bench_commit, "versions": bench_versions, "control": bench_control, "read": bench_read}


def main(names: list[str]) -> None:
    """Run the benches named."""
    for name in names or list(BENCHES):
        with tempfile.TemporaryDirectory() as folder:
            BENCHES[name](pathlib.Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
