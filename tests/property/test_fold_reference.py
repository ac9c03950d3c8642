"""The columnar fold against a fold that anyone can read: one event at a time, lists of Python."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.attempts import AttemptWriter, shuffled, version_runs
from tests.conftest import Tape

from rolltape.schema.fold import fold
from rolltape.schema.fold_ranges import copy_ranges, expand_ranges, is_contiguous, lists_of, reduce_by, spread_ranges

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LENGTHS = st.sampled_from([0, 1, 2, 5, 40, 200])
EVENTS = st.sampled_from(["act", "act", "null", "two", "inject", "observe", "observe", "rewrite"])


def write(tape: Tape, name: str, events: list[tuple[str, int]], rng: np.random.Generator) -> None:
    """An attempt of the events named, with random tokens."""
    writer = AttemptWriter(tape, name)
    writer.start(rng.integers(0, 1000, int(rng.integers(0, 60))).tolist())
    for what, length in events:
        tokens = rng.integers(0, 1000, length).tolist()
        log_probs: list[float | None] = (-rng.random(length).astype(np.float32)).tolist()
        cut = length // 2
        match what:
            case "observe":
                writer.observe(tokens)
            case "rewrite":
                writer.rewrite(tokens)
            case "null":
                writer.act(tokens, log_probs=[None if at % 3 == 0 else p for at, p in enumerate(log_probs)])
            case "two":
                runs = version_runs((0, cut, 3), (cut, length - cut, 4))
                writer.act(tokens, log_probs=log_probs, version_runs=[runs])
            case "inject":
                origin = {"start": cut, "length": length, "origin": "sampled"}
                writer.act(tokens, log_probs=log_probs, origin_runs=[[{**origin, "start": 0, "length": 0}, origin]])
            case _:
                writer.act(tokens, log_probs=log_probs, version=len(tokens))


def reference(events: dict[str, pa.Table]) -> list[dict[str, Any]]:
    """Segments of attempts without gaps, conflicts, retries or labels."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for table in events.values():
        for event in table.to_pylist():
            rows.setdefault(event["trajectory_id"], []).append(event)
    segments = []
    for name in sorted(rows):
        current: list[dict[str, Any]] = []
        for event in sorted(rows[name], key=lambda event: event["event_index"]):
            fields = event[event["kind"]]
            if event["kind"] in {"rollout_started", "context_rewritten"}:
                context = fields["prompt_token_ids"] if "prompt_token_ids" in fields else fields["context_token_ids"]
                current.append(new_segment(name, context))
            else:
                append(current[-1], event, fields)
        filled = [segment for segment in current if segment["events"]] or current[:1]
        for index, segment in enumerate(filled):
            del segment["events"]
            segments.append({**segment, "segment_index": index})
    return segments


def new_segment(name: str, context: list[int]) -> dict[str, Any]:
    lists = ("response_token_ids", "rollout_log_probs", "response_mask", "observation_mask", "policy_versions")
    return {"trajectory_id": name, "prompt_token_ids": context, "events": 0, **{column: [] for column in lists}}


def append(segment: dict[str, Any], event: dict[str, Any], fields: dict[str, Any]) -> None:
    segment["events"] += 1
    observed = event["kind"] == "observation_received"
    for at, token in enumerate(event["token_ids"]):
        origins = fields.get("origin_runs") or [{"start": 0, "length": 10**6, "origin": "sampled"}]
        sampled = not observed and any(run["start"] <= at < run["start"] + run["length"] for run in origins)
        versions = [
            run["version"]
            for run in (fields.get("version_runs") or [])
            if run["start"] <= at < run["start"] + run["length"]
        ]
        segment["response_token_ids"].append(token)
        segment["rollout_log_probs"].append(event["rollout_log_probs"][at] if sampled else None)
        segment["response_mask"].append(sampled)
        segment["observation_mask"].append(observed)
        segment["policy_versions"].append(versions[-1] if sampled and versions else -1)


