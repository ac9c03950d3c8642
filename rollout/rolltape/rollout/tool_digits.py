"""A tool task that a tiny model learns in minutes: what the answer needs is only to be had by a call.

Every problem has a few slots, each of which hides a digit. The prompt names one slot, ``2>``. A reply of one digit is a
call: the tool returns what that slot holds, ``3=``. A reply of two digits is the answer: the slot and its digit in
ascending order, ``23``. Without the call the digit can only be guessed, and a guess earns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Final

from rolltape.rollout import rewards
from rolltape.rollout.agent_environment import AgentEnvironment, Episode, Observation, Reply, ToolCall
from rolltape.rollout.environment import Problem, Split
from rolltape.rollout.seeds import derived_seed, shuffled
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent

_TOOL: Final = "slot"
_MOST_DIGITS: Final = 5  # of the digits there are as many slots, so problems grow as n to the power n + 1
_CALL, _ANSWER = 1, 2  # characters of a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDigitsConfig:
    """Options of :class:`ToolDigits`; the weights are those of the reward's three components and add up to 1."""

    num_digits: int = 4  # slots, and digits that they may hold: 0 to num_digits - 1
    num_heldout: int = 200
    lookup_weight: float = 0.3
    exact_weight: float = 0.4

    def __post_init__(self) -> None:
        if not 2 <= self.num_digits <= _MOST_DIGITS:
            raise ConfigError(f"environment.options.num_digits: expected 2 to {_MOST_DIGITS}, got {self.num_digits}")
        if not 0 <= self.num_heldout < self.num_problems:
            raise ConfigError(
                f"environment.options.num_heldout: expected 0 to {self.num_problems - 1}, got {self.num_heldout}"
            )
        if not (self.lookup_weight >= 0 and self.exact_weight >= 0 and self.lookup_weight + self.exact_weight <= 1):
            raise ConfigError(
                "environment.options.lookup_weight, environment.options.exact_weight: expected both 0 or more and "
                f"together at most 1, got {self.lookup_weight} and {self.exact_weight}"
            )

    @property
    def num_problems(self) -> int:
        """Problems of both splits."""
        return int(self.num_digits ** (self.num_digits + 1))


class ToolDigits(AgentEnvironment):
    """Look a digit up, then put it and its slot in order."""

    name: ClassVar[str] = "tool_digits"
    version: ClassVar[str] = "1"
    domain: ClassVar[str] = "tools"
    source: ClassVar[str] = "all fillings of a few slots, made by rolltape"
    verifier: ClassVar[str] = "sorted_text"

    def __init__(self, config: ToolDigitsConfig | None = None, seed: int = 0) -> None:
        self.config = config if config is not None else ToolDigitsConfig()
        self._problems = _split_problems(self.config, seed)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Problems of one split, in the order of their ids."""
        return self._problems[split]

    def open(self, problem: Problem, seed: int) -> Episode:
        """An episode; there is no chance in it."""
        del seed
        return _Lookup(problem, self.config)

    def is_correct(self, problem: Problem, components: Sequence[RewardComponent]) -> bool:
        """Whether the answer was right, after the call."""
        del problem
        return any(component.name == "exact" and component.value == 1.0 for component in components)

    def tool_calls(self, text: str) -> tuple[ToolCall, ...]:
        """The slot that a reply of one digit asks for."""
        return (ToolCall(name=_TOOL, arguments=text),) if len(text) == _CALL and text.isdigit() else ()


class _Lookup(Episode):
    """The slot's name, the calls, the answer."""

    def __init__(self, problem: Problem, config: ToolDigitsConfig) -> None:
        slot, self._slots = _parts(problem.problem_id)
        self._slot = str(slot)
        self._answer = problem.answer
        self._config = config
        self._lookup = 0.0  # best call so far
        self._found = False
        self._positions = self._exact = 0.0

    def reply(self, text: str, *, ended: bool) -> Reply:
        """A slot's digit for a call, the end for an answer, the question again for anything else."""
        if self._found:
            # What comes after the right call is an attempt at the answer, whatever it looks like.
            self._positions = rewards.position_share(text, self._answer, ended=ended)
            self._exact = rewards.exact_text(text, self._answer, ended=ended)
        else:
            self._lookup = max(self._lookup, rewards.position_share(text, self._slot, ended=ended))
        is_number = ended and text.isdigit()
        if is_number and len(text) == _ANSWER:
            return Reply(done=True)
        if is_number and len(text) == _CALL and int(text) < len(self._slots):
            self._found |= text == self._slot
            return Reply(observation=Observation(text=f"{self._slots[int(text)]}=", source="tool", tool_name=_TOOL))
        return Reply(
            observation=Observation(text=f"{self._slot}>", status="error", error_class="policy"),
            erroneous="neither a slot nor an answer of two digits",
        )

    def judge(self) -> tuple[RewardComponent, ...]:
        """Components ``lookup``, ``positions`` and ``exact``; the last two are 0 where the digit was not looked up."""
        config = self._config
        values = (
            ("lookup", self._lookup, config.lookup_weight),
            ("positions", self._positions, 1.0 - config.lookup_weight - config.exact_weight),
            ("exact", self._exact, config.exact_weight),
        )
        return rewards.rule_components(values, scorer=ToolDigits.name, version=ToolDigits.version)


def _parts(problem_id: str) -> tuple[int, str]:
    """The slot that is asked for, and what the slots hold, out of an id as ``tool_digits/2-0313``."""
    slot, _, slots = problem_id.rpartition("/")[2].partition("-")
    return int(slot), slots


def _split_problems(config: ToolDigitsConfig, seed: int) -> dict[Split, tuple[Problem, ...]]:
    digits = "0123456789"[: config.num_digits]
    fillings = ["".join(filling) for filling in product(digits, repeat=config.num_digits)]
    order = shuffled(derived_seed("tool_digits", config.num_digits, seed), config.num_problems)
    held_out = set(order[: config.num_heldout].tolist())
    problems: dict[Split, list[Problem]] = {"train": [], "heldout": []}
    for number, (slot, filling) in enumerate(product(digits, fillings)):
        split: Split = "heldout" if number in held_out else "train"
        problems[split].append(
            Problem(
                problem_id=f"{ToolDigits.name}/{slot}-{filling}",
                split=split,
                prompt=f"{slot}>",
                answer="".join(sorted(slot + filling[int(slot)])),
            )
        )
    return {split: tuple(of_split) for split, of_split in problems.items()}
