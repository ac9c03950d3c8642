"""Killing a live run again and again: 20 rounds of 30 steps, each judged against an undisturbed run.

Run as a program it prints one JSON line a round: ``python tests/integration/crash_rounds.py --rounds 20 --seed 1``.
Every named crash window is planned into several rounds; random SIGKILLs come on top.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.recipes.config import RunConfig
from rolltape.recipes.forked import ForkServer
from rolltape.recipes.runs import Progress, StepSeen, log_folder, open_or_create, start_run
from rolltape.recipes.sort_digits import config as sort_digits
from rolltape.recipes.supervisor import Child, Supervisor, children_of
from rolltape.store.lake import Lake
from rolltape.store.verify import verify
from rolltape.trainers.history import RunHistory

NUM_STEPS: Final = 30
WINDOWS: Final = {
    "data_file_written": "committer",
    "after_commit": "committer",
    "after_checkpoint": "trainer",
    "after_step_event": "trainer",
    "after_committed": "trainer",
    "after_staged": "worker-0",
}


def small_config() -> RunConfig:
    """A run that a round can afford: 2 workers, 4 x 4 rollouts a step, a checkpoint each 7 steps."""
    base = sort_digits(run_id="crash", seed=7, max_steps=NUM_STEPS)
    return replace(
        base,
        rollout=replace(base.rollout, num_workers=2, groups_per_step=4, group_size=4, evaluate_heldout=False),
        trainer=replace(base.trainer, stop_metric="", checkpoint_every=7, engine_timeout_s=60.0, probe_every=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to one round: crash windows (name → which passage), SIGKILLs in random steps."""

    windows: Mapping[str, int]
    kills: Sequence[tuple[int, float, str]]  # after this step, so many seconds later, this process


@dataclass(slots=True, kw_only=True)
class RoundResult:
    """What a round found; ``problems`` is empty when everything held."""

    number: int
    seconds: float = 0.0
    windows_hit: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    restarts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def plan_round(number: int, rng: random.Random) -> Plan:
    """Two crash windows in turn (so that each is hit in several rounds of six) and two random kills."""
    names = list(WINDOWS)
    chosen = {names[number % len(names)], names[(number * 2 + 1) % len(names)]}
    passages = {
        name: rng.randint(1, 3) if name == "after_checkpoint" else rng.randint(2, 12) for name in sorted(chosen)
    }
    victims = ["committer", "trainer", "worker-0", "worker-1"]
    kills = [(rng.randint(1, NUM_STEPS - 5), rng.uniform(0.0, 0.4), rng.choice(victims)) for _ in range(2)]
    return Plan(windows=passages, kills=sorted(kills))


def bits_of(lake: Lake, run_id: str) -> dict[int, tuple[Any, ...]]:
    """What must be equal between two runs of one configuration, by step."""
    return {
        number: (
            row["batch_digest"],
            row["loss_bits"],
            row["gradient_digest"],
            row["weights_digest"],
            row["version_out"],
        )
        for number, row in RunHistory.read(lake, run_id).steps.items()
    }


def run_round(folder: Path, plan: Plan, number: int, server: ForkServer | None) -> tuple[Lake, RoundResult]:
    """One run with its disturbances; returns when the run has ended."""
    config = small_config()
    result = RoundResult(number=number)
    started = time.monotonic()
    lake = open_or_create(str(folder / "lake"))
    services, workers = children_of(
        lake.location.url, config.run_id, config.rollout.num_workers, log_folder(lake), server=server
    )
    children = {child.name: child for child in (*services, *workers)}
    marks = _plant(plan, children, folder)
    supervisor = Supervisor(services, workers, max_restarts=20)
    killer = Killer(plan, children, result)
    try:
        for child in services:
            child.start()
        with EmbeddedLog(lake, committer="external") as log:
            start_run(lake, config, log)
            progress = Progress(log, config.run_id, killer.saw)

            def tick() -> None:
                progress.poll()
                killer.strike()

            supervisor.run(on_tick=tick, tick_s=0.02)
    finally:
        supervisor.stop()
    result.seconds = round(time.monotonic() - started, 1)
    result.windows_hit = [name for name, mark in marks.items() if mark.exists()]
    result.restarts = dict(supervisor.restarts)
    return Lake.open(lake.location, read_only=True), result


def _plant(plan: Plan, children: Mapping[str, Child], folder: Path) -> dict[str, Path]:
    marks = {name: folder / f"mark-{name}" for name in plan.windows}
    for victim in children:
        entries = [f"{name}:{count}:{marks[name]}" for name, count in plan.windows.items() if WINDOWS[name] == victim]
        if entries:
            children[victim].environment = {"ROLLTAPE_CRASH": ",".join(entries)}
    return marks


