"""The TITO proof: for each action, was the context that the engine used the one that the tape holds (design §5.1)?

The digest of the tape's context is computed again, incrementally, so every token is hashed once for a segment.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.digest import ALGORITHM, MediaRef, prefix_digest
from rolltape.schema.fold_inputs import KindRows
from rolltape.schema.fold_layout import Contexts, Layout
from rolltape.schema.fold_ranges import Array, Bools, Ints, bools_of, ints_of, lists_of

UNKNOWN_DIFFERENCE: Final = -1

_PREFIX: Final = f"{ALGORITHM}:"


class Proof(NamedTuple):
    """Outcome for each action event; arrays of length A, in the order of the fold.

    ``event`` is its place among the token events. ``proved`` and ``differs`` exclude each other; neither: unknown.
    ``first_difference`` is the first index of the engine's context that differs from the tape's, or
    :data:`UNKNOWN_DIFFERENCE` where nothing differs or the engine's ids are not on the tape.
    """

    event: Ints
    proved: Bools
    differs: Bools
    first_difference: Ints
    submitted: Bools


def prove_contexts(layout: Layout, contexts: Contexts, response_ids: Array, actions: KindRows) -> Proof:
    """Check every action against the context that the tape holds for it."""
    event = np.flatnonzero(layout.is_action)
    rows = layout.events.row[event]
    segment = layout.segment[event]
    if not len(event):
        none = np.zeros(0, np.bool_)
        return Proof(event, none, none, event, none)
    tape_length = contexts.lengths[segment] + layout.start[event] - layout.bounds[segment]
    recorded = actions.field("prefix_digest").take(pa.array(rows))
    has_digest = bools_of(pc.starts_with(recorded, _PREFIX))
    same = np.zeros(len(event), np.bool_)
    if has_digest.any():
        same = bools_of(pc.equal(recorded, pa.array(_tape_digests(layout, contexts, response_ids, event))))
    _accept_media(same, has_digest, layout, contexts, response_ids, actions, event)
    length = ints_of(actions.field("prefix_length"))[rows]
    same &= (length < 0) | (length == tape_length)
    known = contexts.known[segment] & ~_after_gap(layout)[event]
    engine_ids = lists_of(actions.field("prefix_token_ids"))
    has_ids = engine_ids.valid[rows]
    first = np.full(len(event), UNKNOWN_DIFFERENCE)
    for at in np.flatnonzero(has_ids & known & ~(same & has_digest)).tolist():
        begin, count = int(engine_ids.starts[rows[at]]), int(engine_ids.lengths[rows[at]])
        ids = engine_ids.values.slice(begin, count).to_numpy(zero_copy_only=False)
        first[at] = first_difference(tape_context(layout, contexts, response_ids, int(event[at])), ids)
        if not has_digest[at]:
            same[at] = first[at] == UNKNOWN_DIFFERENCE
    source = actions.field("prefix_source").take(pa.array(rows))
    told = bools_of(pc.is_in(source, pa.array(["engine", "submitted"])))
    checked = known & told & (has_digest | has_ids)
    proved, differs = checked & same, checked & ~same
    _continue(proved, differs, known, layout, actions, event, has_digest | has_ids, recorded)
    return Proof(
        event, proved, differs, np.where(differs, first, UNKNOWN_DIFFERENCE), bools_of(pc.equal(source, "submitted"))
    )


def first_difference(tape: Array, engine: Array) -> int:
    """First index at which two contexts differ; where one extends the other, the length of the shorter.

    >>> first_difference(np.array([1, 2, 3]), np.array([1, 9, 3]))
    1
    """
    common = min(len(tape), len(engine))
    different = np.flatnonzero(tape[:common] != engine[:common])
    if len(different):
        return int(different[0])
    return UNKNOWN_DIFFERENCE if len(tape) == len(engine) else common


def tape_context(layout: Layout, contexts: Contexts, response_ids: Array, event: int) -> Array:
    """Ids that the tape holds before a token event: its segment's context, then the tokens so far."""
    segment = int(layout.segment[event])
    context = contexts.values[contexts.bounds[segment] : contexts.bounds[segment + 1]]
    so_far = response_ids[layout.bounds[segment] : layout.start[event]]
    return np.concatenate([context, so_far])


