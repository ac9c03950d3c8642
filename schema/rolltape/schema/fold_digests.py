"""Content digests of what a batch member is trained from (design §7): one definition for trainer, replay, verify."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.digest import ContentDigests, content_digests
from rolltape.schema.fold_ranges import (
    Array,
    Ints,
    Lists,
    bools_of,
    copy_ranges,
    exclusive_cumsum,
    expand_ranges,
    first_start,
    floats_of,
    is_contiguous,
    lists_of,
    single,
    valid_of,
)

if TYPE_CHECKING:
    from rolltape.schema.fold import Fold

NULL_LOG_PROB: Final = np.array([0x7FC0DEAD], np.uint32).view(np.float32)[0]
"""Stands for a sampled token without a log-prob in a digest: a NaN, told from every value by its bits."""

DIGEST_SCHEMA: Final = pa.schema(
    [
        ("run_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("attempt", pa.int32()),
        ("content", pa.string()),
        ("token_ids", pa.int64()),
        ("log_probs", pa.int64()),
        ("masks", pa.int64()),
        ("versions", pa.int64()),
        ("rewards", pa.int64()),
    ]
)


def content_digests_of(fold: Fold) -> pa.Table:
    """Content digests of each attempt of ``fold`` that has segments, as a table of :data:`DIGEST_SCHEMA`."""
    trajectories, segments = fold.trajectories, fold.segments
    shown = bools_of(single(pc.greater(trajectories["num_segments"], 0)))
    chosen = trajectories.filter(pa.array(shown))
    digests = segment_digests(segments, _rewards(chosen), fold.supports)
    columns = [chosen["run_id"], chosen["trajectory_id"], chosen["attempt"]]
    names = DIGEST_SCHEMA.names[3:]
    columns += [
        pa.array([getattr(digest, name) for digest in digests], DIGEST_SCHEMA.field(name).type) for name in names
    ]
    return pa.table(columns, schema=DIGEST_SCHEMA)


def _rewards(trajectories: pa.Table) -> list[float | Array | None]:
    """What each attempt is trained with: its scalar, and behind it the rewards of single tokens where there are any."""
    rewards: list[float | Array | None] = trajectories["reward"].to_pylist()
    given = single(pc.list_value_length(trajectories["token_rewards"])).to_numpy()
    for row in np.flatnonzero(given).tolist():
        scalar, tokens = rewards[row], trajectories["token_rewards"][row].as_py()
        placed = [number for t in tokens for number in (t["segment_index"], t["position"], t["scalar"])]
        rewards[row] = np.array([np.nan if scalar is None else scalar, *placed], np.float64)
    return rewards


def segment_digests(
    segments: pa.Table, rewards: Sequence[float | Array | None], supports: pa.Table | None = None
) -> list[ContentDigests]:
    """Content digests of whole attempts.

    Args:
        segments: rows of ``SEGMENT_SCHEMA``; all segments of an attempt stand together, in order.
        rewards: what each attempt is trained with, in the order of the attempts: a scalar, an array of numbers where
            there are rewards of single tokens, or None: it has none.
        supports: the fold's, whose rows number those of ``segments``; None: there are none.

    Digested are, for each attempt: of every segment the lengths of context and response and their ids; then over all
    its responses the log-probs, the two masks stacked, and the versions; then the reward. Where log-probs are over a
    kept support, its counts and ids are digested behind them.

    Raises:
        ValueError: more or fewer rewards than attempts.
    """
    if not segments.num_rows:
        return []
    first = _first_rows(segments)
    bounds = np.append(first, segments.num_rows)
    prompts = lists_of(single(segments["prompt_token_ids"]))
    responses = lists_of(single(segments["response_token_ids"]))
    ids, id_bounds = _framed(prompts, responses)
    log_probs, token_bounds = _flat(segments, "rollout_log_probs")
    response_mask, _ = _flat(segments, "response_mask")
    observation_mask, _ = _flat(segments, "observation_mask")
    versions, _ = _flat(segments, "policy_versions")
    kept = _supports_by_row(supports)
    digests = []
    for low, high, reward in zip(bounds[:-1].tolist(), bounds[1:].tolist(), rewards, strict=True):
        tokens = slice(int(token_bounds[low]), int(token_bounds[high]))
        digest = content_digests(
            token_ids=ids[id_bounds[low] : id_bounds[high]],
            log_probs=np.concatenate([log_probs[tokens], *(part for row in range(low, high) for part in kept[row])])
            if kept
            else log_probs[tokens],
            masks=np.stack([response_mask[tokens], observation_mask[tokens]]),
            versions=versions[tokens],
            rewards=np.atleast_1d(np.array([] if reward is None else reward, np.float64)),
        )
        digests.append(digest)
    return digests


def _supports_by_row(supports: pa.Table | None) -> Mapping[int, tuple[Array, Array]]:
    """Counts and ids of each segment's kept supports, as float32 of the same bits; empty where there are none."""
    if supports is None or not supports.num_rows:
        return {}
    nothing: Array = np.empty(0, np.float32)
    found: defaultdict[int, tuple[Array, Array]] = defaultdict(lambda: (nothing, nothing))
    rows = supports["segment"].to_pylist()
    for row, counts, ids in zip(rows, supports["counts"], supports["token_ids"], strict=True):
        if counts.is_valid:
            found[row] = (counts.values.to_numpy().view(np.float32), ids.values.to_numpy().view(np.float32))
    return found


def _first_rows(segments: pa.Table) -> Ints:
    """First segment row of each attempt."""
    starts = np.zeros(segments.num_rows, np.bool_)
    starts[0] = True
    for name in ("run_id", "trajectory_id", "attempt"):
        column = single(segments[name])
        starts[1:] |= bools_of(pc.not_equal(column[1:], column[:-1]), null=True)
    return np.flatnonzero(starts)


def _framed(prompts: Lists, responses: Lists) -> tuple[Array, Ints]:
    """int32 ids of all segments, each framed by its two lengths (-1: context unknown), and their bounds."""
    lengths = 2 + prompts.lengths + responses.lengths
    bounds = exclusive_cumsum(lengths)
    framed = np.empty(int(bounds[-1]), np.int32)
    framed[bounds[:-1]] = np.where(prompts.valid, prompts.lengths, -1)
    framed[bounds[:-1] + 1] = responses.lengths
    place = bounds[:-1] + 2
    copy_ranges(framed, place, floats_of(prompts.values), prompts.starts, prompts.lengths)
    copy_ranges(framed, place + prompts.lengths, floats_of(responses.values), responses.starts, responses.lengths)
    return framed, bounds


def _flat(segments: pa.Table, name: str) -> tuple[Array, Ints]:
    """Values of a list column of all segments, one after the other, and their bounds."""
    lists = lists_of(single(segments[name]))
    values = lists.values
    bounds = exclusive_cumsum(lists.lengths)
    if is_contiguous(lists.starts, lists.lengths):
        values = values.slice(first_start(lists.starts, lists.lengths), int(bounds[-1]))
    else:
        values = values.take(pa.array(expand_ranges(lists.starts, lists.lengths)))
    if pa.types.is_boolean(values.type):
        return bools_of(values), bounds
    flat = floats_of(values)
    if values.null_count:
        flat = flat.copy()
        flat[~valid_of(values)] = NULL_LOG_PROB
    return flat, bounds
