"""What a writer of the fault suite records: a function of the seed, so that the judge can make it again.

A block is 32 trajectories of four groups: a start, eight actions and an end for each, one call of the recorder a turn.
Event ids name producer, block, call and row; contents come from a generator that is seeded with the same four.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.schema.digest import PrefixHasher

NUM_ROWS: Final = 32
NUM_GROUPS: Final = 4
NUM_ACTIONS: Final = 8
NUM_CALLS: Final = NUM_ACTIONS + 2
EVENTS_PER_BLOCK: Final = NUM_CALLS * NUM_ROWS
RUN_ID: Final = "faults"
ID_WIDTH: Final = len("p0-00000-000-000")

_SAMPLING: Final = {"temperature": 1.0, "logprobs_mode": "processed_logprobs"}
_LIST_OF_IDS: Final = pa.list_(pa.field("element", pa.int32()))
_LIST_OF_LOG_PROBS: Final = pa.list_(pa.field("element", pa.float32()))


class LongAction(NamedTuple):
    """An action of ``num_tokens`` in the first row of one call."""

    block: int
    call: int
    num_tokens: int


class Content(NamedTuple):
    """Tokens of one call: row ``i`` owns ``ids[ends[i]:ends[i + 1]]``; ``log_probs`` is empty for a prompt."""

    kind: str
    ends: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]

    def row(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        part = slice(self.ends[row], self.ends[row + 1])
        return self.ids[part], self.log_probs[part] if self.log_probs.size else self.log_probs


@dataclass(frozen=True)
class Workload:
    """Everything that one producer records: blocks in a burst each, with ``pause_s`` between them."""

    seed: int
    producer_id: str
    num_blocks: int
    pause_s: float = 0.2
    long_actions: tuple[LongAction, ...] = ()

    @cached_property
    def _producer_number(self) -> int:
        return zlib.crc32(self.producer_id.encode())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        fields = json.loads(text)
        return cls(**{**fields, "long_actions": tuple(LongAction(*action) for action in fields["long_actions"])})

    def event_ids(self, block: int, call: int) -> list[str]:
        return [f"{self.producer_id}-{block:05d}-{call:03d}-{row:03d}" for row in range(NUM_ROWS)]

    def trajectory_ids(self, block: int) -> list[str]:
        return [f"{self.producer_id}-{block:05d}-{row:03d}" for row in range(NUM_ROWS)]

    def content(self, block: int, call: int) -> Content:
        """Tokens of one call; the same for the same seed, in any process."""
        if call == NUM_CALLS - 1:
            none = np.zeros(0, np.int32)
            return Content("rollout_ended", np.zeros(NUM_ROWS + 1, np.int32), none, none.view(np.float32))
        rng = np.random.default_rng((self.seed, self._producer_number, block, call))
        lengths = rng.integers(16, 192, NUM_ROWS)
        for action in self.long_actions:
            if (action.block, action.call) == (block, call):
                lengths[0] = action.num_tokens
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        ids = rng.integers(0, 150_000, int(ends[-1]), dtype=np.int32)
        if call == 0:
            return Content("rollout_started", ends, ids, np.zeros(0, np.float32))
        return Content("action_sampled", ends, ids, -rng.exponential(size=len(ids)).astype(np.float32))

    def calls(self, block: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Kind and columns of each call of a block, as the recorder takes them."""
        common = {
            "trajectory_id": self.trajectory_ids(block),
            "attempt": 0,
            "group_id": [f"{self.producer_id}-{block:05d}-g{row % NUM_GROUPS}" for row in range(NUM_ROWS)],
            "problem_id": [f"problem-{row % NUM_GROUPS}" for row in range(NUM_ROWS)],
        }
        contexts = [PrefixHasher() for _ in range(NUM_ROWS)]
        lengths = np.zeros(NUM_ROWS, np.int64)
        num_actions = np.zeros(NUM_ROWS, np.int64)
        for call in range(NUM_CALLS):
            content = self.content(block, call)
            own = {"event_id": self.event_ids(block, call), **common}
            if content.kind == "rollout_started":
                own["prompt_token_ids"] = _lists(content.ends, content.ids)
            elif content.kind == "action_sampled":
                own |= _action(content, call, contexts, lengths)
                num_actions += np.diff(content.ends)
            else:
                own |= {"status": "completed", "num_action_tokens": num_actions, "num_observation_tokens": 0}
            lengths += np.diff(content.ends)
            for row, context in enumerate(contexts):
                context.update(content.row(row)[0])
            yield content.kind, own

    def digests(self, block: int, call: int) -> dict[str, str]:
        """What :func:`content_digest` must say of each event of one call."""
        content = self.content(block, call)
        rows = enumerate(self.event_ids(block, call))
        return {event_id: content_digest(content.kind, *content.row(row)) for row, event_id in rows}


def _action(
    content: Content, call: int, contexts: list[PrefixHasher], lengths: npt.NDArray[np.int64]
) -> dict[str, Any]:
    return {
        "turn_index": call - 1,
        "action_kind": "execution",
        "token_ids": _lists(content.ends, content.ids),
        "rollout_log_probs": _lists(content.ends, content.log_probs),
        "sampling": _SAMPLING,
        "prefix_length": lengths.copy(),
        "prefix_digest": [context.digest() for context in contexts],
        "prefix_source": "engine",
    }


def _lists(ends: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> pa.ListArray:
    type_ = _LIST_OF_IDS if values.dtype == np.int32 else _LIST_OF_LOG_PROBS
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values), type=type_)


def content_digest(kind: str, ids: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> str:
    """Digest of one event's kind, token ids and log-prob bits."""
    hasher = hashlib.blake2b(kind.encode(), digest_size=8)
    hasher.update(np.ascontiguousarray(ids).view(np.uint8).data)
    hasher.update(b"|")
    hasher.update(np.ascontiguousarray(log_probs).view(np.uint8).data)
    return hasher.hexdigest()


def digests_of(kind: str, table: pa.Table) -> dict[str, str]:
    """:func:`content_digest` of each row of a table of one kind, as a reader or the lake gave it, by event id."""
    found: dict[str, str] = {}
    for batch in table.to_batches():
        ids, ends = _flat(batch, _TOKENS[kind], np.int32)
        log_probs, log_prob_ends = _flat(batch, _LOG_PROBS[kind], np.float32)
        for row, event_id in enumerate(batch.column("event_id").to_pylist()):
            own_ids = ids[ends[row] : ends[row + 1]]
            own = log_probs[log_prob_ends[row] : log_prob_ends[row + 1]]
            found[event_id] = content_digest(kind, own_ids, own)
    return found


_TOKENS: Final = {"rollout_started": "rollout_started.prompt_token_ids", "action_sampled": "token_ids"}
_TOKENS["rollout_ended"] = ""
_LOG_PROBS: Final = {"rollout_started": "", "action_sampled": "rollout_log_probs", "rollout_ended": ""}


def _flat(batch: pa.RecordBatch, name: str, dtype: type[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Elements of a list column and the rows' bounds in them; no element where the kind has no such column."""
    if not name:
        return np.zeros(0, dtype), np.zeros(batch.num_rows + 1, np.int64)
    outer, _, inner = name.partition(".")
    column = batch.column(outer)
    if inner:
        column = column.field(inner)
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return values, offsets