class Killer:
    """Sends the planned SIGKILLs."""

    def __init__(self, plan: Plan, children: Mapping[str, Child], result: RoundResult) -> None:
        self._waiting = list(plan.kills)
        self._due: list[tuple[float, str]] = []
        self._children = children
        self._result = result

    def saw(self, seen: StepSeen) -> None:
        """Note a completed step."""
        due = [kill for kill in self._waiting if kill[0] <= seen.step]
        self._waiting = [kill for kill in self._waiting if kill[0] > seen.step]
        self._due += [(time.monotonic() + delay, victim) for _, delay, victim in due]

    def strike(self) -> None:
        """Kill what is due. A victim that is just starting again is left alone."""
        now = time.monotonic()
        for _, victim in [kill for kill in self._due if kill[0] <= now]:
            process = self._children[victim].process
            if process is not None and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                self._result.kills[victim] += 1
        self._due = [kill for kill in self._due if kill[0] > now]


def judge(lake: Lake, result: RoundResult, undisturbed: Mapping[int, tuple[Any, ...]]) -> None:
    """Fill ``result.problems``: bits, doubled events, doubled training, conservation."""
    bits = bits_of(lake, "crash")
    for step in sorted(set(bits) | set(undisturbed)):
        if bits.get(step) != undisturbed.get(step):
            result.problems.append(f"step {step}: {bits.get(step)} instead of {undisturbed.get(step)}")
    for what, query in (
        (
            "event ids that occur twice",
            "select count(*) from (select event_id from events group by 1 having count(*) > 1)",
        ),
        ("conservation out of balance", "select coalesce(sum(abs(balance)), 0) from conservation"),
        ("dead letters", "select count(*) from dead_letter"),
    ):
        count = lake.sql(query).arrow().column(0)[0].as_py()
        if count:
            result.problems.append(f"{what}: {count}")
    report = verify(lake)
    if not report.ok:
        result.problems.append(f"verify: {[row for row in report.to_rows() if row['num_broken']][:3]}")
    trained = _trained(lake)
    doubled = [key for key, count in trained.items() if count > 1]
    if doubled:
        result.problems.append(f"rollouts trained twice: {doubled[:3]} …")
    if len(trained) != NUM_STEPS * 16:
        result.problems.append(f"rollouts trained: {len(trained)} instead of {NUM_STEPS * 16}")


def _trained(lake: Lake) -> Counter[str]:
    """How often each rollout is a member of a batch that a live step names."""
    named = {row["batch_id"] for row in RunHistory.read(lake, "crash").steps.values()}
    counts: Counter[str] = Counter()
    for row in lake.read("batch_formed", run_id="crash")["batch_formed"].to_pylist():
        if row["batch_id"] in named:
            counts.update(member["trajectory_id"] for member in row["members"] if not member["is_padding"])
    return counts


def rounds(count: int, seed: int, folder: Path) -> tuple[list[RoundResult], Counter[str]]:
    """An undisturbed run, then ``count`` disturbed ones; results and how often each window was hit.

    The processes of the undisturbed run are started one by one, those of the others forked.
    """
    rng = random.Random(seed)
    (folder / "undisturbed").mkdir()
    lake, _ = run_round(folder / "undisturbed", Plan(windows={}, kills=()), -1, None)
    expected = bits_of(lake, "crash")
    if len(expected) != NUM_STEPS:
        raise AssertionError(f"the undisturbed run has {len(expected)} steps")
    results = []
    hits: Counter[str] = Counter()
    with ForkServer() as server:
        for number in range(count):
            place = folder / f"round-{number}"
            place.mkdir()
            lake, result = run_round(place, plan_round(number, rng), number, server)
            judge(lake, result, expected)
            hits.update(result.windows_hit)
            results.append(result)
            print(
                json.dumps(
                    {
                        "round": number,
                        "seconds": result.seconds,
                        "windows": result.windows_hit,
                        "kills": result.kills,
                        "restarts": result.restarts,
                        "problems": result.problems,
                    }
                ),
                flush=True,
            )
    return results, hits


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results, hits = rounds(options.rounds, options.seed, Path(folder))
    print(json.dumps({"windows": hits, "failed_rounds": [r.number for r in results if r.problems]}))
    return 1 if any(r.problems for r in results) or set(hits) != set(WINDOWS) else 0


if __name__ == "__main__":
    sys.exit(main())
