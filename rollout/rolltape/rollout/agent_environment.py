"""What an environment of several turns is: it speaks text, turn by turn, and never touches ids (design §8).

The policy acts, the environment replies with an observation, until the environment says that the episode is over or a
budget ends it. An episode is a function of its problem, its seed and the texts of the policy's actions alone: a batch
that was cut short by a crash is played again from its first turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rolltape.rollout.environment import Problem, ProblemSource
from rolltape.schema.reward import RewardComponent

ObservationSource = Literal["tool", "environment"]
ErrorClass = Literal["policy", "infrastructure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next. It is rendered to ids once and never trained."""

    text: str
    source: ObservationSource = "environment"
    tool_name: str | None = None
    status: Literal["ok", "error"] = "ok"
    error_class: ErrorClass | None = None  # whose fault an error is


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call as the environment reads it from an action; recorded for reading only."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The environment's side of one turn.

    ``reward`` is what this action alone earns, credited to its last token; empty: nothing, which is not 0.
    ``erroneous`` says why the action should not be imitated (a call that could not be parsed, say): a run that is
    configured so keeps it in the context and out of the loss.
    """

    observation: Observation | None = None
    done: bool = False
    reward: tuple[RewardComponent, ...] = ()
    erroneous: str | None = None


class Episode(ABC):
    """One rollout's way through the environment."""

    @abstractmethod
    def reply(self, text: str, *, ended: bool) -> Reply:
        """What the policy's action leads to.

        Args:
            text: the action, decoded, without its stop token.
            ended: the policy stopped by itself; False: it was cut by ``max_tokens`` and the turn is over all the same.

        Raises:
            Exception: the environment failed, not the policy: the rollout ends as ``env_failed`` with an invalid
                reward, never 0.
        """

    @abstractmethod
    def judge(self) -> tuple[RewardComponent, ...]:
        """Components of the whole rollout's reward, always the same ones in the same order.

        Called once, when the episode is over or cut by a budget. Empty: only the turns were rewarded.

        Raises:
            Exception: the verifier failed: the reward is invalid, never 0.
        """

    def close(self) -> None:
        """Let go of what the episode holds. Called once, whatever happened before."""
        return


class AgentEnvironment(ProblemSource):
    """Poses problems and plays them turn by turn.

    A problem's ``prompt`` (or its messages) is the context of the first turn. Of it :meth:`system_text` is what stays
    in the context when history is summarised. The texts below frame a summary; they have to be in the model's alphabet.
    """

    summary_instruction: ClassVar[str] = (
        "Write a summary that lets you continue without the conversation so far. State: the original goal; the actions "
        "done; the important observations; unresolved errors; the current state; the next steps."
    )
    """Asks the policy for a summary of its own history."""
    resume_before: ClassVar[str] = "Summary of the work so far:\n"
    """Comes before the accepted summary in the rewritten context."""
    resume_after: ClassVar[str] = "\nContinue from here.\n"
    """Comes after it."""
    folded_observation: ClassVar[str] = "[observation folded]"
    """Takes the place of an observation that was folded away."""

    @abstractmethod
    def open(self, problem: Problem, seed: int) -> Episode:
        """Begin an episode.

        Args:
            problem: one of :meth:`problems`.
            seed: in [0, 2**63), of this rollout alone: all chance in the episode derives from it.

        Raises:
            Exception: the environment failed; see :meth:`Episode.reply`.
        """

    @abstractmethod
    def is_correct(self, problem: Problem, components: Sequence[RewardComponent]) -> bool:
        """Whether a rollout with this judgement solved the problem, for evaluation."""

    def system_text(self, problem: Problem) -> str:
        """The beginning of a raw prompt that survives a summary; for chat problems the system messages do."""
        del problem
        return ""

    def tool_calls(self, text: str) -> tuple[ToolCall, ...]:
        """The tool calls that an action makes, for reading."""
        del text
        return ()
