"""Members of a batch: who they are, their rows in a fold, and their packed tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rolltape.schema import reasons
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold
from rolltape.trainers.batch import PackedBatch, TokenRewards
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.packing import BatchBuilder, RowScore
from rolltape.trainers.safe_math import is_stand_in
from rolltape.trainers.score_book import Matched, ScoreBook
from rolltape.trainers.segments import TrainedSegments, limited_supports, token_reward_rows
from rolltape.trainers.supports import SegmentSupports

TRUNCATED: Final = "truncated"
GRPO_RULES: Final = BatchRules()


class Member(NamedTuple):
    """One member of a batch: a trajectory's attempt, or a padding copy of one.

    A named tuple, because a batch makes thousands of them and a frozen dataclass takes ten times as long.
    """

    trajectory_id: str
    attempt: int
    group_id: str
    group_ordinal: int
    member: int
    is_padding: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """What names its record on the tape."""
        return (self.trajectory_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A candidate that is not trained, and the named reason."""

    trajectory_id: str
    attempt: int
    group_id: str | None
    reason: str


def fold_index(folded: Fold) -> dict[tuple[str, int], int]:
    """Row of each (trajectory, attempt) in ``folded.trajectories``."""
    table = folded.trajectories
    keys = zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
    return {key: row for row, key in enumerate(keys)}


