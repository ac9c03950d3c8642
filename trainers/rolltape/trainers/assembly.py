"""Batch assembly: from folded rollouts to a plan of who is trained, who is dropped and why, and to packed tensors.

The filter order is algorithms.md §2.2: integrity → environment failures → staleness → groups. A rollout is one unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from rolltape.schema import reasons
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold
from rolltape.trainers.groups import PadRule, complete_groups
from rolltape.trainers.members import Dropped, Member, dense_groups
from rolltape.trainers.staleness import version_refusal

# Where the tape gives no ordinal (imports): behind all that have one.
_NO_PLACE: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRules:
    """What the filters need to know of versions (algorithms.md §4.5, D29).

    Attributes:
        current: version of the weights that the step starts from (θ_old).
        newest: newest published version without an abort, pinned with the batch.
        aborted: versions that never serve.
        staleness_tau: largest lag that is kept.
        single_version: every action token must be of ``current`` (IcePop's precondition).
        off_line: attempts (trajectory, attempt) with tokens of a version that is not on the run's live line.
    """

    current: int
    newest: int
    aborted: Collection[int] = ()
    staleness_tau: int = 0
    single_version: bool = True
    off_line: Collection[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Members in training order, and every candidate that is not trained."""

    members: tuple[Member, ...]
    dropped: tuple[Dropped, ...]

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Count of dropped candidates by reason."""
        return dict(Counter(item.reason for item in self.dropped))


def refusal(row: dict[str, Any], rules: VersionRules) -> str | None:
    """The first reason, in filter order, why a folded trajectory cannot be trained; None if it can."""
    found = list(row["untrainable_reasons"] or ())
    if reasons.ENV_FAILED in found:
        return reasons.ENV_FAILED
    if found:
        return str(found[0])
    low, high = row["min_version"], row["max_version"]
    if low is None or high is None:
        return None if row["num_action_tokens"] == 0 else reasons.UNKNOWN_VERSION
    if (row["trajectory_id"], row["attempt"]) in rules.off_line:
        return reasons.ABORTED_VERSION
    return version_refusal(
        low,
        high,
        reference=rules.newest,
        tau=rules.staleness_tau,
        aborted=rules.aborted,
        required=rules.current if rules.single_version else None,
    )


def plan_batch(
    folded: Fold, rules: VersionRules, *, pad_rule: PadRule = "gt_half", group_method: bool = True
) -> BatchPlan:
    """Decide who is trained.

    Candidates are the current attempts, ordered by (group ordinal, member): never by id, file or time.

    Raises:
        UntrainableError: ``group_of_one``: a group estimator was given a group of one.
    """
    names = [
        "trajectory_id",
        "attempt",
        "group_id",
        "group_ordinal",
        "member",
        "group_size",
        "untrainable_reasons",
        "min_version",
        "max_version",
        "num_action_tokens",
        "is_current",
    ]
    rows = [row for row in folded.trajectories.select(names).to_pylist() if row["is_current"]]
    rows.sort(key=lambda r: (_last(r["group_ordinal"]), r["group_id"] or "", _last(r["member"]), r["trajectory_id"]))
    why = [refusal(row, rules) for row in rows]
    groups = dense_groups([row["group_id"] or row["trajectory_id"] for row in rows])
    sizes = _expected_sizes(rows, groups)
    if group_method and rows and sizes.min() < 2:
        lone = rows[int(sizes.argmin())]
        raise UntrainableError(
            f"{reasons.GROUP_OF_ONE}: group {lone['group_id']} of trajectory {lone['trajectory_id']} has one member; "
            "a group estimator needs two or more (OPD and SAO take single rollouts)"
        )
    valid = np.asarray([reason is None for reason in why], np.bool_)
    dropped = [_dropped(row, reason) for row, reason in zip(rows, why, strict=True) if reason is not None]
    if not group_method:
        return BatchPlan(
            members=tuple(_member(row, padding=False) for row, ok in zip(rows, valid, strict=True) if ok),
            dropped=tuple(dropped),
        )
    plan = complete_groups(
        torch.from_numpy(groups), torch.from_numpy(sizes), torch.from_numpy(valid), pad_rule=pad_rule
    )
    kept = plan.member_index.tolist()
    left = sorted(set(np.flatnonzero(valid).tolist()) - set(kept))
    dropped += [_dropped(rows[index], reasons.GROUP_INCOMPLETE) for index in left]
    members = tuple(_member(rows[i], padding=p) for i, p in zip(kept, plan.is_padding.tolist(), strict=True))
    return BatchPlan(members=members, dropped=tuple(dropped))


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
