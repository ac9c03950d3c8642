"""What an attempt's events say about it beside its tokens: who was asked, by whom, how it ended, where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.fold_inputs import IDENTITY, TELLERS, Keys, KindRows
from rolltape.schema.fold_ranges import Ints, ints_of, single, take_or_null
from rolltape.schema.kinds import kind_named

_DISPATCHED: Final = ("purpose", "training_step", "group_ordinal", "member", "group_size", "worker_id")
_STARTED: Final = ("stage", "environment", "forked_from_event_id")
_ENDED: Final = ("status", "cause", "num_action_tokens", "num_observation_tokens", "last_event_index")


def first_rows(rows: KindRows, num_keys: int) -> Ints:
    """For each attempt its row of a kind that should have one; of several that with the smallest event id. -1: none."""
    found = np.full(num_keys, -1, np.int64)
    found[rows.key] = np.arange(rows.num_rows)
    if rows.num_rows > int((found >= 0).sum()):
        order = np.asarray(pc.array_sort_indices(rows.column("event_id"), order="descending"), np.int64)
        found[rows.key[order]] = order  # of equal keys the last is written: the smallest id
    return found


def identity_columns(kinds: Mapping[str, KindRows], keys: Keys) -> dict[str, pa.Array]:
    """Columns that the dispatch, or where there was none the start or another event of the attempt, tells."""
    rows: dict[str, Ints] = {}

    def told(column: str, *sources: str, envelope: bool = False) -> Iterator[pa.Array]:
        for name in sources:
            if kinds[name].num_rows:
                if name not in rows:
                    rows[name] = first_rows(kinds[name], keys.num_keys)
                yield take_or_null(kinds[name].column(column) if envelope else kinds[name].field(column), rows[name])

    columns = {name: _first(told(name, *TELLERS, envelope=True), pa.string(), keys) for name in IDENTITY[:2]}
    roots = chain(told("root_rollout_id", *TELLERS, envelope=True), [keys.trajectory_ids])
    columns["root_rollout_id"] = _first(roots, pa.string(), keys)
    for kind, fields in (("rollout_dispatched", _DISPATCHED), ("rollout_started", _STARTED)):
        types = kind_named(kind).struct_type
        for name in fields:
            columns[name] = _first(told(name, kind), types.field(name).type, keys)
    epochs = chain(told("run_epoch", *TELLERS[:2], envelope=True), _first_epochs(kinds, keys))
    columns["run_epoch"] = _first(epochs, pa.int32(), keys)
    return columns


def _first(candidates: Iterable[pa.Array], type_: pa.DataType, keys: Keys) -> pa.Array:
    """The first candidate that is not null, row by row; no more candidates are made than needed."""
    chosen = pa.nulls(keys.num_keys, type_)
    for candidate in candidates:
        chosen = candidate if chosen.null_count == len(chosen) else pc.coalesce(chosen, candidate)
        if not chosen.null_count:
            break
    return chosen


def _first_epochs(kinds: Mapping[str, KindRows], keys: Keys) -> Iterator[pa.Array]:
    """Smallest run epoch of any event of the attempt (one column)."""
    none = np.iinfo(np.int64).max
    epochs = np.full(keys.num_keys, none)
    for rows in kinds.values():
        if rows.num_rows:
            np.minimum.at(epochs, rows.key, ints_of(rows.column("run_epoch"), null=none))
    yield pa.array(np.where(epochs == none, 0, epochs), pa.int64(), mask=epochs == none).cast(pa.int32())


def log_offsets(kinds: Mapping[str, KindRows], num_keys: int) -> tuple[pa.Array, pa.Array]:
    """Smallest and largest log offset of the events of each attempt in topic ``rollout``; null where unstamped."""
    none = np.iinfo(np.int64).max
    first, last = np.full(num_keys, none), np.full(num_keys, -1, np.int64)
    for rows in kinds.values():
        if not rows.num_rows or rows.kind == "dead_letter":
            continue
        offsets = ints_of(rows.column("log_offset"))
        stamped = offsets >= 0
        if stamped.all():
            np.minimum.at(first, rows.key, offsets)
            np.maximum.at(last, rows.key, offsets)
        elif stamped.any():
            np.minimum.at(first, rows.key[stamped], offsets[stamped])
            np.maximum.at(last, rows.key[stamped], offsets[stamped])
    unknown = last < 0
    return pa.array(first, mask=unknown), pa.array(last, mask=unknown)


class RunFacts:
    """What the runs' own events say, by run and run epoch: purpose and tokenizer revision."""

    def __init__(self, events: Mapping[str, pa.Table]) -> None:
        self._facts: dict[str, list[tuple[int, str, str | None, str | None]]] = {}
        for kind in ("run_started", "run_resumed"):
            table = events.get(kind)
            if table is None or not table.num_rows:
                continue
            struct = single(table[kind]).to_pylist()
            columns = (table[name].to_pylist() for name in ("run_id", "run_epoch", "event_id"))
            for run_id, epoch, event_id, facts in zip(*columns, struct, strict=True):
                revision = (facts.get("tokenizer") or {}).get("revision")
                entry = (epoch or 0, event_id or "", facts.get("purpose"), revision)
                self._facts.setdefault(run_id, []).append(entry)
        for entries in self._facts.values():
            entries.sort(key=lambda entry: entry[:2])

    def columns(self, run_ids: pa.Array, run_epochs: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Purpose and tokenizer revision that hold in each (run, epoch): of the newest event not after it."""
        runs = run_ids.dictionary_encode()
        epochs = ints_of(run_epochs, null=0)
        pairs = ints_of(runs.indices) * (int(epochs.max(initial=0)) + 1) + epochs
        _, firsts, places = np.unique(pairs, return_index=True, return_inverse=True)
        told = [self._told(run_ids[int(at)].as_py(), int(epochs[at])) for at in firsts]
        rows = pa.array(places)
        purposes = pa.array([purpose for purpose, _ in told], pa.string())
        revisions = pa.array([revision for _, revision in told], pa.string())
        return purposes.take(rows), revisions.take(rows)

    def _told(self, run_id: str, epoch: int) -> tuple[str | None, str | None]:
        purpose: str | None = None
        revision: str | None = None
        for at, _, told_purpose, told_revision in self._facts.get(run_id, []):
            if at <= epoch:
                purpose, revision = told_purpose or purpose, told_revision or revision
        return purpose, revision


def end_columns(kinds: Mapping[str, KindRows], num_keys: int) -> dict[str, pa.Array]:
    """Status, cause, check sums and event index of the end of each attempt; null where it has none."""
    ended = kinds["rollout_ended"]
    rows = first_rows(ended, num_keys)
    fields = kind_named("rollout_ended").struct_type
    if not ended.num_rows:
        absent = {name: pa.nulls(num_keys, fields.field(name).type) for name in _ENDED}
        return {**absent, "event_index": pa.nulls(num_keys, pa.int32())}
    columns = {name: take_or_null(ended.field(name), rows) for name in _ENDED}
    columns["event_index"] = take_or_null(ended.column("event_index"), rows)
    return columns
