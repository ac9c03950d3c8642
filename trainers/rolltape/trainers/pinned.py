"""Pinned batches: writing down exactly what a step trains, and reading exactly that again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.digest import batch_digest
from rolltape.schema.errors import DigestMismatchError, ReplayError
from rolltape.schema.fold import Fold, content_digests_of, fold
from rolltape.schema.kinds.training import MEMBER_TYPE
from rolltape.schema.render import arrow_schema
from rolltape.store.lake import Lake
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.members import (
    GRPO_RULES,
    Dropped,
    Member,
    MemberPacker,
    fold_index,
    one_temperature,
    temperatures_of,
)
from rolltape.trainers.recorded import read_events
from rolltape.trainers.score_book import ScoreBook
from rolltape.trainers.segments import TrainedSegments

MEMBERS_PER_PART: Final = 64
"""Members that are read and folded at once; a whole batch's events would double its memory."""

_PINNED: Final = (
    "trajectory_id",
    "attempt",
    "group_id",
    "group_ordinal",
    "member",
    "is_padding",
    "last_event_index",
    "reward_event_ids",
    "mask_event_ids",
    "teacher_event_ids",
    "teacher_digest",
)

# Tensor names as the trainer sees them, by the digest column that covers each.
TENSOR_OF_DIGEST: Final = {
    "token_ids_digest": "token_ids",
    "log_probs_digest": "rollout_log_probs",
    "masks_digest": "masks",
    "versions_digest": "policy_versions",
    "rewards_digest": "reward",
}


def member_columns(
    folded: Fold, members: Sequence[Member], rules: BatchRules = GRPO_RULES, book: ScoreBook | None = None
) -> tuple[pa.StructArray, str]:
    """The ``members`` structs of ``batch_formed`` in order, and the batch digest over their contents.

    Named, with a digest over what they say, are the scores that ``book`` has of each member, where ``rules`` use any.
    The reward is the tape's, before what the configuration makes of a truncated rollout's.
    """
    index = fold_index(folded)
    rows = [index[m.trajectory_id, m.attempt] for m in members]
    trajectories = folded.trajectories.take(pa.array(rows, pa.int64())).combine_chunks()
    digests = content_digests_of(folded)
    digest_row = {
        key: row
        for row, key in enumerate(
            zip(digests["trajectory_id"].to_pylist(), digests["attempt"].to_pylist(), strict=True)
        )
    }
    wanted = [digest_row[m.trajectory_id, m.attempt] for m in members]
    taken = digests.take(pa.array(wanted, pa.int64())).combine_chunks()

    def column(name: str) -> pa.Array:
        return _one_array(trajectories[name])

    scores = _teacher_event_ids(folded, members, rules, book)
    said = book.digests(scores.to_pylist()) if book is not None else [None] * len(members)
    fields: dict[str, pa.Array] = {
        "trajectory_id": column("trajectory_id"),
        "attempt": column("attempt"),
        "group_id": column("group_id"),
        "group_ordinal": pa.array([m.group_ordinal for m in members], pa.int32()),
        "member": pa.array([m.member for m in members], pa.int32()),
        "last_event_index": column("last_event_index"),
        "reward_event_ids": column("reward_event_ids"),
        "teacher_event_ids": scores,
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
        "teacher_digest": pa.array(said, pa.int64()),
    }
    arrays = [fields[name].cast(type_) for name, type_ in _MEMBER.items()]
    structs = pa.StructArray.from_arrays(arrays, names=list(_MEMBER))
    return structs, batch_digest(fields["content_digest"].to_pylist())


def _teacher_event_ids(folded: Fold, members: Sequence[Member], rules: BatchRules, book: ScoreBook | None) -> pa.Array:
    """Of each member the scores of its trained segments, in their order; null where no scores are read."""
    if book is None or rules.teacher != "scores":
        return pa.nulls(len(members), _MEMBER["teacher_event_ids"])
    segments = TrainedSegments.of(folded, rules)
    rows = book.match(folded, segments, [member.key for member in members]).rows
    scored = ([rows[row] for row in segments.of_attempt(member.key)] for member in members)
    return pa.array([[book.event_id(score) for score in own] for own in scored], _MEMBER["teacher_event_ids"])


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