def _tape_digests(layout: Layout, contexts: Contexts, response_ids: Array, event: Ints) -> list[str]:
    """Prefix digest of the tape's context before each action."""
    context_bytes, response_bytes = _bytes(contexts.values), _bytes(response_ids)
    segments = layout.segment[event].tolist()
    context_ends = (contexts.bounds * 4).tolist()
    bounds, starts = (layout.bounds * 4).tolist(), (layout.start[event] * 4).tolist()
    sha256 = hashlib.sha256
    digests = []
    current, position = -1, 0
    hasher = sha256()
    for segment, start in zip(segments, starts, strict=True):
        if segment != current:
            current, position = segment, bounds[segment]
            hasher = sha256(context_bytes[context_ends[segment] : context_ends[segment + 1]])
        if start > position:
            hasher.update(response_bytes[position:start])
            position = start
        digests.append(_PREFIX + hasher.hexdigest())
    return digests


def _bytes(ids: Array) -> memoryview:
    little = np.ascontiguousarray(ids, "<i4")
    return little.view(np.uint8).data


def _accept_media(
    same: Bools,
    has_digest: Bools,
    layout: Layout,
    contexts: Contexts,
    response_ids: Array,
    actions: KindRows,
    event: Ints,
) -> None:
    """Digest again, with its media references, the context of each action that has some."""
    media = lists_of(actions.field("media"))
    if not media.lengths.any():
        return
    rows = layout.events.row[event]
    for at in np.flatnonzero((media.lengths[rows] > 0) & has_digest).tolist():
        row = int(rows[at])
        refs = media.values.slice(int(media.starts[row]), int(media.lengths[row])).to_pylist()
        ids = tape_context(layout, contexts, response_ids, int(event[at]))
        digest = prefix_digest(ids, [MediaRef(ref["start"], ref["length"], ref["sha256"]) for ref in refs])
        same[at] = digest == actions.field("prefix_digest")[row].as_py()


def _after_gap(layout: Layout) -> Bools:
    """Token events of a segment in which something before them is not on the tape."""
    gap = layout.events.gap_before
    if not gap.any():
        return gap
    # The first event of a rewritten segment follows the rewrite itself, so a gap before it lies inside the segment.
    gaps = np.cumsum(gap)
    before_segment = np.zeros(layout.num_segments, np.int64)
    heads = np.flatnonzero(np.diff(layout.segment, prepend=-1) != 0)
    before_segment[layout.segment[heads]] = gaps[heads] - gap[heads]
    after: Bools = gaps > before_segment[layout.segment]
    return after


def _continue(
    proved: Bools,
    differs: Bools,
    known: Bools,
    layout: Layout,
    actions: KindRows,
    event: Ints,
    reported: Bools,
    recorded: pa.Array,
) -> None:
    """A partial action that continues the one right before it shares that one's context and its proof.

    Engines that flush a generation in parts report its context once, or the same one with each part.
    """
    rows = layout.events.row[event]
    continues = actions.field("continues_event_id")
    if continues.null_count == len(continues):
        return
    ids = actions.column("event_id")
    heads: dict[int, int] = {}
    for at in np.flatnonzero(bools_of(continues.is_valid())[rows]).tolist():
        adjacent = (
            at > 0 and event[at] == event[at - 1] + 1 and layout.segment[event[at]] == layout.segment[event[at - 1]]
        )
        if not adjacent or not known[at] or continues[int(rows[at])] != ids[int(rows[at - 1])]:
            continue
        head = at - 1
        heads[at] = heads.get(head, head)
        digest = recorded[at].as_py()
        if not reported[at] or (digest is not None and digest == recorded[heads[at]].as_py()):
            proved[at], differs[at] = proved[head], differs[head]
