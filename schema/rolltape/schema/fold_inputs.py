"""What the fold reads: each event once, its columns on demand, and the attempt that it belongs to.

Duplicates of one event id are removed here. The copy that the log stamped first counts, so the result does not depend
on the order of arrival; where copies differ, the event is disputed and its attempt is not trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.envelope import STAMPED_BY_LOG
from rolltape.schema.fold_ranges import Bools, Ints, field_of, ints_of, single, valid_of
from rolltape.schema.render import arrow_schema

TIMELINE_KINDS: Final = (
    "rollout_started",
    "rollout_resumed",
    "action_sampled",
    "observation_received",
    "context_rewritten",
    "rollout_ended",
)
KEYED_KINDS: Final = (
    *TIMELINE_KINDS,
    "rollout_dispatched",
    "attempt_abandoned",
    "reward_assigned",
    "mask_assigned",
    "dead_letter",
)

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout_dispatched": ("purpose", "training_step", "group_ordinal", "member", "group_size", "worker_id"),
    "rollout_started": ("prompt_token_ids", "stage", "environment", "forked_from_event_id"),
    "rollout_resumed": ("from_attempt", "from_event_index"),
    "action_sampled": (
        "action_kind",
        "version_runs",
        "origin_runs",
        "sampling",
        "prefix_digest",
        "prefix_length",
        "prefix_token_ids",
        "prefix_source",
        "media",
        "continues_event_id",
        "support_token_ids",
        "support_offsets",
    ),
    "observation_received": (),
    "context_rewritten": ("context_token_ids", "summary_event_id"),
    "rollout_ended": ("last_event_index", "status", "cause", "num_action_tokens", "num_observation_tokens"),
    "attempt_abandoned": (),
    "reward_assigned": ("target_event_id", "target_token", "supersedes", "scalar", "state"),
    "mask_assigned": ("ranges",),
    "dead_letter": ("first_event_index", "last_event_index"),
}
_ENVELOPE: Final = ("event_id", "run_id", "run_epoch", "trajectory_id", "attempt", "log_offset")
IDENTITY: Final = ("group_id", "problem_id", "root_rollout_id")
TELLERS: Final = ("rollout_dispatched", "rollout_started", "rollout_resumed", "action_sampled", "reward_assigned")
"""Kinds that tell an attempt's ``IDENTITY``, in the order in which they are asked."""
_TOKENS: Final = {
    "action_sampled": ("token_ids", "rollout_log_probs"),
    "observation_received": ("token_ids",),
}

FOLDED_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    kind: (
        *_ENVELOPE,
        *(("event_index",) if kind in TIMELINE_KINDS else ()),
        *(IDENTITY if kind in TELLERS else ()),
        *_TOKENS.get(kind, ()),
        *(f"{kind}.{name}" for name in names),
    )
    for kind, names in _FIELDS.items()
}
"""All that the fold reads of each keyed kind (dotted: a field of its struct); a read may leave out the rest.

Where an event id comes twice the copies are compared whole, so a table that repeats one has to be read whole.
"""

_STAMPS: Final = (*STAMPED_BY_LOG, "producer_id", "producer_epoch", "lane_seq", "recorded_at", "schema_version")
_NO_OFFSET: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRows:
    """Rows of one kind that count, each with the number of the attempt (``key``) that it belongs to.

    ``rows`` are ascending rows of ``table``; None stands for all of them. Columns come aligned with ``key`` and are
    materialised only when asked for. ``disputed`` says that the event's id came with other content too.
    """

    kind: str
    table: pa.Table
    rows: Ints | None
    key: Ints
    disputed: Bools
    _columns: dict[str, pa.Array] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        """Rows that count."""
        return len(self.key)

    def column(self, name: str) -> pa.Array:
        """An envelope or token column; null throughout where the table was read without it."""
        if name not in self._columns:
            self._columns[name] = _selected(_column(self.table, self.kind, name).chunks, self.rows)
        return self._columns[name]

    def field(self, name: str) -> pa.Array:
        """A field of the kind's own struct."""
        path = f"{self.kind}.{name}"
        if path not in self._columns:
            struct = _column(self.table, self.kind, self.kind)
            if struct.type.get_field_index(name) >= 0:
                chosen = _selected([field_of(chunk, name) for chunk in struct.chunks], self.rows)
            else:
                chosen = pa.nulls(self.num_rows, arrow_schema(self.kind).field(self.kind).type.field(name).type)
            self._columns[path] = chosen
        return self._columns[path]

    def only(self, chosen: Bools) -> KindRows:
        """The rows for which ``chosen`` is true."""
        rows = np.flatnonzero(chosen) if self.rows is None else self.rows[chosen]
        return KindRows(
            kind=self.kind, table=self.table, rows=rows, key=self.key[chosen], disputed=self.disputed[chosen]
        )

    def with_key(self, key: Ints) -> KindRows:
        """The same rows under other attempt numbers."""
        return KindRows(
            kind=self.kind,
            table=self.table,
            rows=self.rows,
            key=key,
            disputed=self.disputed,
            _columns=self._columns,
        )


