"""Training runs as processes over any log, to be killed and judged.

``TrainingRun`` starts what ``rolltape train`` starts (a sink or a committer, a trainer, two workers), brings back what
dies, and says afterwards what is wrong: rollouts trained twice or skipped, an unbalanced account, a tape that does not
verify. In lock step the same configuration gives the same bits on every log and after every kill: ``bits``.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rolltape.recipes.config import RunConfig
from rolltape.recipes.forked import ForkServer
from rolltape.recipes.runs import (
    Progress,
    StepSeen,
    log_folder,
    make_topics,
    open_or_create,
    open_run_log,
    start_run,
    wait_until_archived,
)
from rolltape.recipes.sort_digits import config as sort_digits
from rolltape.recipes.supervisor import Child, Supervisor, children_of
from rolltape.recipes.twin import StepBits, bits_of
from rolltape.schema.cursor import Partition
from rolltape.store.lake import Lake
from rolltape.store.verify import verify
from rolltape.trainers.history import RunHistory

NUM_STEPS: Final = 8
GROUPS: Final = 4
SIZE: Final = 4
LEAD: Final = 2
POLL_S: Final = 0.05


@cache
def server_of_all() -> ForkServer:
    """One for all runs of these tests."""
    server = ForkServer()
    atexit.register(server.stop)
    return server


def small_config(*, asynchronous: bool = False, num_steps: int = NUM_STEPS, **trainer: Any) -> RunConfig:
    """Two workers, 4 x 4 rollouts a step, a checkpoint each three steps."""
    base = sort_digits(run_id="training-run", seed=7, max_steps=num_steps)
    options: dict[str, Any] = {
        "stop_metric": "",
        "checkpoint_every": 3,
        "probe_every": 0,
        "engine_timeout_s": 120.0,
        "archive_timeout_s": 120.0,
    }
    if asynchronous:
        options |= {
            "algorithm": "dis",
            "correction": "dis",
            "epsilon_low": 0.8,
            "epsilon_high": 3.0,
            "aggregation": "token_mean",
            "staleness_tau": LEAD + 2,
            "group_timeout_s": 30.0,
        }
    return replace(
        base,
        rollout=replace(
            base.rollout,
            num_workers=2,
            groups_per_step=GROUPS,
            group_size=SIZE,
            evaluate_heldout=False,
            max_lead_steps=LEAD if asynchronous else 0,
        ),
        trainer=replace(base.trainer, **{**options, **trainer}),
    )


class TrainingRun:
    """One run in the background. ``log_url``: a Kafka log whose topics are made if need be; empty: the embedded log."""

    def __init__(
        self,
        folder: Path,
        log_url: str = "",
        *,
        asynchronous: bool = False,
        lake_url: str = "",
        config: RunConfig | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            folder: of the lake and the processes' logs.
            log_url: see above.
            asynchronous: workers run ahead of the trainer.
            lake_url: a lake elsewhere than in ``folder``.
            config: another one than :func:`small_config` gives.
            environment: more environment variables, by process name (``ROLLTAPE_CRASH`` for a crash window).
        """
        self.config = config or small_config(asynchronous=asynchronous)
        self.log_url = log_url
        if log_url:
            make_topics(log_url)
        self._writable = open_or_create(lake_url or str(folder / "lake"))
        self.lake = Lake.open(self._writable.location, read_only=True)
        services, workers = children_of(
            self._writable.location.url,
            self.config.run_id,
            self.config.rollout.num_workers,
            log_folder(self._writable),
            log_url=log_url,
            teachers=bool(self.config.teachers.routes),
            server=server_of_all(),
        )
        self.children: dict[str, Child] = {child.name: child for child in (*services, *workers)}
        for name, variables in (environment or {}).items():
            self.children[name].environment = variables
            if "PYTHONPATH" in variables:  # for an interpreter of its own
                self.children[name].server = None
        self.supervisor = Supervisor(services, workers, max_restarts=20)
        self.kills: Counter[str] = Counter()
        self.last_step = 0
        self._thread = threading.Thread(target=self._run, name="training-run", daemon=True)
        self._error: BaseException | None = None

    def start(self) -> Self:
        """Start the processes."""
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            for child in self.supervisor.services:
                child.start()
            with open_run_log(self._writable, self.log_url) as log:

                def archived() -> None:
                    wait_until_archived(log, self.supervisor, 120.0)

                start_run(self._writable, self.config, log, archived=archived)
                progress = Progress(log, self.config.run_id, self._saw)
                self.supervisor.run(on_tick=progress.poll, at_end=archived, tick_s=POLL_S)
        except BaseException as error:  # noqa: BLE001  # told by wait()
            self._error = error
        finally:
            self.supervisor.stop()

    def _saw(self, seen: StepSeen) -> None:
        self.last_step = max(self.last_step, seen.step)

    def wait_for_step(self, step: int, timeout_s: float = 300.0) -> None:
        """Return once a step is completed."""
        deadline = time.monotonic() + timeout_s
        while self.last_step < step and self._thread.is_alive():
            if time.monotonic() > deadline:
                raise AssertionError(f"step {step} was not completed within {timeout_s:g} s\n{self.logs()}")
            time.sleep(POLL_S)
        self._raise()

    def kill(self, name: str) -> bool:
        """SIGKILL to a process of the run; False where it was not running just then. It is started again."""
        process = self.children[name].process
        if process is None or process.poll() is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
        self.kills[name] += 1
        return True

    def wait(self, timeout_s: float = 600.0) -> None:
        """Return when the run has ended, and raise what went wrong."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise AssertionError(f"the run did not end within {timeout_s:g} s; step {self.last_step}\n{self.logs()}")
        self._raise()

    def stop(self) -> None:
        """End everything. Idempotent."""
        for child in self.supervisor.workers:
            child.done = True
        if self._thread.is_alive():
            self._thread.join(60.0)
        self.supervisor.stop()

    def _raise(self) -> None:
        if self._error is not None:
            raise AssertionError(f"the run failed: {self._error}\n{self.logs()}") from self._error

    def logs(self) -> str:
        """The ends of the processes' logs."""
        return "\n".join(f"-- {name}\n{child.log_tail(12)}" for name, child in self.children.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # Judging, after the end

    def bits(self) -> dict[int, StepBits]:
        """What each step computed (see :mod:`rolltape.recipes.twin`)."""
        return bits_of(self.lake, self.config.run_id)

    def trained(self) -> Counter[str]:
        """How often each rollout is a member of a batch that a completed step on the live line names."""
        query = """
            select trajectory_id, sum(num_completions)::bigint as num from batch_members
            where is_completed and not is_padding group by 1
        """
        rows = self.lake.sql(query).arrow().to_pylist()
        return Counter({row["trajectory_id"]: row["num"] for row in rows})

    def problems(self) -> list[str]:
        """What does not hold; empty when all does."""
        found = []
        steps = sorted(self.bits())
        if steps != list(range(1, self.config.trainer.max_steps + 1)):
            found.append(f"steps: {steps}")
        doubled = [key for key, count in self.trained().items() if count != 1]
        if doubled:
            found.append(f"rollouts trained twice: {doubled[:3]} …")
        for what, query in _QUESTIONS.items():
            count = self.lake.sql(query).arrow().column(0)[0].as_py()
            if count:
                found.append(f"{what}: {count}")
        report = verify(self.lake)
        if not report.ok:
            found.append(f"verify: {[row for row in report.to_rows() if row['num_broken']][:3]}")
        return found + self._left_behind()

    def _left_behind(self) -> list[str]:
        """Rollouts without a fate that the newest cursor has passed: no trainer would ever see them again."""
        history = RunHistory.read(self.lake, self.config.run_id)
        cursor = history.cursor_after(history.last_step)
        rows = self.lake.sql("select trajectory_id, attempt from attempt_fates where in_flight > 0").arrow().to_pylist()
        in_flight = {(row["trajectory_id"], row["attempt"]) for row in rows}
        table = self.lake.read("rollout_dispatched", run_id=self.config.run_id)
        names = ("trajectory_id", "attempt", "log_topic", "log_partition", "log_offset")
        passed = [
            (trajectory, attempt)
            for trajectory, attempt, topic, partition, offset in zip(
                *(table[name].to_pylist() for name in names), strict=True
            )
            if (trajectory, attempt) in in_flight and offset < cursor[Partition(topic, partition)]
        ]
        return [f"rollouts that were skipped: {len(passed)}, {passed[:3]} …"] if passed else []


_QUESTIONS: Final = {
    "event ids that occur twice": "select count(*) from (select event_id from events group by 1 having count(*) > 1)",
    "conservation out of balance": "select coalesce(sum(abs(balance)), 0) from conservation",
    "attempts with another number of fates than one": "select coalesce(sum(num_unbalanced), 0) from conservation",
    "dead letters": "select count(*) from dead_letter",
}
