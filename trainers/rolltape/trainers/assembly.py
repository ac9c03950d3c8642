"""Batch assembly: from folded rollouts to a plan of who is trained, who is dropped and why, and to packed tensors.

The filter order is algorithms.md §2.2: integrity → environment failures → staleness → teachers → groups. A rollout is
one unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import torch

from rolltape.schema import reasons
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold
from rolltape.schema.fold_schema import EARNED
from rolltape.trainers.advantages import group_statistics
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.groups import complete_groups
from rolltape.trainers.members import GRPO_RULES, TRUNCATED, Dropped, Member, dense_groups
from rolltape.trainers.score_book import ScoreBook
from rolltape.trainers.segments import Attempt, TrainedSegments, lacking_segments, limited_supports
from rolltape.trainers.staleness import version_refusal

# Where the tape gives no ordinal (imports): behind all that have one.
_NO_PLACE: Final = 2**31 - 1
_SMALLEST_GROUP: Final = 2
_RAW: Final = "raw"

_CANDIDATE: Final = [
    "trajectory_id",
    "attempt",
    "group_id",
    "group_ordinal",
    "member",
    "group_size",
    "status",
    "reward",
    "reward_state",
    "untrainable_reasons",
    "min_version",
    "max_version",
    "num_action_tokens",
    "logprobs_mode",
    "temperature",
    "is_current",
    "root_rollout_id",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRules:
    """What the filters need to know of versions (algorithms.md §4.5, D29).

    Attributes:
        current: version of the weights that the step starts from (θ_old).
        newest: newest published version without an abort, pinned with the batch.
        staleness_tau: largest lag that is kept.
        single_version: every action token must be of ``current`` (IcePop's precondition).
        off_line: attempts (trajectory, attempt) with tokens of a version that is not on the run's live line.
    """

    current: int
    newest: int
    staleness_tau: int = 0
    single_version: bool = True
    off_line: Collection[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Members in training order, and every candidate that is not trained.

    ``awaiting`` are those of the dropped that a teacher may yet score: whoever can wait, waits for them.
    """

    members: tuple[Member, ...]
    dropped: tuple[Dropped, ...]
    awaiting: frozenset[Attempt] = frozenset()

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Count of dropped candidates by reason."""
        return dict(Counter(item.reason for item in self.dropped))


def refusal(row: dict[str, Any], versions: VersionRules, rules: BatchRules = GRPO_RULES) -> str | None:
    """The first reason, in filter order, why a folded trajectory cannot be trained; None if it can."""
    found = list(row["untrainable_reasons"] or ())
    if reasons.ENV_FAILED in found:
        return reasons.ENV_FAILED
    if reasons.REWARD_MISSING in found and _needs_no_reward(row, rules):
        found.remove(reasons.REWARD_MISSING)
    if found:
        return str(found[0])
    if str(row["logprobs_mode"] or "").startswith(_RAW) and row["temperature"] not in {None, 1.0}:
        return reasons.UNSCALED_LOG_PROBS  # of another distribution than the one that sampled; never rescaled (§5.3)
    low, high = row["min_version"], row["max_version"]
    if low is None or high is None:
        return None if row["num_action_tokens"] == 0 else reasons.UNKNOWN_VERSION
    if (row["trajectory_id"], row["attempt"]) in versions.off_line:
        return reasons.ABORTED_VERSION
    return version_refusal(
        low,
        high,
        reference=versions.newest,
        tau=versions.staleness_tau,
        required=versions.current if versions.single_version else None,
    )


def _needs_no_reward(row: dict[str, Any], rules: BatchRules) -> bool:
    """Whether a rollout without a reward of the whole attempt can be trained.

    The state is the worst of all judgements, so an earned one without a scalar means that single tokens were
    rewarded, and that nobody said that a reward of the whole is missing.
    """
    return not rules.needs_reward or (rules.takes_token_rewards and row["reward_state"] == EARNED)


def plan_batch(
    folded: Fold, versions: VersionRules, rules: BatchRules = GRPO_RULES, book: ScoreBook | None = None
) -> BatchPlan:
    """Decide who is trained.

    Candidates are the current attempts, ordered by (group ordinal, member): never by id, file or time. Where members
    are compared within groups, a branch is none of its own: statistics are per root (design §4), and no source says
    which advantage the branch's tokens would have.

    Args:
        folded: the candidates.
        versions: what versions may have sampled them.
        rules: what else the configuration asks of them.
        book: what teachers said; needed where ``rules`` use it.

    Raises:
        UntrainableError: ``group_of_one``: a group estimator was given a group of one.
    """
    rows = [row for row in folded.trajectories.select(_CANDIDATE).to_pylist() if row["is_current"]]
    rows.sort(key=lambda r: (_last(r["group_ordinal"]), r["group_id"] or "", _last(r["member"]), r["trajectory_id"]))
    is_branch = [rules.uses_groups and row["root_rollout_id"] != row["trajectory_id"] for row in rows]
    branches = [*compress(rows, is_branch)]
    rows = [row for row, forked in zip(rows, is_branch, strict=True) if not forked]
    why = [refusal(row, versions, rules) for row in rows]
    _refuse_among(rows, why, lacking_segments(folded), reasons.SEGMENT_MISSING)
    if rules.needs_ratio:
        _refuse_among(rows, why, limited_supports(folded, rules), reasons.LIMITED_SUPPORT)
    awaiting = _refuse_unscored(folded, rows, why, rules, book)
    dropped = [_dropped(row, reason) for row, reason in zip(rows, why, strict=True) if reason is not None]
    valid = [index for index, reason in enumerate(why) if reason is None]
    kept = _whole_groups(rows, why, rules) if rules.uses_groups else [(index, False) for index in valid]
    dropped += [_dropped(rows[index], reason) for index in valid if (reason := why[index]) is not None]
    members = tuple(_member(rows[index], padding=padding) for index, padding in kept)
    dropped += [_dropped(row, reasons.BRANCH) for row in branches]
    return BatchPlan(members=members, dropped=tuple(dropped), awaiting=awaiting)


def _refuse_among(
    rows: Sequence[dict[str, Any]], why: list[str | None], attempts: Collection[Attempt], reason: str
) -> None:
    """Refuse some attempts; ``why`` holds each row's reason so far, and gets this one where it has none."""
    for index, row in enumerate(rows if attempts else ()):
        if why[index] is None and _key(row) in attempts:
            why[index] = reason


def _refuse_unscored(
    folded: Fold, rows: Sequence[dict[str, Any]], why: list[str | None], rules: BatchRules, book: ScoreBook | None
) -> frozenset[Attempt]:
    """Refuse rollouts without their own teacher's scores; returns those that may be scored yet."""
    if not rules.uses_teacher:
        return frozenset()
    if book is None:
        raise UntrainableError(
            f"{reasons.TEACHER_SCORE_MISSING}: expected the teachers' scores with these rollouts, got none; read "
            "teacher_scored, teacher_routed and problem_registered too"
        )
    keys = [_key(row) for row, reason in zip(rows, why, strict=True) if reason is None]
    matched = book.match(folded, TrainedSegments.of(folded, rules), keys)
    for index, row in enumerate(rows):
        if why[index] is None:
            why[index] = matched.refusals.get(_key(row)) or matched.awaiting.get(_key(row))
    return frozenset(matched.awaiting)


def _whole_groups(rows: Sequence[dict[str, Any]], why: list[str | None], rules: BatchRules) -> list[tuple[int, bool]]:
    """Rows that are trained and whether each is a copy; ``why`` gets the reasons of valid ones that are not."""
    groups = dense_groups([row["group_id"] or row["trajectory_id"] for row in rows])
    sizes = _expected_sizes(rows, groups)
    if rows and sizes.min() < _SMALLEST_GROUP:
        lone = rows[int(sizes.argmin())]
        raise UntrainableError(
            f"{reasons.GROUP_OF_ONE}: group {lone['group_id']} of trajectory {lone['trajectory_id']} has one member; "
            "a group estimator needs two or more (OPD and SAO take single rollouts)"
        )
    valid = np.asarray([reason is None for reason in why], np.bool_)
    plan = complete_groups(
        torch.from_numpy(groups), torch.from_numpy(sizes), torch.from_numpy(valid), pad_rule=rules.pad_rule
    )
    kept = list(zip(plan.member_index.tolist(), plan.is_padding.tolist(), strict=True))
    for index in sorted(set(np.flatnonzero(valid).tolist()) - {index for index, _ in kept}):
        why[index] = reasons.GROUP_INCOMPLETE
    return _with_spread(rows, groups, kept, why, rules) if rules.drops_zero_std else kept


def _with_spread(
    rows: Sequence[dict[str, Any]],
    groups: np.ndarray[Any, np.dtype[np.int64]],
    kept: list[tuple[int, bool]],
    why: list[str | None],
    rules: BatchRules,
) -> list[tuple[int, bool]]:
    """Those of the kept rows in whose group rewards differ."""
    if not kept:
        return kept
    index = [row for row, _ in kept]
    rewards = [rules.final_reward(rows[row]["reward"], is_truncated=rows[row]["status"] == TRUNCATED) for row in index]
    statistics = group_statistics(torch.tensor(rewards, dtype=torch.float64), torch.from_numpy(groups[index]))
    equal = statistics.zero_std.numpy()
    for row in index:
        if equal[groups[row]]:
            why[row] = reasons.ZERO_STD_GROUP
    return [(row, padding) for row, padding in kept if not equal[groups[row]]]


def _key(row: dict[str, Any]) -> Attempt:
    return (row["trajectory_id"], row["attempt"])


def _last(value: int | None) -> int:
    return _NO_PLACE if value is None else value


def _expected_sizes(
    rows: Sequence[dict[str, Any]], groups: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Expected size of each row's group: what was dispatched, or (imports) what is there."""
    present = np.bincount(groups) if len(groups) else np.zeros(0, np.int64)
    return np.asarray([row["group_size"] or present[group] for row, group in zip(rows, groups, strict=True)], np.int64)


def _dropped(row: dict[str, Any], reason: str) -> Dropped:
    return Dropped(trajectory_id=row["trajectory_id"], attempt=row["attempt"], group_id=row["group_id"], reason=reason)


def _member(row: dict[str, Any], *, padding: bool) -> Member:
    return Member(
        trajectory_id=row["trajectory_id"],
        attempt=row["attempt"],
        group_id=row["group_id"] or row["trajectory_id"],
        group_ordinal=_last(row["group_ordinal"]),
        member=_last(row["member"]),
        is_padding=padding,
    )
