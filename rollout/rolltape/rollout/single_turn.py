"""The single-turn harness: a problem's text becomes a context, the engine continues it once, the environment judges.

This is where text meets ids: contexts are rendered once from text, answers are decoded for reading and judging, and no
answer is ever encoded again (design §5.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rolltape.numerics.char_tokenizer import Tokenizer
from rolltape.rollout.engine import Engine, GenerationBatch, GenerationRequest, Int32, SamplingConfig
from rolltape.rollout.environment import Answer, Environment, Problem
from rolltape.rollout.rewards import failed_component
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent

MAX_CACHED_PROMPTS = 100_000


class SingleTurn:
    """Problems in, one action each out.

    Args:
        engine: samples.
        environment: poses and judges.
        tokenizer: the engine's.
        max_length: most tokens of context and action together that the model takes.
    """

    def __init__(self, engine: Engine, environment: Environment, tokenizer: Tokenizer, *, max_length: int) -> None:
        self.engine = engine
        self.environment = environment
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._prompts: dict[str, tuple[Int32, str]] = {}

    def sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        """``sampling`` with the tokenizer's end as stop token, where it names none."""
        if sampling.stop_token_ids:
            return sampling
        return dataclasses.replace(sampling, stop_token_ids=(self._tokenizer.eos_id,))

    def prompt(self, problem: Problem) -> tuple[Int32, str]:
        """Context ids (int32 [P]) of a problem, and its text for reading."""
        found = self._prompts.get(problem.problem_id)
        if found is None:
            if len(self._prompts) >= MAX_CACHED_PROMPTS:
                self._prompts.clear()
            found = self._prompts[problem.problem_id] = self._render(problem)
        return found

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

    def answer(self, token_ids: Sequence[int], *, ended: bool) -> Answer:
        """An action read back from the tape, as the environment sees it."""
        return Answer(text=self._tokenizer.decode(token_ids), ended=ended)

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

    def _render(self, problem: Problem) -> tuple[Int32, str]:
        if problem.messages:
            messages = [dataclasses.asdict(message) for message in problem.messages]
            text = "\n\n".join(message.content for message in problem.messages)
            return np.array(self._tokenizer.encode_chat(messages), dtype=np.int32), text
        text = problem.prompt or ""
        return np.array(self._tokenizer.encode(text), dtype=np.int32), text
