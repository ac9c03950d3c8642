"""What a projection view is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

FOLDED: Final = ("folded_trajectories", "folded_segments")
"""Sources that the fold makes; views build on them, statements cannot name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A projection: its name, its SELECT, the kinds, views and folded sources that this reads, one line of meaning.

    ``columns`` says what the columns mean that it computes; the others mean what they mean where they come from.
    ``kept``: its rows are computed once for a statement, since several views build on them; else they stream.
    """

    name: str
    needs: tuple[str, ...]
    select: str
    doc: str
    columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    kept: bool = False
