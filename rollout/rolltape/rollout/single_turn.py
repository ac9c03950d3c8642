"""The single-turn harness: a problem's text becomes a context, the engine continues it once, the environment judges.

This is where text meets ids: contexts are rendered once from text, answers are decoded for reading and judging, and no
answer is ever encoded again (design §5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rolltape.numerics.char_tokenizer import Tokenizer
from rolltape.rollout.attempts import Attempt
from rolltape.rollout.engine import Engine, GenerationBatch, GenerationRequest, SamplingConfig
from rolltape.rollout.environment import Answer, Environment, Problem
from rolltape.rollout.harness import Harness
from rolltape.rollout.rewards import failed_component
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent


class SingleTurn(Harness):
    """Problems in, one action each out.

    Args:
        engine: samples.
        environment: poses and judges.
        tokenizer: the engine's.
        max_length: most tokens of context and action together that the model takes.
    """

    stage: ClassVar[str] = "reasoning"

    def __init__(self, engine: Engine, environment: Environment, tokenizer: Tokenizer, *, max_length: int) -> None:
        super().__init__(engine, tokenizer, max_length=max_length)
        self._environment = environment

    @property
    def environment(self) -> Environment:
        """Poses the problems and judges the answers."""
        return self._environment

    def generate(self, problems: Sequence[Problem], seeds: Sequence[int], sampling: SamplingConfig) -> GenerationBatch:
        """One action for each problem, as one batch in the order given.

        Raises:
            ConfigError: a context leaves no room for ``max_tokens``; names the problem.
        """
        for problem in problems:
            self._check_room(problem, sampling)
        requests = [
            GenerationRequest(prompt_token_ids=self.prompt(problem)[0], seed=seed)
            for problem, seed in zip(problems, seeds, strict=True)
        ]
        return self.engine.generate(requests, sampling)

    def answer(self, token_ids: Sequence[int], *, ended: bool) -> Answer:
        """An action read back from the tape, as the environment sees it."""
        return Answer(text=self.text(token_ids), ended=ended)

    def is_correct(self, problem: Problem, attempt: Attempt) -> bool:
        """Whether an attempt, as the tape has it, is right by the environment's own rule."""
        answer = self.answer(attempt.token_ids, ended=attempt.ended == "completed")
        return self.environment.is_correct(problem, answer)

    def judge(self, problem: Problem, answer: Answer) -> tuple[RewardComponent, ...]:
        """The environment's components; a verifier that fails makes the reward invalid, never 0."""
        try:
            return self.environment.judge(problem, answer)
        except Exception as error:  # noqa: BLE001 - whatever a verifier raises is its own failure and goes onto the tape as such
            return (failed_component(self.environment.name, self.environment.version, error),)

    def _check_room(self, problem: Problem, sampling: SamplingConfig) -> None:
        length = len(self.prompt(problem)[0])
        if length + sampling.max_tokens > self._max_length:
            raise ConfigError(
                f"sampling.max_tokens: expected at most {self._max_length - length} after the {length} tokens of "
                f"problem {problem.problem_id} (the model takes {self._max_length}), got {sampling.max_tokens}"
            )
