"""How long the fold takes: ``python benchmarks/bench_fold.py``.

Plain trajectories (one action each) as a trainer meets them, many short ones, and agentic ones of many turns. Every
prefix is hashed again, every token is placed. Prints one JSON line a case, in CPU time; ``share`` is against one
SHA-256 and one copy of the response ids, measured in the same run, so that it holds on other machines.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.schema.build import build_batch
from rolltape.schema.columns import list_of
from rolltape.schema.digest import PrefixHasher
from rolltape.schema.fold import content_digests_of, fold
from rolltape.schema.identity import uuid7_many

_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}


def _lists(values: np.ndarray, length: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=list_of(pa.from_numpy_dtype(values.dtype)))


def _events(kind: str, num_rows: int, **columns: Any) -> pa.Table:
    stamps = {
        "event_id": uuid7_many(num_rows),
        "run_id": "run",
        "run_epoch": 1,
        "producer_id": "worker",
        "producer_epoch": 1,
        "lane_seq": np.arange(num_rows),
        "log_topic": "rollout",
        "log_partition": 0,
        "log_offset": np.arange(num_rows) // 16,
        "recorded_at": datetime(2026, 11, 30, tzinfo=UTC),
        "attempt": 0,
    }
    built = build_batch(kind, {**stamps, **columns}, num_rows)
    assert not built.refused, built.refused[0]
    return pa.Table.from_batches([built.batch])


def make_tape(num_trajectories: int, prompt: int, tokens: int, turns: int, observation: int) -> dict[str, pa.Table]:
    """Events of ended, rewarded trajectories: ``turns`` actions of ``tokens`` tokens, observations between them."""
    rng = np.random.default_rng(7)
    ids = np.array(sorted(uuid7_many(num_trajectories)))
    prompts = rng.integers(0, 50_000, num_trajectories * prompt).astype(np.int32)
    num_actions, num_observations = num_trajectories * turns, num_trajectories * (turns - 1)
    action_ids = rng.integers(0, 50_000, num_actions * tokens).astype(np.int32)
    log_probs = -rng.exponential(size=num_actions * tokens).astype(np.float32)
    observed = rng.integers(0, 50_000, num_observations * observation).astype(np.int32)
    digests, lengths = [], []
    for at in range(num_trajectories):
        hasher = PrefixHasher()
        hasher.update(prompts[at * prompt : (at + 1) * prompt])
        length = prompt
        for turn in range(turns):
            digests.append(hasher.digest())
            lengths.append(length)
            action = at * turns + turn
            hasher.update(action_ids[action * tokens : (action + 1) * tokens])
            if turn < turns - 1:
                seen = at * (turns - 1) + turn
                hasher.update(observed[seen * observation : (seen + 1) * observation])
            length += tokens + observation
    runs = [{"start": 0, "length": tokens, "policy_id": "actor", "run_epoch": 1, "version": 3}]
    whole = {"trajectory_id": ids, "group_id": "g", "problem_id": "p"}
    per_action = {"trajectory_id": np.repeat(ids, turns), "group_id": "g", "problem_id": "p"}
    per_observation = {"trajectory_id": np.repeat(ids, turns - 1), "group_id": "g", "problem_id": "p"}
    last = 2 * turns
    tape = {
        "rollout_dispatched": _events(
            "rollout_dispatched", num_trajectories, purpose="train", training_step=1, **whole
        ),
        "rollout_started": _events(
            "rollout_started", num_trajectories, event_index=0, prompt_token_ids=_lists(prompts, prompt), **whole
        ),
        "action_sampled": _events(
            "action_sampled",
            num_actions,
            event_index=np.tile(np.arange(turns) * 2 + 1, num_trajectories),
            token_ids=_lists(action_ids, tokens),
            rollout_log_probs=_lists(log_probs, tokens),
            action_kind="execution",
            version_runs=[runs] * num_actions,
            sampling=_SAMPLING,
            prefix_length=lengths,
            prefix_digest=digests,
            prefix_source="engine",
            **per_action,
        ),
        "rollout_ended": _events(
            "rollout_ended",
            num_trajectories,
            event_index=last,
            last_event_index=last,
            status="completed",
            num_action_tokens=tokens * turns,
            num_observation_tokens=observation * (turns - 1),
            **whole,
        ),
        "reward_assigned": _events("reward_assigned", num_trajectories, state="earned", scalar=1.0, **whole),
    }
    if turns > 1:
        tape["observation_received"] = _events(
            "observation_received",
            num_observations,
            event_index=np.tile(np.arange(turns - 1) * 2 + 2, num_trajectories),
            token_ids=_lists(observed, observation),
            source="tool",
            **per_observation,
        )
    return tape


def _shuffled(tape: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    rng = np.random.default_rng(1)
    return {kind: table.take(pa.array(rng.permutation(table.num_rows))) for kind, table in tape.items()}


def _best(call: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds: the machine may be shared."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def measure(name: str, tape: Mapping[str, pa.Table]) -> None:
    folded = fold(tape)
    assert set(folded.trajectories["tito_ok"].to_pylist()) == {True}
    assert not any(folded.trajectories["untrainable_reasons"].to_pylist())
    responses = folded.segments["response_token_ids"]
    num_tokens = sum(len(chunk.flatten()) for chunk in responses.chunks)
    seconds = _best(lambda: fold(tape))
    digest_s = _best(lambda: content_digests_of(folded), 3)
    ids = folded.segments["response_token_ids"].chunk(0).flatten().to_numpy()
    floor = _best(lambda: hashlib.sha256(memoryview(ids)).digest()) + _best(ids.copy)
    figures = {
        "case": name,
        "trajectories": folded.trajectories.num_rows,
        "tokens": num_tokens,
        "fold_ms": round(seconds * 1e3, 1),
        "us_per_trajectory": round(seconds * 1e6 / folded.trajectories.num_rows, 2),
        "mtok_per_s": round(num_tokens / seconds / 1e6, 1),
        "share": round(seconds / floor, 2),
        "content_digests_ms": round(digest_s * 1e3, 1),
    }
    print(json.dumps(figures))


def main() -> None:
    plain = make_tape(1_024, prompt=256, tokens=4_096, turns=1, observation=0)
    measure("plain: 1,024 of 4k tokens", plain)
    measure("plain, shuffled", _shuffled(plain))
    short = make_tape(65_536, prompt=16, tokens=12, turns=1, observation=0)
    measure("short: 65,536 of 12 tokens", short)
    measure("short, shuffled", _shuffled(short))
    measure("agentic: 1,024 of 16 turns", make_tape(1_024, prompt=256, tokens=128, turns=16, observation=128))


if __name__ == "__main__":
    main()
