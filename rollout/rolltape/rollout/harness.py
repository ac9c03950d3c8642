"""What every harness has: an engine, problems, and the tokenizer between them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from rolltape.numerics.char_tokenizer import Tokenizer
from rolltape.rollout.attempts import Attempt
from rolltape.rollout.engine import Engine, GenerationBatch, Int32, SamplingConfig
from rolltape.rollout.environment import Problem, ProblemSource
from rolltape.rollout.rendering import Renderer


class Harness(ABC):
    """Where text meets ids; :class:`rolltape.rollout.single_turn.SingleTurn` or ``agent_loop.AgentHarness``.

    Args:
        engine: samples.
        tokenizer: the engine's.
        max_length: most tokens of context and action together that the model takes.
    """

    stage: ClassVar[str]
    """Training stage that its rollouts belong to."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, max_length: int) -> None:
        self.engine = engine
        self.renderer = Renderer(tokenizer)
        self._tokenizer = tokenizer
        self._max_length = max_length

    @property
    @abstractmethod
    def environment(self) -> ProblemSource:
        """Where the problems come from."""

    @abstractmethod
    def is_correct(self, problem: Problem, attempt: Attempt) -> bool:
        """Whether an attempt, as the tape has it, is right by the environment's own rule."""

    @property
    def name(self) -> str:
        """Name on the tape."""
        return "rolltape.rollout"

    def sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        """``sampling`` with the tokenizer's end as stop token, where it names none."""
        if sampling.stop_token_ids:
            return sampling
        return dataclasses.replace(sampling, stop_token_ids=(self._tokenizer.eos_id,))

    def prompt(self, problem: Problem) -> tuple[Int32, str]:
        """Context ids (int32 [P]) of a problem, and its text for reading."""
        return self.renderer.prompt(problem)

    def text(self, token_ids: Sequence[int]) -> str:
        """Ids as text, without special tokens."""
        return self._tokenizer.decode(token_ids)

    def texts(self, generations: GenerationBatch) -> list[str]:
        """Each action as text, without special tokens; equal actions are decoded once."""
        token_ids, offsets = generations.token_ids.tolist(), generations.offsets.tolist()
        decoded: dict[tuple[int, ...], str] = {}
        texts = []
        for first, last in pairwise(offsets):
            key = tuple(token_ids[first:last])
            if key not in decoded:
                decoded[key] = self._tokenizer.decode(key)
            texts.append(decoded[key])
        return texts
