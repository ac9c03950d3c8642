"""Pinned batches: writing down exactly what a step trains, and reading exactly that again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema import reasons
from rolltape.schema.digest import batch_digest
from rolltape.schema.errors import DigestMismatchError, ReplayError, UntrainableError
from rolltape.schema.fold import Fold, content_digests_of, fold
from rolltape.store.lake import Lake

FOLDED_KINDS: Final = (
    "run_started",
    "rollout_dispatched",
    "rollout_started",
    "rollout_resumed",
    "action_sampled",
    "observation_received",
    "context_rewritten",
    "rollout_ended",
    "reward_assigned",
    "mask_assigned",
)

# Tensor names as the trainer sees them, by the digest column that covers each.
TENSOR_OF_DIGEST: Final = {
    "token_ids_digest": "token_ids",
    "log_probs_digest": "rollout_log_probs",
    "masks_digest": "masks",
    "versions_digest": "policy_versions",
    "rewards_digest": "reward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a batch: a trajectory's attempt, or a padding copy of one."""

    trajectory_id: str
    attempt: int
    group_id: str
    group_ordinal: int
    member: int
    is_padding: bool = False


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


def member_columns(folded: Fold, members: Sequence[Member]) -> tuple[pa.StructArray, str]:
    """The ``members`` structs of ``batch_formed`` in order, and the batch digest over their contents."""
    index = fold_index(folded)
    rows = [index[m.trajectory_id, m.attempt] for m in members]
    trajectories = folded.trajectories.take(rows).combine_chunks()
    digests = content_digests_of(folded)
    digest_row = {
        key: row
        for row, key in enumerate(
            zip(digests["trajectory_id"].to_pylist(), digests["attempt"].to_pylist(), strict=True)
        )
    }
    taken = digests.take([digest_row[m.trajectory_id, m.attempt] for m in members]).combine_chunks()
    count = len(members)

    def column(name: str) -> pa.Array:
        return _one_array(trajectories[name])

    fields: dict[str, pa.Array] = {
        "trajectory_id": column("trajectory_id"),
        "attempt": column("attempt"),
        "group_id": column("group_id"),
        "group_ordinal": pa.array([m.group_ordinal for m in members], pa.int32()),
        "member": pa.array([m.member for m in members], pa.int32()),
        "last_event_index": column("last_event_index"),
        "reward_event_ids": column("reward_event_ids"),
        "teacher_event_ids": pa.nulls(count, _MEMBER["teacher_event_ids"]),
        "mask_event_ids": column("mask_event_ids"),
        "reward": column("reward"),
        "is_padding": pa.array([m.is_padding for m in members], pa.bool_()),
        "source_trajectory_id": pa.array([m.trajectory_id if m.is_padding else None for m in members], pa.string()),
        "content_digest": _one_array(taken["content"]),
        "token_ids_digest": _one_array(taken["token_ids"]),
        "log_probs_digest": _one_array(taken["log_probs"]),
        "masks_digest": _one_array(taken["masks"]),
        "versions_digest": _one_array(taken["versions"]),
        "rewards_digest": _one_array(taken["rewards"]),
    }
    arrays = [fields[name].cast(type_) for name, type_ in _MEMBER.items()]
    structs = pa.StructArray.from_arrays(arrays, names=list(_MEMBER))
    return structs, batch_digest(fields["content_digest"].to_pylist())


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _member_types() -> dict[str, pa.DataType]:
    from rolltape.schema.kinds.training import MEMBER_TYPE

    return {f.name: f.type for f in MEMBER_TYPE.fields}


_MEMBER: Final = _member_types()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedBatch:
    """A recorded batch, read again from the lake and proven equal to what was recorded."""

    batch_id: str
    step: int
    folded: Fold
    members: tuple[Member, ...]
    member_structs: pa.StructArray
    digest: str
    rewards: pa.Table
    temperature: float


