"""Every event kind (design §4), by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from rolltape.schema.errors import UnknownKindError
from rolltape.schema.kinds._kind import TOPICS, Kind, Plane, Topic
from rolltape.schema.kinds.control import CONTROL_KINDS, KEEPING_KINDS
from rolltape.schema.kinds.rollout import LABEL_KINDS, ROLLOUT_KINDS, TEACHER_KINDS
from rolltape.schema.kinds.run import DISPATCH_KINDS, PROBLEM_KINDS, RUN_KINDS
from rolltape.schema.kinds.training import TRAINING_KINDS, WEIGHTS_KINDS

__all__ = ["KINDS", "TOPICS", "Kind", "Plane", "Topic", "kind_named"]

KINDS: Final = MappingProxyType(
    {
        kind.name: kind
        for group in (
            RUN_KINDS,
            PROBLEM_KINDS,
            DISPATCH_KINDS,
            ROLLOUT_KINDS,
            LABEL_KINDS,
            TEACHER_KINDS,
            TRAINING_KINDS,
            WEIGHTS_KINDS,
            CONTROL_KINDS,
            KEEPING_KINDS,
        )
        for kind in group
    }
)


def kind_named(name: str) -> Kind:
    """The kind called ``name``.

    Raises:
        UnknownKindError: no kind has this name; the message lists near ones.
    """
    try:
        return KINDS[name]
    except KeyError:
        import difflib

        near = difflib.get_close_matches(name, KINDS, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownKindError(f"expected one of {len(KINDS)} event kinds, got {name!r}{hint}") from None
