"""An environment of several turns for tests with a real model: all that an episode can meet, by its seed."""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from rolltape.rollout import environments
from rolltape.rollout.agent_environment import AgentEnvironment, Episode, Observation, Reply, ToolCall
from rolltape.rollout.environment import Problem, Split
from rolltape.rollout.rewards import rule_component
from rolltape.rollout.seeds import derived_seed
from rolltape.schema.reward import RewardComponent

NAME = "dice"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiceConfig:
    """Options of :class:`Dice`."""

    num_turns: int = 5
    num_problems: int = 12
    num_heldout: int = 6
    fail_every: int = 3  # episodes whose seed is divisible by this fail in their second turn; 0: none
    reward_turns: bool = True
    delay_s: float = 0.0  # of each reply


class DiceEpisode(Episode):
    """Each turn shows three digits that follow from the seed, the turn and what was said."""

    def __init__(self, config: DiceConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._turn = 0
        self._num_digits = 0

    def reply(self, text: str, *, ended: bool) -> Reply:
        time.sleep(self._config.delay_s)
        self._turn += 1
        if self._turn == 2 and self._config.fail_every and self._seed % self._config.fail_every == 0:
            raise OSError("the table broke")
        says_digit = text[:1].isdigit()
        self._num_digits += says_digit
        thrown = derived_seed("dice", self._seed, self._turn, text, str(ended)) % 1000
        return Reply(
            observation=Observation(text=f"{thrown:03d}>", source="tool", tool_name="dice"),
            done=self._turn == self._config.num_turns or text.startswith("="),
            reward=(_component("digit", float(says_digit)),) if says_digit and self._config.reward_turns else (),
            erroneous=None if ended else "cut off",
        )

    def judge(self) -> tuple[RewardComponent, ...]:
        return (_component("digits", self._num_digits / self._config.num_turns),)


class Dice(AgentEnvironment):
    """Says digits, gets digits."""

    name: ClassVar[str] = NAME
    version: ClassVar[str] = "1"
    domain: ClassVar[str] = "dice"
    source: ClassVar[str] = "made by tests"
    verifier: ClassVar[str] = "digits"
    summary_instruction: ClassVar[str] = "=="
    resume_before: ClassVar[str] = ">"
    resume_after: ClassVar[str] = " "

    def __init__(self, config: DiceConfig | None = None, seed: int = 0) -> None:
        del seed
        self.config = config or DiceConfig()
        self._problems: dict[Split, tuple[Problem, ...]] = {
            "train": _problems("train", self.config.num_problems),
            "heldout": _problems("heldout", self.config.num_heldout),
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._problems[split]

    def open(self, problem: Problem, seed: int) -> Episode:
        return DiceEpisode(self.config, seed)

    def is_correct(self, problem: Problem, components: Sequence[RewardComponent]) -> bool:
        return (components[0].value or 0.0) >= 0.5

    def system_text(self, problem: Problem) -> str:
        return "=>"

    def tool_calls(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall(name="dice", arguments=text),)


def _problems(split: Split, size: int) -> tuple[Problem, ...]:
    return tuple(
        Problem(problem_id=f"{NAME}/{split}/{number}", split=split, prompt=f"=>{number:02d}", answer="")
        for number in range(size)
    )


def _component(name: str, value: float) -> RewardComponent:
    return rule_component(name, value, 1.0, scorer=NAME, version="1")


def register() -> None:
    """Make the environment known by its name in this process."""
    known = cast("MutableMapping[str, Any]", environments.ENVIRONMENTS)
    known[NAME] = ("tests.agent_tasks", "Dice", "DiceConfig")