def read_pinned(lake: Lake, run_id: str, batch_id: str, *, check: bool = True) -> PinnedBatch:
    """Read the events of a recorded batch, exactly those that it names, and fold them.

    Raises:
        ReplayError: the batch or one of its members is not on the tape.
        DigestMismatchError: a member's content is not what was trained; names the trajectory and the tensor.
    """
    table = lake.read("batch_formed", run_id=run_id)
    match = (
        table.filter(pc.equal(pc.struct_field(table["batch_formed"], "batch_id"), batch_id))
        if table.num_rows
        else table
    )
    if not match.num_rows:
        raise ReplayError(f"run {run_id} has no batch {batch_id!r}")
    row = match["batch_formed"].combine_chunks()
    pinned = pc.list_flatten(pc.struct_field(row, "members"))
    columns: Mapping[str, list[Any]] = {name: pc.struct_field(pinned, name).to_pylist() for name in _MEMBER}
    members = tuple(
        Member(trajectory_id=t, attempt=a, group_id=g, group_ordinal=o, member=m, is_padding=bool(p))
        for t, a, g, o, m, p in zip(
            columns["trajectory_id"],
            columns["attempt"],
            columns["group_id"],
            columns["group_ordinal"],
            columns["member"],
            columns["is_padding"],
            strict=True,
        )
    )
    events = _pinned_events(lake, run_id, columns)
    folded = fold(events)
    index = fold_index(folded)
    for member in members:
        if (member.trajectory_id, member.attempt) not in index:
            raise ReplayError(
                f"batch {batch_id}: trajectory {member.trajectory_id} attempt {member.attempt} is not on the tape"
            )
    structs, digest = member_columns(folded, members)
    if check:
        _compare(batch_id, pinned, structs)
    return PinnedBatch(
        batch_id=batch_id,
        step=pc.struct_field(row, "step")[0].as_py(),
        folded=folded,
        members=members,
        member_structs=structs,
        digest=digest,
        rewards=events["reward_assigned"],
        temperature=batch_temperature(folded, members),
    )


def batch_temperature(folded: Fold, members: Sequence[Member]) -> float:
    """The one temperature at which the members' actions were sampled; 1.0 for a batch without actions.

    Raises:
        UntrainableError: there are several.
    """
    wanted = {(m.trajectory_id, m.attempt) for m in members}
    rows = folded.trajectories.select(["trajectory_id", "attempt", "temperature"]).to_pylist()
    found = {
        row["temperature"]
        for row in rows
        if row["temperature"] is not None and (row["trajectory_id"], row["attempt"]) in wanted
    }
    if len(found) > 1:
        raise UntrainableError(f"{reasons.MIXED_TEMPERATURE}: one batch holds actions sampled at {sorted(found)}")
    return float(found.pop()) if found else 1.0


def _pinned_events(lake: Lake, run_id: str, columns: Mapping[str, list[Any]]) -> dict[str, pa.Table]:
    ids = sorted(set(columns["trajectory_id"]))
    events = lake.events([k for k in FOLDED_KINDS if k != "run_started"], run_id=run_id, trajectory_ids=ids)
    events["run_started"] = lake.read("run_started", run_id=run_id)
    for kind, name in (("reward_assigned", "reward_event_ids"), ("mask_assigned", "mask_event_ids")):
        wanted = pa.array([event for ids_ in columns[name] for event in ids_ or ()], pa.string())
        events[kind] = events[kind].filter(pc.is_in(events[kind]["event_id"], wanted))
    last = {
        (t, a): i
        for t, a, i in zip(columns["trajectory_id"], columns["attempt"], columns["last_event_index"], strict=True)
    }
    for kind in ("action_sampled", "observation_received", "context_rewritten", "rollout_ended"):
        events[kind] = _up_to(events[kind], last)
    return events


def _up_to(table: pa.Table, last: Mapping[tuple[str, int], int]) -> pa.Table:
    """Events of the pinned attempts up to their pinned last index (attempts not pinned are kept whole)."""
    if not table.num_rows:
        return table
    keys = zip(table["trajectory_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
    bound = np.fromiter((last.get(key, np.iinfo(np.int32).max) for key in keys), np.int64, table.num_rows)
    index = table["event_index"].fill_null(0).to_numpy()
    keep = index <= bound
    return table if keep.all() else table.filter(pa.array(keep))


def _compare(batch_id: str, recorded: pa.StructArray, now: pa.StructArray) -> None:
    was, is_ = recorded.field("content_digest").to_pylist(), now.field("content_digest").to_pylist()
    for row, (old, new) in enumerate(zip(was, is_, strict=True)):
        if old == new:
            continue
        differing = [
            tensor
            for name, tensor in TENSOR_OF_DIGEST.items()
            if recorded.field(name)[row].as_py() != now.field(name)[row].as_py()
        ]
        trajectory = recorded.field("trajectory_id")[row].as_py()
        raise DigestMismatchError(
            f"batch {batch_id}: trajectory {trajectory} is not what was trained: "
            f"{', '.join(differing) or 'content'} differs (recorded digest {old}, now {new})"
        )
