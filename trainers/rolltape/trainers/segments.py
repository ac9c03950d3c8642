"""Which of a rollout's segments are trained, and where rewards of single tokens fall in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch

from rolltape.schema.fold import Fold
from rolltape.schema.fold_schema import SUMMARY
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.compaction import complete_rollouts
from rolltape.trainers.packing import FlatSegments

Attempt = tuple[str, int]
"""(trajectory, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSegments:
    """The segments of a fold that have a token to train.

    Attributes:
        flat: the token columns of all segments.
        rows: of each attempt the rows of its trained segments, in the order of the tape.
        numbers: ``[S]``, segment index of each segment of the fold.
        is_summary: ``[S]``.
    """

    flat: FlatSegments
    rows: Mapping[Attempt, Sequence[int]]
    numbers: npt.NDArray[np.int32]
    is_summary: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, folded: Fold, rules: BatchRules) -> TrainedSegments:
        """Those that ``rules`` train; without tokens of its own left to train, a segment is none of them."""
        segments = folded.segments
        flat = FlatSegments.of(segments)
        is_summary = np.asarray(pc.equal(segments["segment_kind"], SUMMARY), np.bool_)
        numbers = np.asarray(segments["segment_index"], np.int32)
        is_last = np.append(numbers[1:] <= numbers[:-1], np.ones(min(1, len(numbers)), np.bool_))
        # A rollout may end in a summary, as one that was cut off does: nothing rejected it, it is the last action.
        is_rejected = ~np.asarray(segments["is_accepted"].fill_null(True), np.bool_) & ~is_last
        trained = flat.has_action()
        if not rules.train_summary:
            trained &= ~is_summary
        if not rules.train_rejected_summaries:
            trained &= ~is_rejected
        chosen = np.flatnonzero(trained)
        taken = segments.select(["trajectory_id", "attempt"])
        taken = taken if len(chosen) == len(taken) else taken.take(chosen)
        found: dict[Attempt, list[int]] = {}
        # A fold's rows are ordered by (run, trajectory, attempt, segment).
        keys = zip(taken["trajectory_id"].to_pylist(), taken["attempt"].to_pylist(), strict=True)
        for row, key in zip(chosen.tolist(), keys, strict=True):
            found.setdefault(key, []).append(row)
        return cls(flat=flat, rows=found, numbers=numbers, is_summary=is_summary)

    def of_attempt(self, key: Attempt) -> Sequence[int]:
        """Rows of an attempt; none for one that has nothing to train."""
        return self.rows.get(key, ())

    def place_of_reward(self, rows: Sequence[int], segment: int, position: int) -> tuple[int, int] | None:
        """Where a reward of one token is credited: number among ``rows``, and place in that row's response.

        Where the token itself is not trained (masked, or of a segment that is not), that is the last trained token
        before it. None where there is no such token: no return of a later token has the reward in it.
        """
        numbers = self.numbers[list(rows)]
        nth = int(np.searchsorted(numbers, segment, side="right")) - 1
        while nth >= 0:
            row = rows[nth]
            start, end = int(self.flat.mask_at[row]), int(self.flat.mask_at[row + 1])
            last = position if numbers[nth] == segment else end - start - 1
            if self.flat.mask[start : start + last + 1].any():
                return nth, last
            nth -= 1
        return None


def lacking_segments(folded: Fold) -> set[Attempt]:
    """Attempts of which a segment is missing, or there twice: they are trained whole or not at all."""
    trajectories = folded.trajectories
    expected = np.asarray(trajectories["num_segments"], np.int64)
    index = np.asarray(folded.segments["segment_index"], np.int64)
    ends = np.cumsum(expected)
    counted = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - expected, expected)
    if np.array_equal(counted, index):
        return set()  # a fold's rows stand in the order of its trajectories
    keys = list(zip(trajectories["trajectory_id"].to_pylist(), trajectories["attempt"].to_pylist(), strict=True))
    number = {key: row for row, key in enumerate(keys)}
    names = ("trajectory_id", "attempt")
    owners = zip(*(folded.segments[name].to_pylist() for name in names), strict=True)
    owner = torch.tensor([number[key] for key in owners], dtype=torch.int64)
    complete = complete_rollouts(owner, torch.from_numpy(index), torch.from_numpy(expected))
    return {keys[row] for row in torch.nonzero(~complete).flatten().tolist()}


def limited_supports(folded: Fold, rules: BatchRules) -> set[Attempt]:
    """Attempts whose log-probs nothing can be compared with: they are over a part of the vocabulary that is not known.

    A kept support that the tape holds for all tokens is replayed; a teacher's scores are over the whole vocabulary.
    """
    supports = folded.supports
    if rules.teacher != "scores":
        supports = supports.filter(pc.invert(supports["is_whole"]))
    if not supports.num_rows:
        return set()
    taken = folded.segments.select(["trajectory_id", "attempt"]).take(supports["segment"])
    return set(zip(taken["trajectory_id"].to_pylist(), taken["attempt"].to_pylist(), strict=True))


def token_reward_rows(folded: Fold, index: Mapping[Attempt, int]) -> dict[Attempt, list[dict[str, Any]]]:
    """Rewards of single tokens of the attempts that have any; ``index`` is the fold's."""
    column = folded.trajectories["token_rewards"]
    if not sum(len(chunk.flatten()) for chunk in column.chunks):
        return {}
    found = {key: column[row].as_py() for key, row in index.items()}
    return {key: rewards for key, rewards in found.items() if rewards}
