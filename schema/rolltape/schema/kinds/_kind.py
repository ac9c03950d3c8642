"""What an event kind is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from rolltape.schema.columns import Column

Topic = Literal["rollout", "teacher", "training", "weights", "control"]
Plane = Literal[
    "run", "problem", "dispatch", "rollout", "label", "teacher", "training", "weights", "control", "keeping"
]

TOPICS: tuple[Topic, ...] = ("rollout", "teacher", "training", "weights", "control")

TOPIC_OF_PLANE: dict[Plane, Topic] = {
    "run": "control",
    "problem": "rollout",
    "dispatch": "rollout",
    "rollout": "rollout",
    "label": "rollout",
    "teacher": "teacher",
    "training": "training",
    "weights": "weights",
    "control": "control",
    "keeping": "control",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The spec of one event kind.

    ``columns`` are the fields of the struct column that carries the kind's name. ``tokens`` names the shared token
    columns that the kind fills. ``requires`` names envelope columns that may not be null for this kind.
    """

    name: str
    plane: Plane
    doc: str
    columns: tuple[Column, ...]
    tokens: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def topic(self) -> Topic:
        """The log topic that carries the kind."""
        return TOPIC_OF_PLANE[self.plane]

    @property
    def indexed(self) -> bool:
        """Whether events of this kind are numbered by ``event_index`` (rollout plane only)."""
        return self.plane == "rollout"

    @property
    def struct_type(self) -> pa.StructType:
        """Arrow type of the kind's own struct column."""
        return pa.struct([spec.field for spec in self.columns])
