"""Budgets of a rollout of several turns: the section ``[agent]`` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from rolltape.schema.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionConfig:
    """When and how history gives way to a summary (algorithms.md §4.12). ``max_compactions`` 0 turns it off.

    Before a turn whose context leaves fewer than ``threshold`` tokens of the budget the policy is asked for a summary
    of at most ``max_summary_tokens``. The new context is the system part, the summary and the last ``keep_recent``
    turns; where that does not fit it is the last one, then none.
    """

    max_compactions: int = 0
    threshold: int = 0
    max_summary_tokens: int = 0
    keep_recent: int = 2
    summary_attempts: int = 1  # a summary that is empty or cut by length is asked for again; the last try counts
    resume_includes_user: bool = False  # keep the whole prompt instead of its system part (D18)

    def __post_init__(self) -> None:
        for name in ("max_compactions", "keep_recent"):
            if getattr(self, name) < 0:
                raise ConfigError(f"agent.compaction.{name}: expected 0 or more, got {getattr(self, name)}")
        if self.summary_attempts < 1:
            raise ConfigError(f"agent.compaction.summary_attempts: expected 1 or more, got {self.summary_attempts}")
        if not self.is_on:
            return
        for name in ("threshold", "max_summary_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"agent.compaction.{name}: expected 1 or more where max_compactions is {self.max_compactions}, "
                    f"got {getattr(self, name)}"
                )

    @property
    def is_on(self) -> bool:
        """Whether summaries are asked for."""
        return self.max_compactions > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Budgets of one rollout. Environments of a single turn read none of it.

    ``keep_recent_observations`` and ``discard_above`` are the two rules of search agents (algorithms.md §4.19): older
    observations give way to a placeholder, and where the context is still longer than ``discard_above`` all turns do.
    """

    max_turns: int = 8
    context_budget: int = 0  # tokens of context and action together; 0: what the model takes
    mask_erroneous: bool = False  # keep actions that the environment calls erroneous out of the loss
    switch_between_turns: bool = True  # workers that run ahead take new weights between two turns
    max_interruptions: int = 3  # how often an engine may break off one turn before the rollout is given up
    keep_recent_observations: int = 0  # 0: keep all
    discard_above: int = 0  # tokens; 0: never
    compaction: CompactionConfig = field(default_factory=CompactionConfig)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"agent.max_turns: expected 1 or more, got {self.max_turns}")
        for name in ("context_budget", "max_interruptions", "keep_recent_observations", "discard_above"):
            if getattr(self, name) < 0:
                raise ConfigError(f"agent.{name}: expected 0 or more, got {getattr(self, name)}")
        if self.discard_above and not self.keep_recent_observations:
            raise ConfigError("agent.discard_above: expected keep_recent_observations of 1 or more beside it, got 0")
        if self.compaction.is_on and self.keep_recent_observations:
            raise ConfigError(
                "agent.keep_recent_observations: expected 0 where agent.compaction is on, got "
                f"{self.keep_recent_observations}; choose one way to shorten the context"
            )
