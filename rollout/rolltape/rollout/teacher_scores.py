"""From folded segments to what teachers say of them, and to the columns of ``teacher_scored`` (design §4).

One event a segment: its response ids, observations among them, each with the teacher's log-prob given everything before
it. Nothing here goes token by token: ids, log-probs and top-k payloads are flat arrays with offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rolltape.numerics.scoring import Scorer
from rolltape.numerics.top_k import teacher_top_k
from rolltape.rollout.seeds import derived_seed
from rolltape.schema.columns import FLOAT32, INT32, list_of
from rolltape.schema.digest import prefix_digest
from rolltape.schema.identity import derived_id

if TYPE_CHECKING:
    from rolltape.rollout.teacher_models import Teacher

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

SegmentKey = tuple[str, int, int]
"""(trajectory, attempt, segment index)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """``S`` segments to be scored, ids of all of them flat: of contexts ``[P]``, of responses ``[T]``."""

    rows: pa.Table  # identity: trajectory_id, attempt, segment_index, group_id, problem_id
    contexts: Int32
    context_bounds: Int64  # [S + 1]
    responses: Int32
    response_bounds: Int64  # [S + 1]
    is_observation: Bools  # [T]

    def __len__(self) -> int:
        return len(self.response_bounds) - 1

    @classmethod
    def of(cls, table: pa.Table) -> Segments:
        """From rows of :data:`rolltape.schema.fold.SEGMENT_SCHEMA` whose context is known."""
        context_bounds, contexts = _flat(table["prompt_token_ids"])
        response_bounds, responses = _flat(table["response_token_ids"])
        return cls(
            rows=table.select(["trajectory_id", "attempt", "segment_index", "group_id", "problem_id"]),
            contexts=contexts.to_numpy(),
            context_bounds=context_bounds,
            responses=responses.to_numpy(),
            response_bounds=response_bounds,
            is_observation=_flat(table["observation_mask"])[1].to_numpy(zero_copy_only=False),
        )

    @property
    def keys(self) -> list[SegmentKey]:
        """Which segment each row is."""
        names = ("trajectory_id", "attempt", "segment_index")
        return list(zip(*(self.rows[name].to_pylist() for name in names), strict=True))

    @property
    def context_lengths(self) -> Int64:
        """``[S]``."""
        return np.diff(self.context_bounds)

    @property
    def response_lengths(self) -> Int64:
        """``[S]``."""
        return np.diff(self.response_bounds)

    def packed(self) -> tuple[Int32, Int64, Bools]:
        """Ids of context and response row by row ``[N]``, bounds ``[S + 1]``, and which ids are scored ``[N]``.

        A response without a context has no distribution before its first id: that one is not scored.
        """
        lengths = self.context_lengths + self.response_lengths
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        is_response = np.ones(bounds[-1], np.bool_)
        is_response[_ranges(bounds[:-1], self.context_lengths)] = False
        ids = np.empty(bounds[-1], np.int32)
        ids[~is_response], ids[is_response] = self.contexts, self.responses
        return ids, bounds, is_response


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a teacher says of the response ids of some segments, flat."""

    log_probs: Float32  # [T], NaN where an id has no distribution before it
    top_k: int | None = None
    top_ids: Int32 | None = None  # [T, k]
    top_log_probs: Float32 | None = None  # [T, k]
    tail_mass: Float32 | None = None  # [T]

    def permuted(self, order: Int64) -> Scores:
        """Token ``t`` gets what was said of token ``order[t]``."""
        return Scores(
            log_probs=self.log_probs[order],
            top_k=self.top_k,
            top_ids=None if self.top_ids is None else self.top_ids[order],
            top_log_probs=None if self.top_log_probs is None else self.top_log_probs[order],
            tail_mass=None if self.tail_mass is None else self.tail_mass[order],
        )

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """One after another; all sampled, or all of the same k."""
        return cls(
            log_probs=np.concatenate([part.log_probs for part in parts]),
            top_k=parts[0].top_k,
            top_ids=_joined([part.top_ids for part in parts]),
            top_log_probs=_joined([part.top_log_probs for part in parts]),
            tail_mass=_joined([part.tail_mass for part in parts]),
        )


def score(segments: Segments, scorer: Scorer, *, top_k: int | None = None, num_ids: int | None = None) -> Scores:
    """Score the response ids of ``segments``; with ``top_k`` keep the likeliest of ``num_ids`` ids at each, too.

    Probabilities are those of the full distribution, not renormalised over the k.
    """
    ids, bounds, is_response = segments.packed()
    first = bounds[:-1][segments.context_lengths == 0]
    scored = is_response.copy()
    scored[first[first < len(ids)]] = False
    arguments = (torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(bounds.astype(np.int64)))
    wanted = torch.from_numpy(scored)
    if top_k is None:
        found = scorer.score(*arguments, scored=wanted).cpu().numpy().astype(np.float32, copy=False)
        log_probs = np.where(scored, found, np.float32(np.nan))
        return Scores(log_probs=log_probs[is_response])
    return _top_k(scorer, arguments, wanted, top_k, num_ids).of(is_response)


@dataclass(frozen=True, slots=True)
class _Flat:
    """Scores of all ids of a packed batch."""

    log_probs: Float32
    ids: Int32
    values: Float32
    tail: Float32

    def of(self, chosen: Bools) -> Scores:
        return Scores(
            log_probs=self.log_probs[chosen],
            top_k=self.ids.shape[1],
            top_ids=self.ids[chosen],
            top_log_probs=self.values[chosen],
            tail_mass=self.tail[chosen],
        )


def _top_k(
    scorer: Scorer, arguments: tuple[torch.Tensor, torch.Tensor], scored: torch.Tensor, k: int, num_ids: int | None
) -> _Flat:
    token_ids = arguments[0]
    count = len(token_ids)
    flat = _Flat(
        np.full(count, np.nan, np.float32),
        np.full((count, k), -1, np.int32),
        np.full((count, k), np.nan, np.float32),
        np.full(count, np.nan, np.float32),
    )
    for part in scorer.distributions(*arguments, scored=scored):
        places = part.flat_index.cpu()
        log_probs = part.log_probs.cpu()
        ids, values = teacher_top_k(log_probs[:, :num_ids], k)
        rows = places.numpy()
        flat.log_probs[rows] = log_probs.gather(1, token_ids[places][:, None]).squeeze(1).numpy()
        flat.ids[rows], flat.values[rows] = ids.numpy(), values.numpy()
        flat.tail[rows] = (1.0 - values.double().exp().sum(-1)).clamp(min=0.0).float().numpy()
    return flat


def shuffle_order(segments: Segments, domains: Sequence[str | None], *parts: int | str) -> Int64:
    """A permutation ``[T]`` of the tokens that were sampled, each among those of its own domain; a control.

    The mean over a domain stays what it was, so that nothing but who said what about which token is lost.

    Args:
        segments: ``S`` of them.
        domains: of each.
        parts: what the permutation depends on, beside the lengths: seed and place in the run.
    """
    names = sorted({domain or "" for domain in domains})
    number = np.array([names.index(domain or "") for domain in domains], np.int64)
    of_token = np.repeat(number, segments.response_lengths)
    order = np.arange(len(of_token))
    for index, name in enumerate(names):
        own = np.flatnonzero((of_token == index) & ~segments.is_observation)
        generator = np.random.default_rng(derived_seed("shuffled scores", name, *parts))
        order[own] = generator.permutation(own)
    return order


def scored_columns(
    segments: Segments, scores: Scores, teacher: Teacher, teacher_id: str, *, run_id: str
) -> dict[str, Any]:
    """Columns of ``teacher_scored``, one row a segment; the event id is derived from what is scored by whom."""
    identity = teacher.scorer.identity
    rows = segments.rows
    bounds = segments.response_bounds
    columns: dict[str, Any] = {
        name: rows[name].combine_chunks()
        for name in ("trajectory_id", "attempt", "group_id", "problem_id", "segment_index")
    }
    columns |= {
        "event_id": pa.array(
            [derived_id(run_id, "teacher_scored", teacher_id, identity.weights_digest, *key) for key in segments.keys]
        ),
        "teacher_id": teacher_id,
        "weights_digest": identity.weights_digest,
        "engine": {"name": identity.engine, "dtype": identity.dtype},
        "logprobs_mode": identity.logprobs_mode,
        "temperature": identity.temperature,
        "template_digest": teacher.vocabulary.template_digest,
        "tokenizer_digest": teacher.vocabulary.behaviour_digest,
        "prefix_digest": pa.array(_prefix_digests(segments)),
        "start_position": segments.context_lengths.astype(np.int32),
        "scored_token_ids": _lists(bounds, segments.responses, INT32),
        "log_probs": _lists(bounds, scores.log_probs, FLOAT32),
    }
    if scores.top_k is not None:
        assert scores.top_ids is not None
        assert scores.top_log_probs is not None
        assert scores.tail_mass is not None
        columns |= {
            "top_k": scores.top_k,
            "top_k_token_ids": _lists(bounds * scores.top_k, scores.top_ids.reshape(-1), INT32),
            "top_k_log_probs": _lists(bounds * scores.top_k, scores.top_log_probs.reshape(-1), FLOAT32),
            "tail_mass": _lists(bounds, scores.tail_mass, FLOAT32),
        }
    return columns


def _prefix_digests(segments: Segments) -> list[str]:
    """Digest of each context; rollouts of a group share one, which is then hashed once."""
    known: dict[bytes, str] = {}
    found = []
    for begin, end in zip(segments.context_bounds[:-1].tolist(), segments.context_bounds[1:].tolist(), strict=True):
        ids = segments.contexts[begin:end]
        key = ids.tobytes()
        if key not in known:
            known[key] = prefix_digest(ids)
        found.append(known[key])
    return found


def _flat(column: pa.ChunkedArray) -> tuple[Int64, pa.Array]:
    """Bounds ``[S + 1]`` from 0, and the values, of a list column."""
    lengths = pc.list_value_length(column).to_numpy()
    values = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), values.combine_chunks()


def _joined(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


def _ranges(starts: Int64, lengths: Int64) -> Int64:
    """All places of ``[start, start + length)``, one range after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places: Int64 = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return places


def _lists(bounds: Int64, values: npt.NDArray[Any], item: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(values, item), type=list_of(item))
