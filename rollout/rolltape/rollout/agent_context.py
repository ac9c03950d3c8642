"""The context of one agent as spans of ids: what each token was copied from, and how it is rewritten.

Ids are only ever appended or copied. A span knows the event whose tokens it shows, so that a rewrite can say where
every token of its context came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rolltape.rollout.engine import Int32


class Span(NamedTuple):
    """Consecutive ids, and the event that they were first recorded in (None: template text)."""

    token_ids: Int32
    event_id: str | None = None
    source_start: int = 0  # place of the first id among that event's tokens


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One turn: what the policy did (in several parts where it was interrupted), then what it saw."""

    actions: tuple[Span, ...]
    observation: Span | None = None
    is_folded: bool = False  # the observation was replaced by the placeholder

    @property
    def spans(self) -> tuple[Span, ...]:
        """Its tokens in order."""
        return self.actions if self.observation is None else (*self.actions, self.observation)


@dataclass(slots=True, eq=False)
class Context:
    """``head`` (the prompt, or what a rewrite put in its place) and the turns after it."""

    head: tuple[Span, ...]
    steps: list[Step] = field(default_factory=list)
    open_step: list[Span] = field(default_factory=list)  # actions of the turn that is going on

    @property
    def spans(self) -> list[Span]:
        """All tokens in order."""
        return [*self.head, *(span for step in self.steps for span in step.spans), *self.open_step]

    @property
    def token_ids(self) -> Int32:
        """The ids, int32 [L]."""
        return joined(self.spans)

    @property
    def last_id(self) -> int:
        """The last id."""
        return next(int(span.token_ids[-1]) for span in reversed(self.spans) if len(span.token_ids))

    def __len__(self) -> int:
        return length_of(self.spans)

    def act(self, span: Span) -> None:
        """Append what the policy sampled."""
        self.open_step.append(span)

    def close_step(self, observation: Span | None) -> None:
        """The turn is over."""
        self.steps.append(Step(tuple(self.open_step), observation))
        self.open_step = []

    def folded(self, keep: int, placeholder: Callable[[Step], Span]) -> Context:
        """The same context with all but the last ``keep`` observations replaced by their placeholder."""
        num_folded = max(0, len(self.steps) - keep)
        old = [
            step
            if step.is_folded or step.observation is None
            else replace(step, observation=placeholder(step), is_folded=True)
            for step in self.steps[:num_folded]
        ]
        return Context(self.head, [*old, *self.steps[num_folded:]])


def joined(spans: Iterable[Span]) -> Int32:
    """All ids of some spans, int32 [L]."""
    parts = [span.token_ids for span in spans]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def length_of(spans: Iterable[Span]) -> int:
    """Number of ids of some spans."""
    return sum(len(span.token_ids) for span in spans)


def provenance(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The rows of ``context_rewritten.provenance``: spans that were copied, by their place in the new context."""
    rows, start = [], 0
    for span in spans:
        length = len(span.token_ids)
        if span.event_id is not None and length:
            rows.append(
                {"start": start, "length": length, "event_id": span.event_id, "source_start": span.source_start}
            )
        start += length
    return rows
