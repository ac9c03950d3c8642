"""The harness of agents: what a run's budgets and an environment's texts mean in ids."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rolltape.numerics.char_tokenizer import Tokenizer
from rolltape.rollout.agent_config import AgentConfig
from rolltape.rollout.agent_context import Context, Span, Step
from rolltape.rollout.agent_environment import AgentEnvironment
from rolltape.rollout.attempts import Attempt
from rolltape.rollout.compaction import Frame, check_budgets, frame_of, needs_summary
from rolltape.rollout.engine import Engine, Int32, SamplingConfig
from rolltape.rollout.environment import Problem
from rolltape.rollout.harness import Harness
from rolltape.schema.digest import sha256_hex
from rolltape.schema.errors import ConfigError


class AgentHarness(Harness):
    """An engine, an environment of several turns, and the budgets between them.

    Args:
        engine: samples.
        environment: poses, replies and judges.
        tokenizer: the engine's.
        max_length: most tokens of context and action together that the model takes.
        config: the run's budgets.

    Raises:
        ConfigError: the context budget is more than the model takes.
    """

    stage: ClassVar[str] = "agentic"

    def __init__(
        self,
        engine: Engine,
        environment: AgentEnvironment,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        config: AgentConfig,
    ) -> None:
        super().__init__(engine, tokenizer, max_length=max_length)
        if config.context_budget > max_length:
            raise ConfigError(
                f"agent.context_budget: expected at most {max_length}, which the model takes, "
                f"got {config.context_budget}"
            )
        self._environment = environment
        self.config = config
        self.budget = config.context_budget or max_length

    @property
    def environment(self) -> AgentEnvironment:
        """Poses the problems, replies to actions and judges."""
        return self._environment

    @property
    def name(self) -> str:
        """Name on the tape, with a digest of the texts that frame a summary where there are any."""
        if not self.config.compaction.is_on:
            return "rolltape.rollout.agent"
        own = self._environment
        texts = f"{own.summary_instruction}\x1f{own.resume_before}\x1f{own.resume_after}"
        return f"rolltape.rollout.agent+compaction-{sha256_hex(texts.encode())[:12]}"

    def check(self, sampling: SamplingConfig) -> None:
        """Refuse budgets that leave no room.

        Raises:
            ConfigError: names the field and the allowed range.
        """
        length = 0
        problems = self._environment.problems("train")
        if self.config.compaction.is_on and problems:
            context = Context((Span(self.prompt(problems[0])[0]),))
            length = len(self.observation(context, self._environment.summary_instruction, problems[0]))
        check_budgets(self.config, sampling, budget=self.budget, instruction_length=length)

    def check_room(self, problem: Problem, sampling: SamplingConfig) -> None:
        """Refuse a problem whose first turn has no room.

        Raises:
            ConfigError: names the problem.
        """
        length = len(self.prompt(problem)[0])
        if length + sampling.max_tokens > self.budget:
            raise ConfigError(
                f"sampling.max_tokens: expected at most {self.budget - length} after the {length} tokens of problem "
                f"{problem.problem_id} (the context budget is {self.budget}), got {sampling.max_tokens}"
            )

    def needs_summary(self, used: int) -> bool:
        """Whether a context of so many tokens asks for a summary before the next turn."""
        return needs_summary(used, budget=self.budget, threshold=self.config.compaction.threshold)

    def observation(self, context: Context, text: str, problem: Problem) -> Int32:
        """Ids of a text that follows what the context holds, int32."""
        return self.renderer.observation(text, context.last_id, is_chat=bool(problem.messages))

    def placeholder(self, step: Step, problem: Problem) -> Span:
        """What takes the place of a step's observation."""
        last = int(step.actions[-1].token_ids[-1])
        text = self._environment.folded_observation
        return Span(self.renderer.observation(text, last, is_chat=bool(problem.messages)))

    def frame(self, problem: Problem, prompt: Span) -> Frame:
        """What stands around a summary; what it shares with the beginning of the prompt is a copy of it."""
        before, after = self.renderer.resume_frame(
            problem,
            system=self._environment.system_text(problem),
            before=self._environment.resume_before,
            after=self._environment.resume_after,
            includes_user=self.config.compaction.resume_includes_user,
        )
        return frame_of(before, after, prompt)

    def turn_text(self, parts: list[Int32]) -> str:
        """The text of one turn, which an engine may have sampled in several parts."""
        return self.text(np.concatenate(parts).tolist())

    def is_correct(self, problem: Problem, attempt: Attempt) -> bool:
        """Whether an attempt solved its problem, by the judgement that the tape has."""
        return bool(attempt.components) and self._environment.is_correct(problem, attempt.components)
