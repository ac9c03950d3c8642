"""Labels of attempts: rewards that nothing supersedes, masks that keep tokens out of the loss (design §4, label)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.fold_attempts import Attempts
from rolltape.schema.fold_inputs import Keys, KindRows
from rolltape.schema.fold_layout import Layout
from rolltape.schema.fold_ranges import (
    Array,
    Bools,
    Ints,
    count_by,
    exclusive_cumsum,
    ints_of,
    list_array,
    lists_of,
    valid_of,
)
from rolltape.schema.fold_schema import CONFLICT, EARNED, INVALID, MISSING, REWARD_STATES, TOKEN_REWARD_TYPE

NOT_JUDGED: Final = -1
_CODE: Final = {state: code for code, state in enumerate(REWARD_STATES)}


class Places(NamedTuple):
    """Where the tokens of one action event lie among the response tokens of one attempt."""

    segment: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of each attempt; arrays of length K.

    ``state`` indexes :data:`REWARD_STATES`, or is :data:`NOT_JUDGED`. ``reward`` is valid where the state is earned.
    ``token_state`` is the worst state of rewards for single actions.
    """

    state: Ints
    reward: Array
    token_state: Ints
    event_ids: pa.Array
    token_rewards: pa.Array


class ActionPlaces:
    """Look-up from (attempt, action event id) to its tokens; built only when a label names an action."""

    def __init__(self, layout: Layout, actions: KindRows) -> None:
        self._layout = layout
        self._actions = actions
        self._events: dict[tuple[int, str], int] | None = None

    def find(self, key: int, event_id: str) -> Places | None:
        """Tokens of the action ``event_id`` in attempt ``key``; None where the attempt does not show it."""
        layout = self._layout
        if self._events is None:
            events = np.flatnonzero(layout.is_action)
            ids = self._actions.column("event_id").take(pa.array(layout.events.row[events])).to_pylist()
            keys = layout.events.key[events].tolist()
            self._events = dict(zip(zip(keys, ids, strict=True), events.tolist(), strict=True))
        event = self._events.get((key, event_id))
        if event is None:
            return None
        return Places(int(layout.segment[event]), int(layout.start[event]), int(layout.length[event]))


def judge_rewards(rewards: KindRows, keys: Keys, layout: Layout, places: ActionPlaces) -> Rewards:
    """The rewards of each attempt that no other reward of its trajectory supersedes.

    Two such rewards for one target are a conflict, however equal their values are.
    """
    rewards = rewards.only(~_superseded(rewards, keys)) if rewards.num_rows else rewards
    state = np.full(keys.num_keys, NOT_JUDGED)
    token_state = state.copy()
    reward = np.zeros(keys.num_keys)
    scalars, states = _judgements(rewards)
    targeted = valid_of(rewards.field("target_event_id"))
    whole = np.flatnonzero(~targeted)
    key = rewards.key[whole]
    state[key] = states[whole]
    reward[key] = scalars[whole]
    state[count_by(key, keys.num_keys) > 1] = _CODE[CONFLICT]
    found = _token_rewards(rewards, np.flatnonzero(targeted), scalars, states, token_state, places, layout)
    return Rewards(
        state=state,
        reward=reward,
        token_state=token_state,
        event_ids=event_ids_by_key(rewards.column("event_id"), rewards.key, keys.num_keys),
        token_rewards=_token_reward_array(found, keys.num_keys),
    )


def _superseded(rewards: KindRows, keys: Keys) -> Bools:
    """Which rewards another reward of the same trajectory replaces."""
    replaced = np.zeros(rewards.num_rows, np.bool_)
    lists = lists_of(rewards.field("supersedes"))
    if not lists.lengths.any():
        return replaced
    trajectory = keys.trajectory[rewards.key]
    rows_of = {event_id: row for row, event_id in enumerate(rewards.column("event_id").to_pylist())}
    for row in np.flatnonzero(lists.lengths).tolist():
        for event_id in lists.values.slice(int(lists.starts[row]), int(lists.lengths[row])).to_pylist():
            other = rows_of.get(event_id)
            if other is not None and trajectory[other] == trajectory[row] and other != row:
                replaced[other] = True
    return replaced


def _judgements(rewards: KindRows) -> tuple[Array, Ints]:
    """Scalar and state code of each reward; earned without a finite scalar is invalid, never 0."""
    column = rewards.field("scalar")
    scalars: Array = pc.fill_null(column, float("nan")).to_numpy(zero_copy_only=False)
    names = rewards.field("state")
    codes = ints_of(pc.index_in(names, pa.array(REWARD_STATES)), null=_CODE[INVALID])
    unfounded = (codes == _CODE[EARNED]) & ~np.isfinite(scalars)
    return scalars, np.where(unfounded, _CODE[INVALID], codes)


