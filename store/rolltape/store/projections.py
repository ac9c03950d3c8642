"""The projections of design §4 as views: state folded from events, rebuilt from events alone.

``trajectories`` and ``segments`` come from :mod:`rolltape.schema.fold` (one fold, no second one in SQL); everything
else is SQL over the event kinds, each of which is a view of its own name with its struct's fields as columns. A view is
created only when a statement names it, with the views that it needs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from rolltape.schema.kinds import KINDS
from rolltape.store.projections_conservation import CONSERVATION_VIEWS
from rolltape.store.projections_rollouts import ROLLOUT_VIEWS
from rolltape.store.projections_training import TRAINING_VIEWS
from rolltape.store.view import FOLDED, View

PROJECTIONS: Final = MappingProxyType(
    {view.name: view for view in (*ROLLOUT_VIEWS, *TRAINING_VIEWS, *CONSERVATION_VIEWS)}
)

EVENTS: Final = "events"
VIEW_COLUMNS: Final = "view_columns"

VIEW_NAMES: Final = frozenset({*KINDS, *PROJECTIONS, EVENTS, VIEW_COLUMNS})
"""Every name that a statement may read."""

__all__ = ["EVENTS", "FOLDED", "PROJECTIONS", "VIEW_COLUMNS", "VIEW_NAMES", "View"]