_MEMBER: Final = {f.name: f.type for f in MEMBER_TYPE.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedBatch:
    """A recorded batch, read again from the lake and proven equal to what was recorded."""

    batch_id: str
    step: int
    members: tuple[Member, ...]  # that are packed
    dropped: tuple[Dropped, ...]
    packed: PackedBatch
    digest: str
    rewards: pa.Table
    temperature: float


def read_pinned(lake: Lake, run_id: str, batch_id: str, rules: BatchRules = GRPO_RULES) -> PinnedBatch:
    """Read the events of a recorded batch, exactly those that it names, and pack them part by part.

    Args:
        lake: where it is.
        run_id: its run.
        batch_id: the batch.
        rules: of the configuration that is to train it: the run's own for a replay, another's for the question what
            another method would have made of it. Where they use scores and the batch names none, all count that the
            lake has; where they use no groups the copies that fill them are left out.

    Raises:
        ReplayError: the batch or one of its members is not on the tape.
        DigestMismatchError: a member's content is not what was trained; names the trajectory and the tensor.
        UntrainableError: the rules need a teacher's scores that the tape does not have.
    """
    row = _batch_row(lake, run_id, batch_id)
    pinned = pc.list_flatten(pc.struct_field(row, "members"))
    columns: Mapping[str, list[Any]] = {name: pc.struct_field(pinned, name).to_pylist() for name in _PINNED}
    members = tuple(
        Member(trajectory_id=t, attempt=a, group_id=g, group_ordinal=o, member=m, is_padding=bool(p))
        for t, a, g, o, m, p in zip(*(columns[name] for name in _PINNED[:6]), strict=True)
    )
    started = lake.read("run_started", run_id=run_id)
    book = _pinned_book(lake, run_id, started, rules, columns)
    if book is not None:
        _compare_scores(batch_id, columns, book)
    packer = MemberPacker(rules, book, num_members=len(members))
    contents: list[str] = []
    reward_tables: list[pa.Table] = []
    temperatures: set[float] = set()
    for first in range(0, len(members), MEMBERS_PER_PART):
        part = slice(first, first + MEMBERS_PER_PART)
        events = _pinned_events(lake, run_id, {name: values[part] for name, values in columns.items()})
        folded = fold({**events, "run_started": started})
        _require_members(batch_id, folded, members[part])
        structs, _ = member_columns(folded, members[part], rules)
        _compare(batch_id, pinned[part], structs)
        contents += structs.field("content_digest").to_pylist()
        packer.add(folded, _trained(members[part], rules))
        reward_tables.append(events["reward_assigned"])
        temperatures |= temperatures_of(folded, members[part])
    return PinnedBatch(
        batch_id=batch_id,
        step=pc.struct_field(row, "step")[0].as_py(),
        members=_trained(members, rules),
        dropped=tuple(Dropped(**one) for one in pc.list_flatten(pc.struct_field(row, "dropped")).to_pylist()),
        packed=packer.finish(),
        digest=batch_digest(contents),
        rewards=pa.concat_tables(reward_tables) if reward_tables else arrow_schema("reward_assigned").empty_table(),
        temperature=one_temperature(temperatures),
    )


def _trained(members: tuple[Member, ...], rules: BatchRules) -> tuple[Member, ...]:
    """Those that ``rules`` train: copies fill up groups, and a method without groups trains each rollout once."""
    return members if rules.uses_groups else tuple(member for member in members if not member.is_padding)


def _pinned_book(
    lake: Lake, run_id: str, started: pa.Table, rules: BatchRules, columns: Mapping[str, list[Any]]
) -> ScoreBook | None:
    """What teachers said of a batch's members: exactly the scores that it names, all where it names none."""
    if not rules.uses_teacher:
        return None
    events = {kind: lake.read(kind, run_id=run_id) for kind in ("problem_registered", "teacher_routed")}
    if rules.teacher == "scores":
        scored = lake.read("teacher_scored", run_id=run_id, trajectory_ids=sorted(set(columns["trajectory_id"])))
        named = [event for ids in columns["teacher_event_ids"] for event in ids or ()]
        if named:
            scored = scored.filter(pc.is_in(scored["event_id"], pa.array(named, pa.string())))
        events["teacher_scored"] = scored
    return ScoreBook.of(events, started, rules)


def _compare_scores(batch_id: str, columns: Mapping[str, list[Any]], book: ScoreBook) -> None:
    """Refuse scores that say other things than those that were trained on; one that is gone is refused when matched."""
    names = ("trajectory_id", "teacher_digest")
    found = book.digests(columns["teacher_event_ids"])
    for trajectory, recorded, now in zip(*(columns[name] for name in names), found, strict=True):
        if None not in (recorded, now) and recorded != now:
            raise DigestMismatchError(
                f"batch {batch_id}: trajectory {trajectory} is not what was trained: its teacher's scores differ "
                f"(recorded digest {recorded}, now {now}); is a score on the tape twice, or was it changed?"
            )


def _batch_row(lake: Lake, run_id: str, batch_id: str) -> pa.StructArray:
    table = lake.read("batch_formed", run_id=run_id)
    struct = table["batch_formed"].combine_chunks()
    match = struct.filter(pc.equal(pc.struct_field(struct, "batch_id"), batch_id))
    if not len(match):
        raise ReplayError(
            f"run {run_id} has no batch {batch_id!r}; expected one of its {table.num_rows}; "
            "the view batches lists them with their steps"
        )
    return match[:1]


def _require_members(batch_id: str, folded: Fold, members: Sequence[Member]) -> None:
    index = fold_index(folded)
    for member in members:
        if member.key not in index:
            raise ReplayError(
                f"batch {batch_id}: trajectory {member.trajectory_id} attempt {member.attempt} is not on the tape"
            )


def _pinned_events(lake: Lake, run_id: str, columns: Mapping[str, list[Any]]) -> dict[str, pa.Table]:
    ids = sorted(set(columns["trajectory_id"]))
    at = lake.snapshot()
    # The rewards are handed on, so they are read whole.
    events = read_events(
        lambda kind, names: lake.read(kind, columns=names, run_id=run_id, trajectory_ids=ids, snapshot=at),
        whole=("reward_assigned",),
    )
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
