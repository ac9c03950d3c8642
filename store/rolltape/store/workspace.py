"""A workspace: a locked DuckDB session in which the lake's views appear when something names them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rolltape.schema.columns import Column
from rolltape.schema.cursor import Cursor
from rolltape.schema.envelope import ENVELOPE, TOKEN_COLUMNS
from rolltape.schema.fold_schema import SEGMENT_COLUMNS, TRAJECTORY_COLUMNS
from rolltape.schema.kinds import KINDS, kind_named
from rolltape.schema.render import columns_of_kind, duckdb_type
from rolltape.store.duck import Relation, Session, literal, quoted
from rolltape.store.projections import EVENTS, FOLDED, PROJECTIONS, VIEW_COLUMNS
from rolltape.store.sources import EventSource, TableSource

if TYPE_CHECKING:
    from rolltape.schema.fold import Fold

# These name what they speak of by event id or run, so that a restriction to trajectories would lose them.
_WHOLE: Final = ("run_started", "run_resumed", "weights_aborted", "dead_letter_redriven")

_RAW: Final = "raw_"
MAX_FOLDS: Final = 4
MAX_FOLD_BYTES: Final = 1 << 30


class Workspace:
    """Views over one state of a tape, as of a cursor.

    Args:
        source: the events.
        as_of: only rows before this cursor exist; None: all rows.
        run_id: fold only this run (``trajectories``, ``segments`` and what builds on them).
        trajectory_ids: fold only these trajectories.
        share_folds: take a fold that another workspace made of the same state, and leave one for the next.
    """

    def __init__(
        self,
        source: EventSource,
        *,
        as_of: Cursor | None = None,
        run_id: str | None = None,
        trajectory_ids: Collection[str] | None = None,
        share_folds: bool = True,
    ) -> None:
        self.source = source
        self.as_of = as_of
        self._run_id = run_id
        self._trajectory_ids = None if trajectory_ids is None else tuple(sorted(trajectory_ids))
        self._share_folds = share_folds
        self._session = Session()
        self._created: set[str] = set()

    def relation(self, select: str, names: Iterable[str]) -> Relation:
        """Bind a SELECT that reads the views ``names``.

        Raises:
            SqlError: it does not bind.
        """
        self.create(names)
        return self._session.relation(select)

    def table(self, select: str, names: Iterable[str]) -> pa.Table:
        """Run a SELECT that reads the views ``names``."""
        self.create(names)
        return self._session.table(select)

    def register(self, name: str, table: pa.Table) -> None:
        """Make a table of the caller readable beside the views."""
        self._session.register(name, table)

    def create(self, names: Iterable[str]) -> None:
        """Create the views, and what they need, where they do not exist yet."""
        for name in names:
            if name in self._created:
                continue
            if name in FOLDED:
                self._register_fold()
            elif name in PROJECTIONS:
                view = PROJECTIONS[name]
                self.create(view.needs)
                define = self._session.keep if view.kept else self._session.create_view
                define(name, view.select)
            elif name == EVENTS:
                self._create_events()
            elif name == VIEW_COLUMNS:
                self._session.register(VIEW_COLUMNS, view_columns())
            else:
                self._create_kind(name)
            self._created.add(name)

    def fold(self) -> Fold:
        """Trajectories and segments of this workspace."""
        key = self.source.key() if self._share_folds else None
        if key is None:
            return self._fold()
        return _FOLDS.get((*key, str(self.as_of), self._run_id, self._trajectory_ids), self._fold)

    def _fold(self) -> Fold:
        from rolltape.schema.fold import FOLDED_KINDS, fold  # most statements fold nothing

        events = self.source.read(_WHOLE, as_of=self.as_of)
        rest = [kind for kind in FOLDED_KINDS if kind not in _WHOLE]
        events |= self.source.read(rest, as_of=self.as_of, run_id=self._run_id, trajectory_ids=self._trajectory_ids)
        return fold(events)

    def _register_fold(self) -> None:
        folded = self.fold()
        trajectories, segments = FOLDED
        self._session.register(trajectories, folded.trajectories)
        self._session.register(segments, folded.segments)
        self._created.update(FOLDED)

    def _create_kind(self, name: str) -> None:
        kind = kind_named(name)
        self._session.register(_RAW + name, self.source.kind(name, self.as_of))
        own = [f"{quoted(name)}.{quoted(spec.name)} AS {quoted(spec.name)}" for spec in kind.columns]
        shared = [quoted(spec.name) for spec in columns_of_kind(kind)[:-1]]
        self._session.create_view(
            name, f"SELECT {', '.join(shared + own)} FROM {quoted(_RAW + name)} WHERE {_before(self.as_of)}"
        )

    def _create_events(self) -> None:
        self._session.register(_RAW + EVENTS, self.source.events(self.as_of))
        self._session.create_view(EVENTS, f"SELECT * FROM {quoted(_RAW + EVENTS)} WHERE {_before(self.as_of)}")


class _Folds:
    """Folds that were made lately, a few of them and not too many bytes: a state of a tape never changes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], Fold] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...], make: Callable[[], Fold]) -> Fold:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > 1 and (len(self._kept) > MAX_FOLDS or self._num_bytes() > MAX_FOLD_BYTES):
                self._kept.popitem(last=False)
        return made

    def _num_bytes(self) -> int:
        return sum(kept.trajectories.nbytes + kept.segments.nbytes for kept in self._kept.values())


_FOLDS: Final = _Folds()


def _before(as_of: Cursor | None) -> str:
    """The condition that a row lies before the cursor."""
    if as_of is None:
        return "TRUE"
    places = [
        f"(log_topic = {literal(place.topic)} AND log_partition = {place.partition} AND log_offset < {as_of[place]})"
        for place in as_of
    ]
    return " OR ".join(places) or "FALSE"


@cache
def view_columns() -> pa.Table:
    """Every view and column that a statement may name: view, column, type, unit, doc."""
    rows = [
        (view, column, type_, *_meanings(view).get(column, ("", "")))
        for view in (*PROJECTIONS, EVENTS, *KINDS)
        for column, type_ in _types(view)
    ]
    names = ("view", "column", "type", "unit", "doc")
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


@cache
def _meanings(name: str) -> dict[str, tuple[str, str]]:
    """Column → (unit, meaning) of a kind, a view, or a folded source."""
    specs: dict[str, tuple[Column, ...]] = {
        EVENTS: (*ENVELOPE, *TOKEN_COLUMNS),
        FOLDED[0]: TRAJECTORY_COLUMNS,
        FOLDED[1]: SEGMENT_COLUMNS,
    }
    if name in KINDS:
        kind = kind_named(name)
        specs[name] = (*columns_of_kind(kind)[:-1], *kind.columns)
    if name in specs:
        return {spec.name: (spec.unit, spec.doc) for spec in specs[name]}
    view = PROJECTIONS[name]
    inherited = [_meanings(source) for source in reversed(view.needs)]
    own = {column: ("", doc) for column, doc in view.columns.items()}
    return {column: meaning for meanings in (*inherited, own) for column, meaning in meanings.items()}


def _types(name: str) -> list[tuple[str, str]]:
    if name in KINDS or name == EVENTS:
        kind = KINDS.get(name)
        specs = (*ENVELOPE, *TOKEN_COLUMNS) if kind is None else (*columns_of_kind(kind)[:-1], *kind.columns)
        return [(spec.name, duckdb_type(spec.type)) for spec in specs]
    relation = Workspace(TableSource({})).relation(f"SELECT * FROM {quoted(name)}", [name])
    return [(column, str(type_)) for column, type_ in zip(relation.columns, relation.types, strict=True)]
