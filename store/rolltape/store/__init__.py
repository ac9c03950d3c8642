"""The lake: one Delta table of events, its maintenance, projections and SQL. Never imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rolltape.store.lake import Commit as Commit
    from rolltape.store.lake import Lake as Lake
    from rolltape.store.location import Location as Location
    from rolltape.store.snapshot import DataFile as DataFile
    from rolltape.store.snapshot import Snapshot as Snapshot
    from rolltape.store.tail import Delivery as Delivery
    from rolltape.store.tail import Tail as Tail
    from rolltape.store.window import Window as Window

_PUBLIC: Final = {
    "Commit": "lake",
    "DataFile": "snapshot",
    "Delivery": "tail",
    "Lake": "lake",
    "Location": "location",
    "Snapshot": "snapshot",
    "Tail": "tail",
    "Window": "window",
}

__all__ = ["Commit", "DataFile", "Delivery", "Lake", "Location", "Snapshot", "Tail", "Window"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that importing the room stays cheap."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
