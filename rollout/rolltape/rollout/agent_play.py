"""One rollout of several turns while it is being played: its context, its place, and what it earned so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from rolltape.rollout.agent_context import Context, Span
from rolltape.rollout.agent_environment import Episode
from rolltape.rollout.agent_recording import End, Masked
from rolltape.rollout.engine import FinishReason, Int32
from rolltape.rollout.environment import Problem
from rolltape.schema.reward import RewardComponent


@dataclass(slots=True, kw_only=True, eq=False)
class Play:
    """A rollout of a batch. Rows that are played only for the batch's composition are not ``recorded``."""

    row: int  # in the batch
    problem: Problem
    seed: int
    recorded: bool
    prompt: Span
    context: Context
    episode: Episode | None = None
    segment: int = 0  # index of the segment that the next action belongs to
    num_compactions: int = 0
    num_action_tokens: int = 0
    num_observation_tokens: int = 0
    turn_ids: list[Int32] = field(default_factory=list)  # of the actions of the turn that is going on
    turn_events: list[str] = field(default_factory=list)  # their event ids
    finish_reason: FinishReason = "stop"  # of the last of them
    turn_rewards: list[tuple[str, tuple[RewardComponent, ...]]] = field(default_factory=list)  # by action event
    masks: list[Masked] = field(default_factory=list)
    status: str | None = None
    cause: str = ""
    failure: Exception | None = None  # what kept it from being judged

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.status is not None

    @property
    def end(self) -> End:
        """How it ended, with its check sums."""
        assert self.status is not None
        return End(
            status=self.status,
            cause=self.cause,
            num_action_tokens=self.num_action_tokens,
            num_observation_tokens=self.num_observation_tokens,
        )

    def stop(self, status: str, cause: str) -> None:
        """It ends here."""
        self.status, self.cause = status, cause

    def fail(self, error: Exception) -> None:
        """The environment failed, not the policy."""
        self.failure = error
        self.stop("env_failed", f"{type(error).__name__}: {error}"[:500])

    def begin_turn(self) -> None:
        """The next action opens a turn."""
        self.turn_ids, self.turn_events = [], []
