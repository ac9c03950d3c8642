"""Packing folded segments into tensors: one copy from Arrow, row by row, no per-token Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rolltape.trainers.batch import PackedBatch, TeacherScores
from rolltape.trainers.supports import SegmentSupports, SupportPacker

Offsets = npt.NDArray[np.int64]

# Rows of later parts may be longer than those of the first.
_MARGIN: Final = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSegments:
    """The token columns of a segments table as flat arrays, ids and log-probs without a copy.

    Row ``s`` owns ``prompt[prompt_at[s]:prompt_at[s + 1]]`` and, in the four response arrays, the entries from its own
    offset on; all of a row's response arrays have one length.
    """

    prompt: npt.NDArray[np.int32]
    prompt_at: Offsets
    response: npt.NDArray[np.int32]
    response_at: Offsets
    mask: npt.NDArray[np.bool_]
    mask_at: Offsets
    log_probs: npt.NDArray[np.float32]
    log_probs_at: Offsets
    null: npt.NDArray[np.bool_] | None
    versions: npt.NDArray[np.int64]
    versions_at: Offsets

    @classmethod
    def of(cls, segments: pa.Table) -> Self:
        """From a table of ``fold_schema.SEGMENT_SCHEMA``."""
        prompt, prompt_at = flat_values(_column(segments, "prompt_token_ids"))
        response, response_at = flat_values(_column(segments, "response_token_ids"))
        mask, mask_at = flat_values(_column(segments, "response_mask"))
        log_prob_column = _column(segments, "rollout_log_probs")
        log_probs, log_probs_at = flat_values(log_prob_column)
        child = log_prob_column.values
        versions, versions_at = flat_values(_column(segments, "policy_versions"))
        return cls(
            prompt=prompt,
            prompt_at=prompt_at,
            response=response,
            response_at=response_at,
            mask=mask,
            mask_at=mask_at,
            log_probs=log_probs,
            log_probs_at=log_probs_at,
            null=child.is_null().to_numpy(zero_copy_only=False) if child.null_count else None,
            versions=versions,
            versions_at=versions_at,
        )

    def has_action(self) -> npt.NDArray[np.bool_]:
        """Whether each row has a token to train."""
        starts, ends = self.mask_at[:-1], self.mask_at[1:]
        found = ends > starts
        found[found] = self.mask[starts[found]]  # most rows begin with a sampled token
        for row in np.flatnonzero(~found & (ends > starts)).tolist():
            found[row] = self.mask[starts[row] : ends[row]].any()
        return found


def _column(table: pa.Table, name: str) -> pa.ListArray:
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def flat_values(column: pa.ListArray) -> tuple[npt.NDArray[Any], Offsets]:
    """Flat values of a list array and its int64 offsets into them. Nulls inside keep their buffer value (0)."""
    offsets = np.asarray(column.offsets, dtype=np.int64)
    child = column.values
    if pa.types.is_boolean(child.type):
        return _bools(child), offsets
    width = np.dtype(child.type.to_pandas_dtype())
    buffer = child.buffers()[1]
    if buffer is None:
        return np.empty(0, width), offsets
    return np.frombuffer(buffer, width)[child.offset : child.offset + len(child)], offsets


def _bools(child: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    if child.null_count:
        child = child.fill_null(False)
    if not len(child):
        return np.empty(0, np.bool_)
    first = child.offset // 8
    end = child.offset + len(child)
    packed = np.frombuffer(child.buffers()[1], np.uint8, -(-end // 8) - first, first)
    bits = np.unpackbits(packed, count=end - 8 * first, bitorder="little")
    return bits[child.offset - 8 * first :].view(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScore:
    """What a teacher said of a row: of its ``L`` tokens from ``start`` on, context tokens counted."""

    start: int
    log_probs: npt.NDArray[np.float32]  # [L]
    top_k_ids: npt.NDArray[np.int32] | None = None  # [L, k]
    top_k_log_probs: npt.NDArray[np.float32] | None = None  # [L, k]


class BatchBuilder:
    """Packs rows part by part into one set of tensors.

    The size of the whole is estimated from the first part: memory that is asked for and never written costs nothing,
    so a batch that is read part by part is held once, at 13 bytes a token beside one part's events.
    """

    def __init__(self, num_members: int = 0, *, with_scores: bool = False, top_k: int = 0) -> None:
        """Expect about ``num_members`` members in all (0: unknown).

        ``with_scores``: teachers' scores are packed too, with the ``top_k`` likeliest tokens of each.
        """
        self._num_members = num_members
        self._token_ids = np.empty(0, np.int32)
        self._action_mask = np.empty(0, np.bool_)
        self._log_probs = np.empty(0, np.float32)
        self._versions = np.empty(0, np.int32)
        self._with_scores, self._top_k = with_scores, top_k
        self._scores = np.empty(0, np.float32)
        self._top_ids = np.empty((0, top_k), np.int64)
        self._top_log_probs = np.empty((0, top_k), np.float32)
        self._num_tokens = 0
        self._context_lengths: list[int] = []
        self._lengths: list[int] = []
        self._row_member: list[int] = []
        self._supports = SupportPacker()

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return len(self._lengths)

    def add(
        self,
        flat: FlatSegments,
        row_indexes: Sequence[int],
        row_member: Sequence[int],
        scores: Sequence[RowScore | None] = (),
        supports: SegmentSupports | None = None,
    ) -> None:
        """Pack rows of ``flat`` in the order given; a row may be taken twice (padding copies).

        ``scores`` are of each row, where the builder packs any. A sampled token that is not in its own support gets no
        log-prob: whatever the tape holds for it is none.
        """
        rows = np.asarray(row_indexes, dtype=np.int64)
        contexts = flat.prompt_at[rows + 1] - flat.prompt_at[rows]
        responses = flat.response_at[rows + 1] - flat.response_at[rows]
        lengths = contexts + responses
        start = self._num_tokens
        self._reserve(start + int(lengths.sum()), max(row_member, default=0) + 1)
        columns = (flat.prompt_at, flat.response_at, flat.mask_at, flat.log_probs_at, flat.versions_at)
        begins = [at[rows].tolist() for at in columns]
        # One slice copy a row and column: a few microseconds a row, memcpy speed for long ones.
        for context, response, *places in zip(contexts.tolist(), responses.tolist(), *begins, strict=True):
            self._copy(flat, places, start, start + context, start + context + response)
            start += context + response
        if self._with_scores:
            self._add_scores(lengths, scores)
        if supports is not None:
            self._add_supports(supports, rows, contexts, lengths)
        self._num_tokens = start
        self._context_lengths += contexts.tolist()
        self._lengths += lengths.tolist()
        self._row_member += row_member

    def _reserve(self, num_tokens: int, members_so_far: int) -> None:
        if num_tokens <= len(self._token_ids):
            return
        expected = num_tokens * max(1.0, self._num_members / members_so_far)
        size = num_tokens if members_so_far >= self._num_members else int(expected * _MARGIN)
        names = ["_token_ids", "_action_mask", "_log_probs", "_versions"]
        if self._with_scores:
            names += ["_scores", "_top_ids", "_top_log_probs"]
        for name in names:
            old = getattr(self, name)
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[: self._num_tokens] = old[: self._num_tokens]
            setattr(self, name, new)

    def _copy(self, flat: FlatSegments, places: Sequence[int], start: int, middle: int, end: int) -> None:
        """Copy a row whose columns begin at ``places``: context to ``start:middle``, response to ``middle:end``."""
        prompt, response, mask, log_prob, version = places
        length = end - middle
        self._token_ids[start:middle] = flat.prompt[prompt : prompt + middle - start]
        self._token_ids[middle:end] = flat.response[response : response + length]
        self._action_mask[start:middle] = False
        self._action_mask[middle:end] = flat.mask[mask : mask + length]
        self._log_probs[start:middle] = 0.0
        self._log_probs[middle:end] = flat.log_probs[log_prob : log_prob + length]
        if flat.null is not None:
            bad = flat.null[log_prob : log_prob + length] & self._action_mask[middle:end]
            self._log_probs[middle:end][bad] = np.nan
        self._versions[start:middle] = -1
        self._versions[middle:end] = flat.versions[version : version + length]

    def _add_scores(self, lengths: Offsets, scores: Sequence[RowScore | None]) -> None:
        """Write the scores of rows of these lengths behind the tokens that were there; what has none is NaN and -1."""
        start = self._num_tokens
        end = start + int(lengths.sum())
        self._scores[start:end] = np.nan
        self._top_ids[start:end] = -1
        self._top_log_probs[start:end] = np.nan
        for length, score in zip(lengths.tolist(), scores, strict=True):
            if score is not None:
                tokens = slice(start + score.start, start + score.start + len(score.log_probs))
                self._scores[tokens] = score.log_probs
                if score.top_k_ids is not None:
                    self._top_ids[tokens] = score.top_k_ids
                    self._top_log_probs[tokens] = score.top_k_log_probs
            start += length

    def _add_supports(self, supports: SegmentSupports, rows: Offsets, contexts: Offsets, lengths: Offsets) -> None:
        """Note the supports of rows of these lengths, behind the tokens that were there."""
        end = self._num_tokens
        for row, context, length in zip(rows.tolist(), contexts.tolist(), lengths.tolist(), strict=True):
            response = slice(end + context, end + length)
            end += length
            own = supports.of_row(row)
            if own is not None:
                outside = self._supports.add(
                    own, response.start, self._token_ids[response], self._action_mask[response]
                )
                self._log_probs[response][outside] = np.nan

    def scores(self, teacher_ids: tuple[str | None, ...]) -> TeacherScores:
        """What teachers said of all rows added; ``teacher_ids`` of the members."""
        total, has_top_k = self._num_tokens, self._top_k > 0
        return TeacherScores(
            log_probs=torch.from_numpy(self._scores)[:total],
            teacher_ids=teacher_ids,
            top_k_ids=torch.from_numpy(self._top_ids)[:total] if has_top_k else None,
            top_k_log_probs=torch.from_numpy(self._top_log_probs)[:total] if has_top_k else None,
        )

    def finish(
        self, *, rewards: Sequence[float], groups: Sequence[int], is_padding: Sequence[bool], **more: Any
    ) -> PackedBatch:
        """The batch of all rows added.

        ``rewards``, dense ``groups`` and ``is_padding`` are of its M members; ``more`` are further fields of the batch.
        """
        total = self._num_tokens
        lengths = np.asarray(self._lengths, np.int64)
        return PackedBatch(
            token_ids=torch.from_numpy(self._token_ids)[:total],
            cu_seqlens=torch.from_numpy(np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))),
            context_lengths=torch.as_tensor(self._context_lengths, dtype=torch.int64),
            action_mask=torch.from_numpy(self._action_mask)[:total],
            rollout_log_probs=torch.from_numpy(self._log_probs)[:total],
            policy_versions=torch.from_numpy(self._versions)[:total],
            row_member=torch.as_tensor(self._row_member, dtype=torch.int64),
            rewards=torch.as_tensor(rewards, dtype=torch.float64),
            groups=torch.as_tensor(groups, dtype=torch.int64),
            is_padding=torch.as_tensor(is_padding, dtype=torch.bool),
            support=self._supports.finish(total),
            **more,
        )
