"""Writing one attempt at a rollout, event by event, with the context that a faithful engine would use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from tests.conftest import Tape

from rolltape.schema.digest import prefix_digest
from rolltape.schema.fold import Fold

SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}


def version_runs(*runs: tuple[int, int, int], policy: str = "actor", epoch: int = 1) -> list[dict[str, Any]]:
    """Runs (start, length, version) of one policy."""
    return [
        {"start": start, "length": length, "policy_id": policy, "run_epoch": epoch, "version": version}
        for start, length, version in runs
    ]


class AttemptWriter:
    """Records one attempt; ``context`` is what the engine would see next, ``index`` the next event index."""

    def __init__(self, tape: Tape, trajectory_id: str, attempt: int = 0, **envelope: Any) -> None:
        self.tape = tape
        self.context: list[int] = []
        self.index = 0
        self.num_action_tokens = 0
        self.num_observation_tokens = 0
        self._envelope = {"trajectory_id": trajectory_id, "attempt": attempt, "group_id": "g", **envelope}

    def add(self, kind: str, *, indexed: bool = True, **columns: Any) -> str:
        """Any event of this attempt."""
        if indexed:
            columns.setdefault("event_index", self.index)
            self.index = columns["event_index"] + 1
        return self.tape.add(kind, **{**self._envelope, **columns})[0]

    def skip(self) -> int:
        """An event that never reaches the tape; returns its index."""
        self.index += 1
        return self.index - 1

    def start(self, prompt: Sequence[int] | None = (1, 2), **columns: Any) -> str:
        """The start, with the context of segment 0."""
        self.context = list(prompt or ())
        ids = [None] if prompt is None else [list(prompt)]
        return self.add("rollout_started", prompt_token_ids=ids, **columns)

    def act(
        self,
        tokens: Sequence[int],
        *,
        version: int | None = 0,
        log_probs: Sequence[float | None] | None = None,
        seen: Sequence[int] | None = None,
        keep_ids: bool = False,
        **columns: Any,
    ) -> str:
        """An action; ``seen`` is the engine's context where it is not the tape's (``keep_ids`` records its ids)."""
        context = self.context if seen is None else list(seen)
        fields: dict[str, Any] = {
            "token_ids": [list(tokens)],
            "rollout_log_probs": [[-0.5] * len(tokens) if log_probs is None else list(log_probs)],
            "action_kind": "execution",
            "version_runs": [None if version is None else version_runs((0, len(tokens), version))],
            "sampling": [SAMPLING],
            "prefix_length": len(context),
            "prefix_digest": prefix_digest(context),
            "prefix_source": "engine",
        }
        if keep_ids:
            fields["prefix_token_ids"] = [list(context)]
        self.context += list(tokens)
        self.num_action_tokens += len(tokens)
        return self.add("action_sampled", **{**fields, **columns})

    def observe(self, tokens: Sequence[int], **columns: Any) -> str:
        """An observation."""
        self.context += list(tokens)
        self.num_observation_tokens += len(tokens)
        return self.add("observation_received", **{"token_ids": [list(tokens)], "source": "tool", **columns})

    def rewrite(self, context: Sequence[int], reason: str = "compaction", **columns: Any) -> str:
        """A rewritten context: the next segment."""
        self.context = list(context)
        return self.add("context_rewritten", reason=reason, context_token_ids=[list(context)], **columns)

    def resume(self, from_attempt: int, from_event_index: int, context: Sequence[int]) -> str:
        """This attempt goes on from an event of an older one."""
        self.context = list(context)
        return self.add("rollout_resumed", from_attempt=from_attempt, from_event_index=from_event_index)

    def end(self, status: str = "completed", **columns: Any) -> str:
        """The end, with true check sums."""
        sums = {
            "num_action_tokens": self.num_action_tokens,
            "num_observation_tokens": self.num_observation_tokens,
            "last_event_index": self.index,
        }
        return self.add("rollout_ended", status=status, **{**sums, **columns})

    def reward(self, scalar: float | None = 1.0, state: str = "earned", **columns: Any) -> str:
        """A reward."""
        return self.add("reward_assigned", indexed=False, scalar=scalar, state=state, **columns)

    def dead_letter(self, first: int, last: int | None = None) -> str:
        """A refused record that would have filled a range of this attempt's event indexes."""
        bounds = {"first_event_index": first, "last_event_index": first if last is None else last}
        return self.add("dead_letter", indexed=False, reason="length_mismatch", **bounds)


def whole(tape: Tape, trajectory_id: str, tokens: Sequence[int] = (5, 6, 7), **columns: Any) -> AttemptWriter:
    """A plain attempt: one action, ended, rewarded."""
    writer = AttemptWriter(tape, trajectory_id)
    writer.start()
    writer.act(tokens, **columns)
    writer.end()
    writer.reward()
    return writer


def row(folded: Fold, trajectory_id: str, attempt: int = 0) -> dict[str, Any]:
    """The trajectory row of one attempt."""
    rows = folded.trajectories.to_pylist()
    found = [r for r in rows if r["trajectory_id"] == trajectory_id and r["attempt"] == attempt]
    assert len(found) == 1, f"{len(found)} rows of {trajectory_id}/{attempt}"
    [only] = found
    assert isinstance(only, dict)
    return only


def segments(folded: Fold, trajectory_id: str, attempt: int = 0) -> list[dict[str, Any]]:
    """The segment rows of one attempt, in order."""
    rows = folded.segments.to_pylist()
    return [r for r in rows if r["trajectory_id"] == trajectory_id and r["attempt"] == attempt]


def shuffled(events: dict[str, pa.Table], seed: int, copies: int = 1) -> dict[str, pa.Table]:
    """The same events in another order, in other chunks, each ``copies`` times."""
    rng = np.random.default_rng(seed)
    out = {}
    for kind in rng.permutation(sorted(events)).tolist():
        table = events[kind]
        order = rng.permutation(np.tile(np.arange(table.num_rows), copies))
        cut = int(rng.integers(0, len(order) + 1))
        parts = [table.take(pa.array(part)) for part in (order[:cut], order[cut:])]
        out[kind] = pa.concat_tables(parts)
    return out