def _token_rewards(
    rewards: KindRows,
    rows: Ints,
    scalars: Array,
    states: Ints,
    token_state: Ints,
    places: ActionPlaces,
    layout: Layout,
) -> list[tuple[int, dict[str, Any]]]:
    """Earned rewards of single actions with their place, by attempt; sets the worst state of each attempt."""
    by_target: dict[tuple[int, int, int], list[tuple[str, float, int]]] = {}
    ids, targets = rewards.column("event_id"), rewards.field("target_event_id")
    last = np.iinfo(np.int64).max
    tokens = ints_of(rewards.field("target_token"), null=last)
    for row in rows.tolist():
        key = int(rewards.key[row])
        place = places.find(key, targets[row].as_py())
        token = int(tokens[row])
        if place is not None and token == last:
            token = place.length - 1
        if place is None or not 0 <= token < place.length:
            token_state[key] = _worse(int(token_state[key]), _CODE[INVALID])
            continue
        position = place.start + token - int(layout.bounds[place.segment])
        target = (key, int(layout.index[place.segment]), position)
        by_target.setdefault(target, []).append((ids[row].as_py(), float(scalars[row]), int(states[row])))
    found = []
    for (key, segment_index, position), judged in sorted(by_target.items()):
        worst = _CODE[CONFLICT] if len(judged) > 1 else judged[0][2]
        token_state[key] = _worse(int(token_state[key]), worst)
        if worst == _CODE[EARNED]:
            event_id, scalar, _ = judged[0]
            place_of = {"segment_index": segment_index, "position": position}
            found.append((key, {**place_of, "scalar": scalar, "event_id": event_id}))
    return found


def _worse(state: int, other: int) -> int:
    """The worse of two states: conflict, invalid, missing, earned, not judged."""
    return max(state, other)


def _token_reward_array(found: list[tuple[int, dict[str, Any]]], num_keys: int) -> pa.Array:
    counts = count_by(np.array([key for key, _ in found], np.int64), num_keys)
    values = pa.array([reward for _, reward in found], TOKEN_REWARD_TYPE.value_type)
    return list_array(exclusive_cumsum(counts), values)


def event_ids_by_key(ids: pa.Array, key: Ints, num_keys: int) -> pa.Array:
    """For each attempt its event ids, sorted, as a list column."""
    counts = count_by(key, num_keys)
    if counts.max(initial=0) > 1:
        order = pc.sort_indices(
            pa.table({"key": key, "id": ids}), [("key", "ascending"), ("id", "ascending")]
        ).to_numpy()
    else:
        order = np.argsort(key, kind="stable")
    if not np.array_equal(order, np.arange(len(ids))):
        ids = ids.take(pa.array(order))
    return list_array(exclusive_cumsum(counts), ids)


class Masks(NamedTuple):
    """``masked`` ``[N]``: tokens out of the loss (None: none). ``unresolved`` ``[K]``: a mask names no known action."""

    masked: Bools | None
    event_ids: pa.Array
    unresolved: Bools


def apply_masks(masks: KindRows, keys: Keys, attempts: Attempts, layout: Layout, places: ActionPlaces) -> Masks:
    """Token ranges that ``mask_assigned`` events keep out of the loss.

    A mask that was given to an attempt holds in the attempts that take over its events too. Ranges are cut to the
    tokens that the action has.
    """
    unresolved = np.zeros(keys.num_keys, np.bool_)
    if not masks.num_rows:
        return Masks(None, event_ids_by_key(masks.column("event_id"), masks.key, keys.num_keys), unresolved)
    masked = np.zeros(layout.num_tokens, np.bool_)
    rows, key = _with_heirs(masks, attempts)
    lists = lists_of(masks.field("ranges"))
    for row, attempt in zip(rows.tolist(), key.tolist(), strict=True):
        for span in lists.values.slice(int(lists.starts[row]), int(lists.lengths[row])).to_pylist():
            place = places.find(attempt, span["event_id"]) if span and span["event_id"] else None
            if place is None:
                unresolved[attempt] |= masks.key[row] == attempt
                continue
            low = min(max(span["start"] or 0, 0), place.length)
            high = place.length if span["length"] is None else min(low + max(span["length"], 0), place.length)
            masked[place.start + low : place.start + high] = True
    return Masks(
        masked, event_ids_by_key(masks.column("event_id").take(pa.array(rows)), key, keys.num_keys), unresolved
    )


def _with_heirs(masks: KindRows, attempts: Attempts) -> tuple[Ints, Ints]:
    """Each mask for its own attempt, then for every attempt that takes over events of that one."""
    rows, key = [np.arange(masks.num_rows)], [masks.key]
    for heir, ranges in attempts.taken.items():
        for source in {taken.key for taken in ranges}:
            given = np.flatnonzero(masks.key == source)
            rows.append(given)
            key.append(np.full(len(given), heir))
    return np.concatenate(rows), np.concatenate(key)


assert _CODE[CONFLICT] > _CODE[INVALID] > _CODE[MISSING] > _CODE[EARNED] > NOT_JUDGED