def dense_groups(keys: Sequence[str]) -> npt.NDArray[np.int64]:
    """A number for each key, from 0, in the order of first appearance."""
    numbers: dict[str, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def pack_members(
    folded: Fold, members: Sequence[Member], rules: BatchRules = GRPO_RULES, book: ScoreBook | None = None
) -> PackedBatch:
    """Packed tensors of the members' segments that are trained, in member order then segment order.

    A member without a token to train (an empty response) has no row; its reward still counts in its group.
    """
    packer = MemberPacker(rules, book, num_members=len(members))
    packer.add(folded, members)
    return packer.finish()


class MemberPacker:
    """Packs members part by part into one batch.

    Args:
        rules: which segments are trained, with which reward.
        book: what teachers said, where the rules use it.
        num_members: in all, about.
    """

    def __init__(self, rules: BatchRules = GRPO_RULES, book: ScoreBook | None = None, *, num_members: int = 0) -> None:
        self._rules = rules
        self._book = book if rules.uses_teacher else None
        self._builder = BatchBuilder(num_members, with_scores=self._book is not None, top_k=rules.top_k)
        self._members: list[Member] = []
        self._rewards: list[float] = []
        self._is_truncated: list[bool] = []
        self._num_segments: list[int] = []
        self._segment_index: list[int] = []
        self._is_summary: list[bool] = []
        self._token_rewards: list[tuple[float, int, int]] = []
        self._problems: list[str | None] = []
        self._modes: set[str | None] = set()

    def add(self, folded: Fold, members: Sequence[Member]) -> None:
        """Add members of a fold that holds them.

        Raises:
            UntrainableError: a member's teacher has not scored it, or scored something else, or its log-probs are over
                a support that cannot be replayed; names the reason.
        """
        self._require_comparable(folded, members)
        segments = TrainedSegments.of(folded, self._rules)
        index = fold_index(folded)
        columns = {name: folded.trajectories[name].to_pylist() for name in ("reward", "status", "problem_id")}
        token_rewards = token_reward_rows(folded, {member.key: index[member.key] for member in members})
        matched = self._matched(folded, segments, members)
        rows: list[int] = []
        row_member: list[int] = []
        for number, member in enumerate(members, len(self._members)):
            place = index[member.key]
            is_truncated = columns["status"][place] == TRUNCATED
            own = () if is_truncated and self._rules.truncated == "mask" else segments.of_attempt(member.key)
            reward = self._rules.final_reward(columns["reward"][place], is_truncated=is_truncated)
            given = token_rewards.get(member.key, ())
            if not (is_truncated and self._rules.truncated == "zero_reward"):
                num_placed = self._place_rewards(given, segments, own, self._builder.num_rows + len(rows))
                if given and not num_placed and math.isnan(reward) and self._rules.takes_token_rewards:
                    reward = 0.0  # only tokens were rewarded, and none of them is trained: no reward is missing
            rows += own
            row_member += [number] * len(own)
            self._segment_index += range(len(own))
            self._num_segments.append(len(own))
            self._rewards.append(reward)
            self._is_truncated.append(is_truncated)
            self._problems.append(columns["problem_id"][place])
        self._is_summary += segments.is_summary[rows].tolist()
        with_rows = [index[member.key] for member in members if segments.of_attempt(member.key)]
        self._modes |= set(
            folded.trajectories["logprobs_mode"].take(pa.array(with_rows, pa.int64())).unique().to_pylist()
        )
        scores, supports = self._scores(matched, segments, rows), SegmentSupports.of(folded.supports)
        self._builder.add(segments.flat, rows, row_member, scores, supports)
        self._members += members

    def finish(self) -> PackedBatch:
        """The batch of all members added.

        Raises:
            UntrainableError: their log-probs are of more than one declared distribution.
        """
        if len(self._modes) > 1:
            raise UntrainableError(
                f"{reasons.MIXED_LOGPROBS_MODE}: expected log-probs of one declared distribution in a batch, got "
                f"{sorted(map(str, self._modes))}; train them apart"
            )
        more: dict[str, Any] = {}
        if self._book is not None:
            domains = tuple(self._book.domain_of(problem) for problem in self._problems)
            teachers = (self._book.teacher_of(problem) for problem in self._problems)
            scored = zip(teachers, self._num_segments, strict=True)
            ids = tuple(teacher if count else None for teacher, count in scored)
            more = {"domains": domains, "teacher": self._builder.scores(ids)}
        amounts, rows, positions = zip(*self._token_rewards, strict=True) if self._token_rewards else ((), (), ())
        batch = self._builder.finish(
            rewards=self._rewards,
            groups=dense_groups([m.group_id for m in self._members]).tolist(),
            is_padding=[m.is_padding for m in self._members],
            segment_index=torch.as_tensor(self._segment_index, dtype=torch.int64),
            is_summary=torch.as_tensor(self._is_summary, dtype=torch.bool),
            num_segments=torch.as_tensor(self._num_segments, dtype=torch.int64),
            is_truncated=torch.as_tensor(self._is_truncated, dtype=torch.bool),
            token_rewards=TokenRewards(
                amounts=torch.as_tensor(amounts, dtype=torch.float64),
                rows=torch.as_tensor(rows, dtype=torch.int64),
                positions=torch.as_tensor(positions, dtype=torch.int64),
            ),
            **more,
        )
        teacher = batch.teacher
        for values in (batch.rollout_log_probs, *((teacher.log_probs, teacher.top_k_log_probs) if teacher else ())):
            if values is not None:
                values[is_stand_in(values, self._rules.sentinels)] = torch.nan
        return batch

    def _require_comparable(self, folded: Fold, members: Sequence[Member]) -> None:
        limited = limited_supports(folded, self._rules) if self._rules.needs_ratio else set()
        for member in members if limited else ():
            if member.key in limited:
                raise UntrainableError(
                    f"{reasons.LIMITED_SUPPORT}: trajectory {member.trajectory_id} attempt {member.attempt}: "
                    f"{reasons.REASONS[reasons.LIMITED_SUPPORT]}; leave it out, or sample with top_p 1 and top_k 0"
                )

    def _matched(self, folded: Fold, segments: TrainedSegments, members: Sequence[Member]) -> Matched | None:
        if self._book is None:
            return None
        matched = self._book.match(folded, segments, [member.key for member in members])
        for refused in (matched.refusals, matched.awaiting):
            for (trajectory, attempt), reason in refused.items():
                raise UntrainableError(
                    f"{reason}: trajectory {trajectory} attempt {attempt}: {reasons.REASONS[reason]}; expected a score "
                    "of its own teacher for each of its segments, have the teacher score it or leave it out"
                )
        return matched

    def _scores(self, matched: Matched | None, segments: TrainedSegments, rows: Sequence[int]) -> list[RowScore | None]:
        if self._book is None or matched is None:
            return []
        book, found = self._book, (matched.rows.get(row) for row in rows)
        return [
            None if score is None else book.row_score(score, segments.flat, row)
            for score, row in zip(found, rows, strict=True)
        ]

    def _place_rewards(
        self, rewards: Sequence[dict[str, Any]], segments: TrainedSegments, own: Sequence[int], first_row: int
    ) -> int:
        """Note rewards of single tokens of a member whose rows are numbered from ``first_row`` on; how many fell."""
        before = len(self._token_rewards)
        for reward in rewards:
            place = segments.place_of_reward(own, reward["segment_index"], reward["position"]) if own else None
            if place is not None:
                self._token_rewards.append((reward["scalar"], first_row + place[0], place[1]))
        return len(self._token_rewards) - before


def temperatures_of(folded: Fold, members: Sequence[Member]) -> set[float]:
    """Temperatures at which the members' actions were sampled."""
    wanted = {member.key for member in members}
    rows = folded.trajectories.select(["trajectory_id", "attempt", "temperature"]).to_pylist()
    return {
        row["temperature"]
        for row in rows
        if row["temperature"] is not None and (row["trajectory_id"], row["attempt"]) in wanted
    }


def one_temperature(found: set[float]) -> float:
    """The one temperature of a batch; 1.0 for a batch without actions.

    Raises:
        UntrainableError: there are several.
    """
    if len(found) > 1:
        raise UntrainableError(f"{reasons.MIXED_TEMPERATURE}: one batch holds actions sampled at {sorted(found)}")
    return next(iter(found), 1.0)
