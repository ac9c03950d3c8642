"""SQL over a lake: one SELECT, over views that appear when it names them (design §11).

>>> lake.sql("SELECT status, count(*) FROM trajectories GROUP BY status").rows()   # doctest: +SKIP
"""

from __future__ import annotations

import pyarrow as pa

from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import RolltapeError
from rolltape.store.lake import Lake
from rolltape.store.projections import VIEW_NAMES
from rolltape.store.results import QueryResult, without_place
from rolltape.store.sources import EventSource, LakeSource
from rolltape.store.statement import Statement, read_statement
from rolltape.store.workspace import Workspace

__all__ = ["QueryResult", "query_source", "run_sql"]

# Views whose rows stand for trajectories of one run: restricting the fold restricts them and nothing else.
_BY_TRAJECTORY = frozenset({"trajectories", "segments", "tokens"})
_BY_RUN = _BY_TRAJECTORY | {"groups"}


def run_sql(lake: Lake, query: str, *, as_of: Cursor | None = None) -> QueryResult:
    """The answer to one SELECT over the lake's projections and event kinds.

    Only the data files of the kinds that the statement names are looked at, and of these only those whose bounds
    allow what its conditions ask for. With ``as_of`` it sees what the tape held before that cursor.

    Raises:
        SqlRefusedError: anything but a single SELECT over the views.
        SqlError: the statement does not parse or bind; or (when rows are asked for) fails while it runs.
    """
    statement = read_statement(query, VIEW_NAMES)
    return query_source(LakeSource(lake), statement, as_of=as_of, hidden=lake.location.path)


def query_source(
    source: EventSource, statement: Statement, *, as_of: Cursor | None = None, hidden: str = ""
) -> QueryResult:
    """The answer to a checked statement over any source of events; ``hidden`` is kept out of error messages."""
    run_id = None
    if statement.run_ids is not None and len(statement.run_ids) == 1 and statement.tables <= _BY_RUN:
        (run_id,) = statement.run_ids
    trajectory_ids = statement.trajectory_ids if statement.tables <= _BY_TRAJECTORY else None
    workspace = Workspace(source, as_of=as_of, run_id=run_id, trajectory_ids=trajectory_ids)
    try:
        relation = workspace.relation(statement.sql, sorted(statement.tables))
    except (RolltapeError, OSError, pa.ArrowException) as error:
        raise without_place(error, hidden) from None
    return QueryResult(workspace, relation, hidden=hidden)
