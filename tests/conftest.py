"""Shared fixtures: a hand-made tape, whose every event a test can choose."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.servers.fixtures import (  # noqa: F401  # fixtures of every test
    absences,
    apache_kafka,
    certificates,
    kafka_broker,
    kafka_cluster3,
    kcat,
    noida_broker,
    real_kafka,
    s3_bucket,
    s3_server,
    topic_prefix,
    toxiproxy,
)

from rolltape.schema.build import build_batch
from rolltape.schema.digest import prefix_digest
from rolltape.schema.identity import uuid7_many
from rolltape.schema.kinds import kind_named
from rolltape.schema.render import arrow_schema

# Small tensors gain nothing from threads, and waiting threads cost a busy machine dearly. A test that is about threads
# sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class Tape:
    """Events in memory, stamped as a recorder and an embedded log would stamp them; any stamp can be given instead."""

    def __init__(self, run_id: str = "run") -> None:
        self.run_id = run_id
        self.batches: dict[str, list[pa.RecordBatch]] = defaultdict(list)
        self._offsets: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._lanes: dict[tuple[str, int, str], int] = defaultdict(int)
        self._number = itertools.count()

    def add(self, kind: str, num_rows: int = 1, **columns: Any) -> list[str]:
        """One record of ``num_rows`` events; returns their ids."""
        topic = kind_named(kind).topic
        lane = (columns.get("producer_id", "p"), columns.get("producer_epoch", 1), topic)
        first = self._lanes[lane]
        self._lanes[lane] += num_rows
        stamps = {
            "event_id": [f"{kind}-{next(self._number):05d}" for _ in range(num_rows)],
            "run_id": self.run_id,
            "run_epoch": 1,
            "producer_id": "p",
            "producer_epoch": 1,
            "lane_seq": np.arange(first, first + num_rows),
            "log_topic": topic,
            "log_partition": 0,
            "log_offset": next(self._offsets[topic]),
            "recorded_at": datetime(2026, 11, 30, tzinfo=UTC),
        }
        built = build_batch(kind, {**stamps, **columns}, num_rows)
        assert not built.refused, built.refused
        self.batches[kind].append(built.batch)
        ids: list[str] = built.batch["event_id"].to_pylist()
        return ids

    def rollout(
        self,
        trajectory_id: str,
        *,
        attempt: int = 0,
        group_id: str = "g0",
        prompt: tuple[int, ...] = (1, 2),
        tokens: tuple[int, ...] = (5, 6, 7),
        log_probs: tuple[float | None, ...] | None = None,
        version: int = 0,
        reward: float | None = 1.0,
        step: int | None = 1,
        run_epoch: int = 1,
        purpose: str = "train",
        dispatched: bool = True,
        ended: bool = True,
        engine_id: str = "e0",
        member: int = 0,
        group_size: int = 1,
    ) -> list[str]:
        """A whole rollout of one action; returns the ids of its reward events."""
        common: dict[str, Any] = {
            "trajectory_id": trajectory_id,
            "attempt": attempt,
            "group_id": group_id,
            "problem_id": f"problem-{group_id}",
            "run_epoch": run_epoch,
        }
        if dispatched:
            self.add(
                "rollout_dispatched",
                purpose=purpose,
                training_step=step,
                group_ordinal=0,
                member=member,
                group_size=group_size,
                worker_id="w0",
                **common,
            )
        self.add("rollout_started", event_index=0, prompt_token_ids=[list(prompt)], **common)
        self.add(
            "action_sampled",
            event_index=1,
            turn_index=0,
            action_kind="execution",
            token_ids=[list(tokens)],
            rollout_log_probs=[[-0.5] * len(tokens) if log_probs is None else list(log_probs)],
            version_runs=[
                [
                    {
                        "start": 0,
                        "length": len(tokens),
                        "policy_id": "actor",
                        "run_epoch": 1,
                        "version": version,
                        "weights_digest": f"w{version}",
                    }
                ]
            ],
            sampling=[
                {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}
            ],
            prefix_length=len(prompt),
            prefix_digest=prefix_digest(list(prompt)),
            prefix_source="engine",
            engine=[{"id": engine_id, "name": "scripted"}],
            **common,
        )
        if ended:
            self.add(
                "rollout_ended",
                event_index=2,
                status="completed",
                num_action_tokens=len(tokens),
                num_observation_tokens=0,
                last_event_index=2,
                **common,
            )
        if not ended or reward is None:
            return []
        return self.add("reward_assigned", state="earned", scalar=reward, scalariser_version="1", **common)

    def tables(self) -> dict[str, pa.Table]:
        """All events, by kind."""
        return {
            kind: pa.Table.from_batches(batches, schema=arrow_schema(kind)) for kind, batches in self.batches.items()
        }


@pytest.fixture
def tape() -> Tape:
    """An empty tape."""
    return Tape()


class Feed:
    """Rollouts as a committer hands them to a lake: one record of each kind a commit, stamped and marked."""

    def __init__(self, seed: int = 0) -> None:
        self.next_offset = 0
        self._rng = np.random.default_rng(seed)

    def commit(
        self, num_rollouts: int = 4, num_tokens: int = 8, **overrides: Any
    ) -> tuple[dict[str, pa.Table], dict[str, int]]:
        """Tables and transactions of the next commit: an action and a reward for each of the new rollouts."""
        ids = uuid7_many(num_rollouts)
        common = {
            "event_id": ids,
            "run_id": "run",
            "run_epoch": 1,
            "producer_id": "p",
            "producer_epoch": 1,
            "log_topic": "rollout",
            "log_partition": 0,
            "recorded_at": datetime(2026, 11, 30, tzinfo=UTC),
            "trajectory_id": ids,
            "attempt": 0,
            "group_id": "g0",
            **overrides,
        }
        tables = {}
        for kind in ("action_sampled", "reward_assigned"):
            offsets = {"lane_seq": np.arange(num_rollouts) + self.next_offset, "log_offset": self.next_offset}
            own = self._action(num_rollouts, num_tokens) if kind == "action_sampled" else self._reward(num_rollouts)
            built = build_batch(kind, {**common, **offsets, **own}, num_rollouts)
            assert not built.refused, built.refused
            tables[kind] = pa.Table.from_batches([built.batch])
            self.next_offset += 1
        last = self.next_offset - 1
        return tables, {"lane/p/1/rollout/0": last, "log/rollout/0": last}

    def _action(self, num_rollouts: int, num_tokens: int) -> dict[str, Any]:
        ends = np.arange(num_rollouts + 1, dtype=np.int32) * num_tokens
        count = num_rollouts * num_tokens
        log_probs = -self._rng.exponential(size=count).astype(np.float32)
        return {
            "event_index": 1,
            "turn_index": 0,
            "action_kind": "execution",
            "token_ids": lists(ends, self._rng.integers(0, 50_000, count, dtype=np.int32)),
            "rollout_log_probs": lists(ends, log_probs),
            "sampling": {"temperature": 1.0, "logprobs_mode": "processed_logprobs"},
        }

    def _reward(self, num_rollouts: int) -> dict[str, Any]:
        return {"state": "earned", "scalar": self._rng.random(num_rollouts), "scalariser_version": "1"}


def lists(ends: np.ndarray, values: np.ndarray) -> pa.ListArray:
    """A list column of the specs over a flat array."""
    type_ = pa.list_(pa.field("element", pa.from_numpy_dtype(values.dtype)))
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values), type=type_)


@pytest.fixture
def feed() -> Feed:
    """A source of commits."""
    return Feed()


@pytest.fixture(scope="session", autouse=True)
def _own_state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the spools and cached files of lakes in object stores out of the user's folders."""
    # Workers of pytest-xdist share what is cached, as processes of a user do: a model is converted once.
    of_this = tmp_path_factory.getbasetemp()
    of_all = of_this.parent if hasattr(request.config, "workerinput") else of_this
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(of_all / "cache"))
        yield


