"""From generations to events: the columns of a batch say what the engine said, and the fold reads it back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.rollout import recording
from rolltape.rollout.assembly import BatchAssembly
from rolltape.rollout.engine import EngineInfo, GenerationBatch, GenerationRequest, PolicyVersion, SamplingConfig
from rolltape.rollout.recording import RolloutBatch
from rolltape.rollout.rewards import rule_component
from rolltape.schema.build import build_batch
from rolltape.schema.fold import fold
from rolltape.schema.validate import validate

END = 2
INFO = EngineInfo(name="scripted", version="1", dtype="float32", device="cpu")
VERSIONS = [PolicyVersion("actor", 1, number, f"sha256:{number}") for number in range(3)]
KINDS = ("rollout_dispatched", "rollout_started", "action_sampled", "rollout_ended", "reward_assigned")


def requests(num_rows: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_token_ids=np.array([5, 6, row], dtype=np.int32), seed=row) for row in range(num_rows)
    ]


def assemble(
    table: list[list[int]], sampling: SamplingConfig, *, switches: dict[int, int] | None = None
) -> GenerationBatch:
    """A batch from the tokens that each decode step (a row of ``table``) would sample for each request."""
    num_rows = len(table[0])
    assembly = BatchAssembly(requests(num_rows), sampling, VERSIONS[0])
    rows = np.arange(num_rows)
    for place, tokens in enumerate(table):
        if place in (switches or {}):
            assembly.switch(VERSIONS[(switches or {})[place]])
        support = None
        if sampling.limits_support:
            support = np.zeros((num_rows, 12), dtype=np.bool_)
            support[np.arange(num_rows), tokens] = True
            support[:, : place + 1] = True
        assembly.append(rows, np.array(tokens), -np.arange(num_rows, dtype=np.float32) - place / 8, support)
    return assembly.finish()


def rollouts(num_rows: int) -> RolloutBatch:
    return RolloutBatch(
        purpose="train",
        step=1,
        group_size=num_rows,
        trajectory_ids=[f"t{row}" for row in range(num_rows)],
        attempts=[0] * num_rows,
        group_ids=["g"] * num_rows,
        problem_ids=["p"] * num_rows,
        group_ordinals=[0] * num_rows,
        members=list(range(num_rows)),
        seeds=[2**62 + row for row in range(num_rows)],
    )


def columns_of(generations: GenerationBatch, sampling: SamplingConfig) -> dict[str, dict[str, Any]]:
    batch = rollouts(len(generations))
    prompts = [(request.prompt_token_ids, "text") for request in requests(len(generations))]
    components = [
        (
            rule_component("a", row / 8, 0.5, scorer="s", version="1"),
            rule_component("b", 1.0, 0.25, scorer="s", version="1"),
        )
        for row in range(len(generations))
    ]
    return {
        "rollout_dispatched": recording.dispatched(batch, worker_id="worker-0", lease_s=60.0),
        "rollout_started": recording.started(batch, environment="e", environment_version="1", prompts=prompts),
        "action_sampled": recording.sampled(
            batch, generations, sampling, engine_id="worker-0", engine=INFO, texts=["x"] * len(generations)
        ),
        "rollout_ended": recording.ended(batch, generations),
        "reward_assigned": recording.rewarded(batch, components),
    }


def stamped(kind: str, columns: dict[str, Any], num_rows: int, first: int) -> pa.Table:
    """As a recorder and a log would stamp them; anything refused fails the test."""
    stamps: dict[str, Any] = {
        "event_id": [f"{kind}-{row}" for row in range(num_rows)],
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": "p",
        "producer_epoch": 1,
        "lane_seq": np.arange(first, first + num_rows),
        "log_topic": "rollout",
        "log_partition": 0,
        "log_offset": first,
        "recorded_at": 0,
    }
    index = {"rollout_started": 0, "action_sampled": 1, "rollout_ended": 2}.get(kind)
    if index is not None:
        stamps["event_index"] = index
    if kind == "rollout_ended":
        stamps["last_event_index"] = index
    built = build_batch(kind, {**stamps, **columns}, num_rows)
    assert built.refused == ()
    assert validate(built.batch) == []
    return pa.Table.from_batches([built.batch])


def recorded(generations: GenerationBatch, sampling: SamplingConfig) -> dict[str, pa.Table]:
    num_rows = len(generations)
    columns = columns_of(generations, sampling)
    return {kind: stamped(kind, columns[kind], num_rows, number * num_rows) for number, kind in enumerate(KINDS)}


TABLE = [[3, 3, 4], [END, 4, 4], [9, END, 4], [9, 9, 4]]


def test_the_fold_reads_back_what_the_engine_said() -> None:
    sampling = SamplingConfig(max_tokens=4, stop_token_ids=(END,))
    generations = assemble(TABLE, sampling)
    folded = fold(recorded(generations, sampling))
    trajectories = {row["trajectory_id"]: row for row in folded.trajectories.to_pylist()}
    segments = {row["trajectory_id"]: row for row in folded.segments.to_pylist()}
    for row, generation in enumerate(generations):
        trajectory, segment = trajectories[f"t{row}"], segments[f"t{row}"]
        assert trajectory["untrainable_reasons"] == []
        assert (trajectory["state"], trajectory["tito_ok"]) == ("ended", True)
        assert trajectory["reward"] == 0.5 * row / 8 + 0.25
        assert segment["prompt_token_ids"] == [5, 6, row]
        assert segment["response_token_ids"] == generation.token_ids.tolist()
        assert segment["rollout_log_probs"] == generation.log_probs.tolist()
        assert segment["response_mask"] == [True] * len(generation.token_ids)
        assert segment["policy_versions"] == [0] * len(generation.token_ids)
        assert segment["sampling_config"]["seed"] == 2**62 + row
    assert [trajectories[f"t{row}"]["status"] for row in range(3)] == ["completed", "completed", "truncated"]


def test_an_action_that_the_engine_broke_off_is_no_answer() -> None:
    sampling = SamplingConfig(max_tokens=4, stop_token_ids=(END,))
    assembly = BatchAssembly(requests(3), sampling, VERSIONS[0])
    assembly.append(np.arange(3), np.array([3, END, 4]), np.zeros(3, dtype=np.float32), None)
    assembly.interrupt(np.array([0]))
    assert assembly.unfinished(np.arange(3)).tolist() == [False, False, True]
    assembly.append(np.arange(3), np.array([5, 5, 5]), np.zeros(3, dtype=np.float32), None)
    generations = assembly.finish()
    assert [g.token_ids.tolist() for g in generations] == [[3], [END], [4, 5]]
    assert generations.finish_reasons == ("abort", "stop", "length")
    rows = fold(recorded(generations, sampling)).trajectories.to_pylist()
    assert [(row["status"], row["cause"]) for row in rows] == [
        ("aborted", "interrupted"),
        ("completed", "stop_token"),
        ("truncated", "max_tokens"),
    ]
    assert [row["untrainable_reasons"] for row in rows] == [["aborted"], [], []]


def test_two_versions_are_two_runs_of_one_action() -> None:
    sampling = SamplingConfig(max_tokens=4, stop_token_ids=(END,))
    generations = assemble(TABLE, sampling, switches={2: 1})
    folded = fold(recorded(generations, sampling))
    versions = {row["trajectory_id"]: row["policy_versions"] for row in folded.segments.to_pylist()}
    assert versions == {"t0": [0, 0], "t1": [0, 0, 1], "t2": [0, 0, 1, 1]}


def test_a_limited_support_is_recorded_and_keeps_the_rollout_trainable() -> None:
    sampling = SamplingConfig(max_tokens=4, stop_token_ids=(END,), top_k=5)
    generations = assemble(TABLE, sampling)
    tables = recorded(generations, sampling)
    assert all(row["untrainable_reasons"] == [] for row in fold(tables).trajectories.to_pylist())
    for row, action in enumerate(tables["action_sampled"]["action_sampled"].to_pylist()):
        offsets, ids = action["support_offsets"], action["support_token_ids"]
        tokens = generations[row].token_ids.tolist()
        assert len(offsets) == len(tokens) + 1
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        for place, token in enumerate(tokens):
            assert ids[offsets[place] : offsets[place + 1]] == sorted({token, *range(place + 1)})


def test_some_rows_of_a_batch_are_those_rows() -> None:
    sampling = SamplingConfig(max_tokens=4, stop_token_ids=(END,), top_k=5)
    generations = assemble(TABLE, sampling)
    rows = np.array([0, 2])
    for kind, columns in columns_of(generations, sampling).items():
        whole = stamped(kind, columns, 3, 0)
        some = stamped(kind, recording.select_rows(columns, rows), 2, 0)
        wanted = whole.take(rows)
        assert some[kind].to_pylist() == wanted[kind].to_pylist()
        assert some["trajectory_id"].to_pylist() == ["t0", "t2"]
        if kind == "action_sampled":
            assert some["token_ids"].to_pylist() == wanted["token_ids"].to_pylist()
    assert rollouts(3).select(rows).seeds == [2**62, 2**62 + 2]


@given(data=st.data())
def test_an_assembly_is_the_row_by_row_reading_of_its_steps(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5))
    num_steps = data.draw(st.integers(1, 6))
    tokens = st.integers(2, 8)
    table = data.draw(
        st.lists(st.lists(tokens, min_size=num_rows, max_size=num_rows), min_size=num_steps, max_size=num_steps)
    )
    places = data.draw(st.sets(st.integers(1, num_steps), max_size=2))
    switches = {place: number + 1 for number, place in enumerate(sorted(places))}
    generations = assemble(table, SamplingConfig(max_tokens=num_steps, stop_token_ids=(END,)), switches=switches)
    for row, generation in enumerate(generations):
        column = [step[row] for step in table]
        length = column.index(END) + 1 if END in column else num_steps
        assert generation.token_ids.tolist() == column[:length]
        assert generation.finish_reason == ("stop" if END in column else "length")
        numbers = [run.version.version for run in generation.version_runs for _ in range(run.length)]
        assert numbers == [max([0, *(n for p, n in switches.items() if p <= place)]) for place in range(length)]
        assert [run.start for run in generation.version_runs] == [numbers.index(n) for n in sorted(set(numbers))]


def test_generations_are_a_sequence() -> None:
    generations = assemble(TABLE, SamplingConfig(max_tokens=4, stop_token_ids=(END,)))
    assert [len(generation.token_ids) for generation in generations[1:]] == [3, 4]
    assert generations[-1].token_ids.tolist() == [4, 4, 4, 4]
    with pytest.raises(IndexError):
        generations[3]
