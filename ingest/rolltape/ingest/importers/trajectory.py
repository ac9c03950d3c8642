"""One imported trajectory: numbers its events, keeps its check sums and states its end and reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltape.ingest.importers.rows import EventRows, Ids
from rolltape.schema.reward import SCALARISER_VERSION, RewardComponent, scalarise


@dataclass(slots=True)
class TrajectoryRows:
    """Adds the events of one trajectory (attempt 0) to ``rows``; ``place`` is where it stands in the file.

    ``event_index`` counts from 0 in the order of the calls, so a trajectory is built in its own order.
    """

    rows: EventRows
    ids: Ids
    place: tuple[str | int, ...]
    group_id: str
    problem_id: str
    _next_index: int = 0
    _num_action_tokens: int | None = 0
    _num_observation_tokens: int | None = 0
    _actions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def trajectory_id(self) -> str:
        """Id of the trajectory."""
        return self.ids.of("trajectory", *self.place)

    def start(self, **fields: Any) -> None:
        """Add ``rollout_started``."""
        self._add("rollout_started", **fields)

    def action(
        self, turn: int, token_ids: Sequence[int] | None, log_probs: Sequence[float] | None, **fields: Any
    ) -> None:
        """Add ``action_sampled`` with ids and log-probs as the file has them; None means that it has none."""
        self._num_action_tokens = _plus(self._num_action_tokens, token_ids)
        event_id = self._add(
            "action_sampled",
            turn_index=turn,
            token_ids=token_ids,
            rollout_log_probs=log_probs,
            action_kind="execution",
            **fields,
        )
        if token_ids:
            self._actions.append({"event_id": event_id, "start": 0, "length": len(token_ids)})

    def observation(self, turn: int, token_ids: Sequence[int] | None, **fields: Any) -> None:
        """Add ``observation_received``."""
        self._num_observation_tokens = _plus(self._num_observation_tokens, token_ids)
        self._add("observation_received", turn_index=turn, token_ids=token_ids, **fields)

    def end(self, status: str, cause: str | None = None) -> None:
        """Add ``rollout_ended`` with the check sums of what was added (null where ids are unknown)."""
        self._add(
            "rollout_ended",
            status=status,
            cause=cause,
            num_action_tokens=self._num_action_tokens,
            num_observation_tokens=self._num_observation_tokens,
            last_event_index=self._next_index,
        )

    def reward(self, components: Sequence[RewardComponent]) -> None:
        """Add ``reward_assigned`` for the whole attempt; the state follows from the components."""
        scalarised = scalarise(components)
        self.rows.add(
            "reward_assigned",
            event_id=self.ids.of("event", *self.place, "reward"),
            **self._names(),
            components=[component.to_row() for component in components],
            scalariser_version=SCALARISER_VERSION,
            scalar=scalarised.scalar,
            state=scalarised.state,
        )

    def mask(self, assigned_by: str | None, reason: str) -> None:
        """Add ``mask_assigned`` over all sampled tokens so far; nothing where none are known."""
        if self._actions:
            self.rows.add(
                "mask_assigned",
                event_id=self.ids.of("event", *self.place, "mask"),
                **self._names(),
                ranges=self._actions,
                assigned_by=assigned_by,
                reason=reason,
            )

    def _add(self, kind: str, **fields: Any) -> str:
        index = self._next_index
        self._next_index += 1
        event_id = self.ids.of("event", *self.place, index)
        self.rows.add(kind, event_id=event_id, event_index=index, **self._names(), **fields)
        return event_id

    def _names(self) -> dict[str, Any]:
        return {
            "trajectory_id": self.trajectory_id,
            "attempt": 0,
            "group_id": self.group_id,
            "problem_id": self.problem_id,
            "root_rollout_id": self.trajectory_id,
        }


def _plus(total: int | None, token_ids: Sequence[int] | None) -> int | None:
    """The running check sum; unknown once one part is."""
    return None if total is None or token_ids is None else total + len(token_ids)
