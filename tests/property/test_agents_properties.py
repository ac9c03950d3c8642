"""Whatever an agent, its environment, its budgets and its engine do: what is recorded folds to what happened."""

from __future__ import annotations

import zlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agents import END, Bench, Line, ScriptedEnvironment, check_provenance, component

from rolltape.rollout.agent_config import CompactionConfig
from rolltape.rollout.agent_environment import Observation, Reply
from rolltape.schema.fold import Fold

TEXTS = ("a", "b", "ab", "abc", "")


class AnyScript(dict[str, str]):
    """Says one of the texts whatever the context is; which one depends on the context and a seed alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __contains__(self, context: object) -> bool:
        return True

    def __missing__(self, context: str) -> str:
        text = TEXTS[zlib.crc32(f"{self._seed}/{context}".encode()) % len(TEXTS)]
        return (text + END).ljust(8, "z")


def lines() -> st.SearchStrategy[Line]:
    replies = st.builds(
        Reply,
        observation=st.none() | st.builds(Observation, text=st.text("xyz", max_size=7)),
        done=st.booleans(),
        reward=st.sampled_from([(), (component(0.5, "turn"),)]),
        erroneous=st.sampled_from([None, None, "wrong"]),
    )
    return st.one_of(replies, replies, replies, replies, st.just(OSError("gone")))


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    environment = ScriptedEnvironment(
        [f"s:{number}" for number in range(draw(st.integers(1, 3)))],
        {text: draw(st.lists(lines(), min_size=1, max_size=4)) for text in ("a", "b", "ab", "abc", "")},
        components=draw(st.sampled_from([(), (component(1.0),)])),
        system="s:",
    )
    seed = draw(st.integers(0, 99))
    config: dict[str, Any] = {
        "max_turns": draw(st.integers(1, 8)),
        "context_budget": draw(st.integers(20, 40)),
        "mask_erroneous": draw(st.booleans()),
        "max_interruptions": draw(st.integers(0, 2)),
    }
    match draw(st.sampled_from(["plain", "summaries", "folded"])):
        case "summaries":
            config["compaction"] = CompactionConfig(
                max_compactions=draw(st.integers(1, 3)),
                threshold=draw(st.integers(7, 15)),
                max_summary_tokens=draw(st.integers(1, 5)),
                keep_recent=draw(st.integers(0, 3)),
                summary_attempts=draw(st.integers(1, 3)),
                resume_includes_user=draw(st.booleans()),
            )
        case "folded":
            config |= {"keep_recent_observations": draw(st.integers(1, 2)), "discard_above": draw(st.integers(0, 30))}
    breaks = draw(st.booleans())
    return Bench(
        environment,
        AnyScript(seed),
        max_tokens=draw(st.integers(1, 5)),
        interrupts=lambda request, place: breaks and zlib.crc32(bytes([place, len(request.prompt_token_ids)])) % 7 == 0,
        **config,
    )


@given(benches())
@settings(max_examples=60, deadline=None)
def test_what_is_recorded_folds_to_what_happened(bench: Bench) -> None:
    folded = bench.run()
    assert bench.recorder.num_refused == 0
    check_reasons(folded)
    check_tokens(bench, folded)
    check_contexts(bench)
    check_provenance(bench)
    assert all(episode.closed == 1 for episode in bench.environment.episodes)
    bench.close()


def check_reasons(folded: Fold) -> None:
    """Only what the environment or the engine did keeps a rollout from training."""
    allowed = {"env_failed": {"env_failed", "reward_invalid"}, "aborted": {"aborted", "reward_invalid"}}
    for row in folded.trajectories.to_pylist():
        reasons = set(row["untrainable_reasons"])
        assert reasons <= allowed.get(row["status"], {"reward_missing"}), row
        assert row["tito_ok"] in (True, None)
        assert row["missing_event_indexes"] == []


def check_tokens(bench: Bench, folded: Fold) -> None:
    """Each sampled token is in one place of one segment, trained unless it was masked."""
    masked = sum(span["length"] for row in bench.rows_of("mask_assigned") for span in row["ranges"])
    sampled = bench.rows_of("action_sampled")
    segments = folded.segments.to_pylist()
    assert sum(sum(row["response_mask"]) for row in segments) == sum(len(r["token_ids"]) for r in sampled) - masked
    by_trajectory: dict[str, list[int]] = {}
    for row in sorted(sampled, key=lambda row: row["event_index"]):
        by_trajectory.setdefault(row["trajectory_id"], []).extend(row["token_ids"])
    found: dict[str, list[int]] = {}
    for row in segments:
        is_seen = zip(row["response_token_ids"], row["observation_mask"], strict=True)
        found.setdefault(row["trajectory_id"], []).extend(token for token, seen in is_seen if not seen)
    assert {key: ids for key, ids in found.items() if ids} == by_trajectory
    indexes = {(row["trajectory_id"], row["segment_index"]) for row in sampled}
    assert indexes == {(row["trajectory_id"], row["segment_index"]) for row in segments if row["response_token_ids"]}


def check_contexts(bench: Bench) -> None:
    """No call of the engine was given more than the budget leaves room for."""
    for row in bench.rows_of("action_sampled"):
        assert row["prefix_length"] + row["sampling"]["max_tokens"] <= bench.harness.budget