class Keys(NamedTuple):
    """The attempts that the events speak of, ordered by (run, trajectory, attempt); K in all.

    ``trajectory`` numbers the (run, trajectory) of each attempt, ascending from 0.
    """

    run_ids: pa.Array
    trajectory_ids: pa.Array
    attempts: Ints
    trajectory: Ints

    @property
    def num_keys(self) -> int:
        """K."""
        return len(self.attempts)


@cache
def empty_kind(kind: str) -> KindRows:
    """No rows of ``kind``."""
    none, nothing = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return KindRows(kind=kind, table=arrow_schema(kind).empty_table(), rows=None, key=none, disputed=nothing)


def read_inputs(events: Mapping[str, pa.Table]) -> tuple[Keys, dict[str, KindRows]]:
    """Number the attempts that ``events`` speak of, and read every keyed kind (those without events are empty)."""
    read = {
        kind: _distinct(kind, events[kind]) if kind in events and events[kind].num_rows else empty_kind(kind)
        for kind in KEYED_KINDS
    }
    parts = [rows for rows in read.values() if rows.num_rows]
    if not parts:
        none = pa.array([], pa.string())
        return Keys(none, none, np.zeros(0, np.int64), np.zeros(0, np.int64)), read
    run_codes, run_names = _ranked(pa.concat_arrays([part.column("run_id") for part in parts]))
    codes, names = _ranked(pa.concat_arrays([part.column("trajectory_id") for part in parts]))
    attempts = np.maximum(np.concatenate([ints_of(part.column("attempt"), null=0) for part in parts]), 0)
    if parts[-1].kind == "dead_letter":
        _adopt_runs(run_codes, codes, len(codes) - parts[-1].num_rows)
    width = int(attempts.max()) + 1
    composite = (run_codes * len(names) + codes) * width + attempts
    distinct, key_of = _distinct_codes(composite)
    keys = Keys(
        run_names.take(pa.array(distinct // width // len(names))),
        names.take(pa.array(distinct // width % len(names))),
        distinct % width,
        np.cumsum(np.diff(distinct // width, prepend=distinct[0] // width) != 0),
    )
    ends = np.cumsum([part.num_rows for part in parts])
    for part, key in zip(parts, np.split(key_of, ends[:-1]), strict=True):
        read[part.kind] = part.with_key(key)
    return keys, read


def _column(table: pa.Table, kind: str, name: str) -> pa.ChunkedArray:
    index = table.schema.get_field_index(name)
    if index >= 0:
        return table.column(index)
    return pa.chunked_array([pa.nulls(table.num_rows, arrow_schema(kind).field(name).type)])


def _selected(chunks: Sequence[pa.Array], rows: Ints | None) -> pa.Array:
    """``rows`` of a column chunk by chunk, so that only what is selected has to fit one array's offsets."""
    if rows is None:
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    pieces = []
    first = 0
    for chunk in chunks:
        low, high = np.searchsorted(rows, [first, first + len(chunk)])
        if high > low:
            pieces.append(chunk.take(pa.array(rows[low:high] - first)))
        first += len(chunk)
    return pa.concat_arrays(pieces) if pieces else chunks[0][:0]


def _distinct(kind: str, table: pa.Table) -> KindRows:
    """Rows of ``table`` that name a trajectory, each event id once."""
    counts = valid_of(single(_column(table, kind, "trajectory_id")))
    ids = single(_column(table, kind, "event_id"))
    encoded = ids.dictionary_encode()
    disputed = np.zeros(table.num_rows, np.bool_)
    if len(encoded.dictionary) + ids.null_count < len(ids):
        kept, disputed = _first_copies(table, kind, ints_of(encoded.indices))
        counts &= kept
    rows = None if counts.all() else np.flatnonzero(counts)
    num_rows = table.num_rows if rows is None else len(rows)
    disputed = disputed if rows is None else disputed[rows]
    return KindRows(kind=kind, table=table, rows=rows, key=np.zeros(num_rows, np.int64), disputed=disputed)


def _first_copies(table: pa.Table, kind: str, codes: Ints) -> tuple[Bools, Bools]:
    """Of each event id the copy with the smallest log position; of copies without one, with the smallest digest.

    Returns the rows to keep, and the rows whose id came with other content too. A position names one record for good,
    and within it the lane sequence one row: copies that agree on them are equal, and need no second look.
    """
    repeated = np.flatnonzero((np.bincount(codes[codes >= 0])[codes] > 1) & (codes >= 0))
    code = codes[repeated]
    names = ("lane_seq", "log_partition", "log_offset")
    lane, partition, offset = (ints_of(single(_column(table, kind, n)), null=_NO_OFFSET)[repeated] for n in names)
    order = np.lexsort((lane, partition, offset, code))
    same = [np.diff(column[order]) == 0 for column in (lane, partition, offset, code)]
    apart = same[3] & ~(same[0] & same[1] & same[2] & (offset[order][1:] != _NO_OFFSET))
    doubtful = np.flatnonzero(np.isin(code, code[order][1:][apart]))
    digests = np.zeros(len(repeated), "U64")
    if len(doubtful):
        digests[doubtful] = _content_digests(table.take(pa.array(repeated[doubtful])))
    order = np.lexsort((digests, lane, partition, offset, code))
    kept, disputed = np.ones(table.num_rows, np.bool_), np.zeros(table.num_rows, np.bool_)
    kept[repeated] = False
    kept[repeated[order[np.diff(code[order], prepend=-1) != 0]]] = True
    by_digest = np.lexsort((digests, code))
    differing = (np.diff(code[by_digest]) == 0) & (digests[by_digest][1:] != digests[by_digest][:-1])
    disputed[repeated[np.isin(code, code[by_digest][1:][differing])]] = True
    return kept, disputed


def _content_digests(table: pa.Table) -> list[str]:
    """SHA-256 of what each row says, without the stamps of the log and of the recorder that sent it."""
    stamps = [name for name in _STAMPS if name in table.column_names]
    rows = table.drop_columns(stamps).to_pylist()
    return [hashlib.sha256(repr(row).encode()).hexdigest() for row in rows]


def _ranked(names: pa.Array) -> tuple[Ints, pa.Array]:
    """Codes of ``names`` that order as the names do, and the sorted names."""
    encoded = names.dictionary_encode()
    codes, dictionary = ints_of(encoded.indices), encoded.dictionary
    if names.null_count:
        dictionary = pa.concat_arrays([dictionary, pa.array([""], dictionary.type)])
        codes = np.where(codes < 0, len(dictionary) - 1, codes)
    if len(dictionary) > 1 and not pc.all(pc.less(dictionary[:-1], dictionary[1:])).as_py():
        order = pc.sort_indices(dictionary).to_numpy().astype(np.int64)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        codes, dictionary = ranks[codes], dictionary.take(pa.array(order))
    return codes, dictionary


def _adopt_runs(run_codes: Ints, codes: Ints, first_letter: int) -> None:
    """Give each dead letter the run of the trajectory that it names: its writer may know only the headers."""
    letters = codes[first_letter:]
    run_of = np.full(int(codes.max()) + 1, _NO_OFFSET)
    concerned = np.flatnonzero(np.isin(codes[:first_letter], letters))
    np.minimum.at(run_of, codes[concerned], run_codes[concerned])
    known = run_of[letters] != _NO_OFFSET
    run_codes[first_letter:][known] = run_of[letters][known]


def _distinct_codes(codes: Ints) -> tuple[Ints, Ints]:
    """Sorted distinct codes, and the place of each code among them."""
    span = int(codes.max()) + 1
    if span > 8 * len(codes) + 1024:
        distinct, places = np.unique(codes, return_inverse=True)
        return distinct, places.astype(np.int64, copy=False)
    present = np.zeros(span, np.bool_)
    present[codes] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[codes]
