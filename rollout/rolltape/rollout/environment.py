"""What an environment is: it poses problems and judges answers, in text; it never sees a token id (design §8)."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rolltape.schema.reward import RewardComponent

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem, as ``problem_registered`` records it.

    Exactly one of ``prompt`` (raw text for a model without a chat template) and ``messages`` is set.
    """

    problem_id: str  # unique within the tape, as "sort_digits/271"
    split: Split
    answer: str  # reference answer
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    human_reference: str | None = None  # human-written solution, kept as a style anchor


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a policy answered: decoded text without the stop token."""

    text: str
    ended: bool  # the policy stopped by itself; False: cut by length


class ProblemSource(ABC):
    """Poses problems: what single-turn environments and those of agents share.

    ``name`` and ``version`` go onto the tape with every rollout; a change of prompts or rewards is a new version.
    """

    name: ClassVar[str]
    """Name under which the environment is configured and recorded."""
    version: ClassVar[str]
    """Version of its prompts and rewards."""
    domain: ClassVar[str]
    """Domain of its problems, for routing and reports."""
    source: ClassVar[str]
    """Where its problems come from, with their licence."""
    verifier: ClassVar[str]
    """Name of the rule that judges."""

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of one split, always in the same order; the splits share no problem."""

    def problem_columns(self) -> dict[str, Any]:
        """Columns of ``problem_registered``, one row for each problem of both splits."""
        problems = [*self.problems("train"), *self.problems("heldout")]
        return {
            "problem_id": [problem.problem_id for problem in problems],
            "prompt": [problem.prompt for problem in problems],
            "messages_json": [_messages_json(problem) for problem in problems],
            "domain": self.domain,
            "source": self.source,
            "split": [problem.split for problem in problems],
            "verifier": self.verifier,
            "verifier_version": self.version,
            "answer": [problem.answer for problem in problems],
            "human_reference": [problem.human_reference for problem in problems],
        }


class Environment(ProblemSource):
    """Judges one answer to each problem. Environments of several turns: :mod:`rolltape.rollout.agent_environment`."""

    @abstractmethod
    def judge(self, problem: Problem, answer: Answer) -> tuple[RewardComponent, ...]:
        """The components of the answer's reward, always the same ones in the same order.

        Raises:
            Exception: whatever goes wrong in a verifier; the caller records that no reward could be earned, never 0.
        """

    @abstractmethod
    def is_correct(self, problem: Problem, answer: Answer) -> bool:
        """Whether the answer is right, for evaluation (exact match)."""


def _messages_json(problem: Problem) -> str | None:
    if not problem.messages:
        return None
    return json.dumps([dataclasses.asdict(message) for message in problem.messages], ensure_ascii=False)