_NOT_RUN = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose server this environment does not name; the summary counts them."""
    absent = absences(os.environ)
    not_run = config.stash.setdefault(_NOT_RUN, Counter())
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        needs = {
            *getattr(item, "fixturenames", ()),
            *(name for mark in item.iter_markers("needs") for name in mark.args),
        }
        missing = [name for name in absent if name in needs]
        not_run.update(missing[:1])
        (left_out if missing else kept).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    # A worker of pytest-xdist: files are shared out in this order, and what is counted is told by another process.
    told: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if told is not None:
        items.sort(key=_turn)
        told["not_run"] = dict(not_run)


def _turn(item: pytest.Item) -> int:
    """The longest first, so that none of them is still to run when the others have ended."""
    if item.get_closest_marker("crash"):
        return 0
    if item.get_closest_marker("faults"):
        return 1
    return 2 if "integration" in item.path.parts else 3


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker counted; each collects all tests, so they say the same."""
    not_run = getattr(node, "workeroutput", {}).get("not_run")
    if not_run is not None:
        node.config.stash[_NOT_RUN] = Counter(not_run)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which suites did not run for want of a server or an outside witness, and how to run them."""
    _write_faults(terminalreporter)
    # None: no worker lived to tell its counts.
    counts = config.stash.get(_NOT_RUN, None)
    for name, absence in absences(os.environ).items():
        if counts is None or counts[name]:
            number = "" if counts is None else f" ({counts[name]} tests)"
            terminalreporter.write_line(f"NOT RUN: {absence.what}{number}. To run them, {absence.how}.")
    if not os.environ.get("ROLLTAPE_DELTA_KERNEL_HOME"):
        terminalreporter.write_line(
            "NOT RUN: Delta Kernel did not read the lakes of these tests. Set ROLLTAPE_DELTA_KERNEL_HOME to a folder "
            "with DeltaRead.java and libs/ (Java 17), then run tests/integration/store/test_store_readers_agree.py"
        )


def _write_faults(terminalreporter: pytest.TerminalReporter) -> None:
    """Each fault of the table, its seed and what came of it."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    played = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "fault"
    ]
    if played:
        from tests.faults.table import Result, lines

        terminalreporter.section("faults over three Kafka brokers")
        for line in lines(Result(**value) for value in played):
            terminalreporter.write_line(line)
