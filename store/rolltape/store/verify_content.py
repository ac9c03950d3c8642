"""Content digests: every batch member is folded again from what its batch pinned, and compared tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.digest import batch_digest
from rolltape.schema.kinds import KINDS
from rolltape.schema.render import arrow_schema
from rolltape.schema.score_digests import score_digests
from rolltape.store.verify_context import Context, Outcome, at_trajectory, outcome

TENSOR_NAMES: Final = {
    "token_ids": "token_ids",
    "log_probs": "rollout_log_probs",
    "masks": "masks",
    "versions": "policy_versions",
    "rewards": "reward",
}
"""Digest of ``content_digests_of`` → the tensor that it covers; batches store it as ``<digest>_digest``."""

_CHUNK: Final = 4_096  # members folded at once: bounds the memory, whatever the size of the lake
_PINNED: Final = (*(kind.name for kind in KINDS.values() if kind.indexed), "rollout_dispatched")
_RUN_KINDS: Final = ("run_started", "run_resumed")


def content_digests(context: Context) -> Outcome:
    """Recompute the digests of all pinned members and of their scores, and of each batch over its members' own."""
    members = context.rows(
        f"""
        SELECT m.*
        FROM batch_members m
        JOIN batch_formed b ON b.event_id = m.event_id
        WHERE {context.new("b")}
        ORDER BY m.run_id, m.trainer_id, m.batch_id, m.place
        """
    )
    broken: list[dict[str, Any]] = []
    counts: Counter[str] = Counter(padding=sum(member["is_padding"] for member in members))
    checked = [member for member in members if not member["is_padding"] and member["content_digest"] is not None]
    for part in _parts(checked):
        found = _recompute(context, part)
        for member in part:
            broken += _compare(member, found.get((member["trajectory_id"], member["attempt"])), counts)
        broken += _scores(context, part)
    broken += _batches(context)
    return outcome(len(checked), broken, dict(counts))


def _parts(members: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Members in parts, in none of which a trajectory appears twice: each part is folded with one set of pins."""
    waiting = list(members)
    while waiting:
        part: dict[str, dict[str, Any]] = {}
        later: list[dict[str, Any]] = []
        for member in waiting:
            taken = member["trajectory_id"] in part or len(part) >= _CHUNK
            if taken:
                later.append(member)
            else:
                part[member["trajectory_id"]] = member
        yield list(part.values())
        waiting = later


def _recompute(context: Context, members: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    from rolltape.schema.fold import content_digests_of, fold

    ids = [member["trajectory_id"] for member in members]
    events = context.source.read(_PINNED, as_of=None, trajectory_ids=ids)
    pinned = {kind: _upto(table, members) for kind, table in events.items()}
    pinned |= context.source.read(_RUN_KINDS, as_of=None)
    pinned |= _labels(context, members, ids)
    digests = content_digests_of(fold(pinned)).to_pylist()
    return {(row["trajectory_id"], row["attempt"]): row for row in digests}


def _upto(table: pa.Table, members: Sequence[dict[str, Any]]) -> pa.Table:
    """Events up to the last index that each member's batch saw; older attempts whole (a resumption needs them)."""
    place = pc.index_in(table["trajectory_id"], pa.array([member["trajectory_id"] for member in members]))
    at = place.to_numpy()
    attempts = np.array([member["attempt"] for member in members])[at]
    last = np.array([_or(member["last_event_index"], np.iinfo(np.int64).max) for member in members])[at]
    attempt = pc.fill_null(table["attempt"], 0).to_numpy()
    index = pc.fill_null(table["event_index"], -1).to_numpy()
    return table.filter(pa.array((attempt < attempts) | ((attempt == attempts) & (index <= last))))


def _labels(context: Context, members: Sequence[dict[str, Any]], ids: Sequence[str]) -> dict[str, pa.Table]:
    """Rewards and masks that the batches used; all of them where a batch does not say which."""
    tables = context.source.read(("reward_assigned", "mask_assigned"), as_of=None, trajectory_ids=ids)
    for kind, name in (("reward_assigned", "reward_event_ids"), ("mask_assigned", "mask_event_ids")):
        if kind not in tables:
            continue
        used = {event_id for member in members for event_id in member[name] or ()}
        free = [member["trajectory_id"] for member in members if member[name] is None]
        table = tables[kind]
        kept = pc.or_(
            pc.is_in(table["event_id"], pa.array(sorted(used), pa.string())),
            pc.is_in(table["trajectory_id"], pa.array(free, pa.string())),
        )
        tables[kind] = table.filter(kept)
    return tables


def _compare(member: dict[str, Any], found: dict[str, Any] | None, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    name = f"trajectory {member['trajectory_id']} attempt {member['attempt']} of batch {member['batch_id']}"
    if found is None:
        yield at_trajectory(member, f"{name}: expected its events on the tape, they are gone")
        return
    if found["content"] == member["content_digest"]:
        counts["equal"] += 1
        return
    differing = [
        tensor
        for digest, tensor in TENSOR_NAMES.items()
        if member[f"{digest}_digest"] is not None and member[f"{digest}_digest"] != found[digest]
    ]
    for tensor in differing or ["content"]:
        yield at_trajectory(
            member,
            f"{name} (step {member['step']}): expected the {tensor} that the batch pinned, got other bits",
            tensor=tensor,
        )


def _scores(context: Context, members: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What teachers said of members whose batch has a digest of it."""
    scored = [member for member in members if member["teacher_digest"] is not None]
    if not scored:
        return
    ids = [member["trajectory_id"] for member in scored]
    events = context.source.read(("teacher_scored",), as_of=None, trajectory_ids=ids)
    table = events.get("teacher_scored", arrow_schema("teacher_scored").empty_table())
    digests = score_digests(table, [member["teacher_event_ids"] for member in scored])
    for member, digest in zip(scored, digests, strict=True):
        if digest != member["teacher_digest"]:
            yield at_trajectory(
                member,
                f"trajectory {member['trajectory_id']} attempt {member['attempt']} of batch {member['batch_id']} (step "
                f"{member['step']}): expected the teacher scores that the batch pinned, got "
                f"{'none' if digest is None else 'other bits'}",
                tensor="teacher",
            )


def _batches(context: Context) -> Iterator[dict[str, Any]]:
    for row in context.rows(
        f"""
        SELECT batch_id, step, batch_digest, event_id,
            list_transform(members, lambda m: m.content_digest) AS contents
        FROM batch_formed
        WHERE batch_digest IS NOT NULL AND {context.new()}
        ORDER BY ALL
        """
    ):
        contents = [content for content in row["contents"] or () if content is not None]
        if len(contents) == len(row["contents"] or ()) and batch_digest(contents) != row["batch_digest"]:
            yield {
                "event_id": row["event_id"],
                "tensor": "batch_digest",
                "message": f"batch {row['batch_id']} (step {row['step']}): expected its digest over its "
                "members' own, got "
                f"{row['batch_digest']}",
            }


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