@SETTINGS
@given(st.lists(st.lists(st.tuples(EVENTS, LENGTHS), max_size=6), min_size=1, max_size=4), st.integers(0, 2**31))
def test_segments_are_those_of_the_reference(attempts: list[list[tuple[str, int]]], seed: int) -> None:
    tape = Tape()
    rng = np.random.default_rng(seed)
    for number, events in enumerate(attempts):
        write(tape, f"t{number}", events, rng)
    tables = tape.tables()
    expected = reference(tables)
    for events_ in (tables, shuffled(tables, seed)):
        folded = fold(events_)
        found = folded.segments.select(list(expected[0])).to_pylist()
        assert found == expected
        assert False not in folded.trajectories["tito_ok"].to_pylist()


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def arrays(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(ranges, np.int64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


@given(RANGES)
def test_expand_ranges(ranges: list[tuple[int, int]]) -> None:
    assert expand_ranges(*arrays(ranges)).tolist() == [i for start, n in ranges for i in range(start, start + n)]


@given(RANGES)
def test_is_contiguous(ranges: list[tuple[int, int]]) -> None:
    filled = [(start, n) for start, n in ranges if n]
    expected = all(b[0] == a[0] + a[1] for a, b in pairwise(filled))
    assert is_contiguous(*arrays(ranges)) == expected


@given(RANGES)
def test_spread_ranges(ranges: list[tuple[int, int]]) -> None:
    starts, lengths = arrays(ranges)
    values = np.arange(1, len(ranges) + 1)
    expected = [-1] * 120
    for (start, n), value in zip(ranges, values.tolist(), strict=True):
        expected[start : start + n] = [value] * n
    assert spread_ranges(starts, lengths, values, 120, -1).tolist() == expected


@given(st.lists(st.integers(0, 90), max_size=8), st.integers(0, 2**31))
def test_copy_ranges(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 1000, 100)
    counts = np.array(lengths, np.int64)
    at = rng.integers(0, 101 - counts) if len(counts) else counts
    ends = np.concatenate([[0], np.cumsum(counts)])
    target = np.zeros(int(ends[-1]), np.int64)
    copy_ranges(target, ends[:-1], source, at, counts)
    expected = [source[a : a + n] for a, n in zip(at.tolist(), lengths, strict=True)]
    assert target.tolist() == (np.concatenate(expected).tolist() if expected else [])


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=4)), max_size=8), st.data())
def test_lists_of_slices(rows: list[list[int] | None], data: st.DataObject) -> None:
    """Case D23: a slice shows its own rows, also with a null row in front."""
    low = data.draw(st.integers(0, len(rows)))
    array = pa.array(rows, pa.list_(pa.int32()))[low:]
    lists = lists_of(array)
    found = [
        lists.values.slice(int(start), int(n)).to_pylist() if valid else None
        for start, n, valid in zip(lists.starts, lists.lengths, lists.valid, strict=True)
    ]
    assert found == rows[low:]


def test_a_null_row_shows_nothing_even_where_values_lie_behind_it() -> None:
    offsets, ids = np.array([0, 2, 5], np.int32), np.arange(5, dtype=np.int32)
    child = pa.array(ids)
    rows = pa.Array.from_buffers(
        pa.list_(pa.int32()), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(offsets)], children=[child]
    )
    assert rows.to_pylist() == [None, [2, 3, 4]]
    lists = lists_of(rows)
    assert lists.lengths.tolist() == [0, 3]
    assert lists.valid.tolist() == [False, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=12))
def test_reduce_by(pairs: list[tuple[int, int]]) -> None:
    pairs.sort()
    groups, values = arrays(pairs)
    expected = [min((v for g, v in pairs if g == group), default=77) for group in range(6)]
    assert reduce_by(np.minimum, groups, values, 6, 77).tolist() == expected
