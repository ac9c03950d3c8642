"""A task that a tiny model learns in seconds: sort three digits (platform.md).

Prompt ``271=``, answer ``127`` and the end. All 1,000 inputs are problems (fewer where only some digits are used); 200
of them are held out by a seed before training begins. The reward is dense: half of it for right places, half for the
exact answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from string import digits
from typing import ClassVar, Final

from rolltape.rollout import rewards
from rolltape.rollout.environment import Answer, Environment, Problem, Split
from rolltape.rollout.seeds import derived_seed, shuffled
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent

_LONGEST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SortDigitsConfig:
    """Options of :class:`SortDigits`."""

    num_digits: int = 3
    num_symbols: int = 10  # digits are 0 to num_symbols - 1
    num_heldout: int = 200
    exact_weight: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.num_digits <= _LONGEST:
            raise ConfigError(f"environment.options.num_digits: expected 1 to {_LONGEST}, got {self.num_digits}")
        if not 2 <= self.num_symbols <= len(digits):
            raise ConfigError(f"environment.options.num_symbols: expected 2 to {len(digits)}, got {self.num_symbols}")
        size = self.num_symbols**self.num_digits
        if not 0 <= self.num_heldout < size:
            raise ConfigError(f"environment.options.num_heldout: expected 0 to {size - 1}, got {self.num_heldout}")
        if not 0 <= self.exact_weight <= 1:
            raise ConfigError(f"environment.options.exact_weight: expected 0 to 1, got {self.exact_weight}")


class SortDigits(Environment):
    """Sort the digits of a number."""

    name: ClassVar[str] = "sort_digits"
    version: ClassVar[str] = "1"
    domain: ClassVar[str] = "sorting"
    source: ClassVar[str] = "all digit strings, made by rolltape"
    verifier: ClassVar[str] = "sorted_text"
    mark: ClassVar[str] = "="
    """Ends a prompt; says which order is asked for."""
    descending: ClassVar[bool] = False

    def __init__(self, config: SortDigitsConfig | None = None, seed: int = 0) -> None:
        self.config = config if config is not None else SortDigitsConfig()
        self._problems = self._split_problems(seed)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Problems of one split, in the order of their digits."""
        return self._problems[split]

    def judge(self, problem: Problem, answer: Answer) -> tuple[RewardComponent, ...]:
        """Components ``positions`` and ``exact``."""
        places = rewards.position_share(answer.text, problem.answer, ended=answer.ended)
        exact = rewards.exact_text(answer.text, problem.answer, ended=answer.ended)
        weight = self.config.exact_weight
        return (
            rewards.rule_component("positions", places, 1.0 - weight, scorer=self.name, version=self.version),
            rewards.rule_component("exact", exact, weight, scorer=self.name, version=self.version),
        )

    def is_correct(self, problem: Problem, answer: Answer) -> bool:
        """Whether the digits are sorted and the policy stopped."""
        return rewards.exact_text(answer.text, problem.answer, ended=answer.ended) == 1.0

    def _split_problems(self, seed: int) -> dict[Split, tuple[Problem, ...]]:
        """The same numbers are held out whatever the order asked for."""
        config = self.config
        numbers = ["".join(chosen) for chosen in product(digits[: config.num_symbols], repeat=config.num_digits)]
        order = shuffled(derived_seed("sort_digits", config.num_digits, seed), len(numbers))
        held_out = set(order[: config.num_heldout].tolist())
        problems: dict[Split, list[Problem]] = {"train": [], "heldout": []}
        for place, number in enumerate(numbers):
            split: Split = "heldout" if place in held_out else "train"
            problems[split].append(
                Problem(
                    problem_id=f"{self.name}/{number}",
                    split=split,
                    prompt=f"{number}{self.mark}",
                    answer="".join(sorted(number, reverse=self.descending)),
                )
            )
        return {split: tuple(of_split) for split, of_split in problems.items()}


class SortDigitsDescending(SortDigits):
    """The other order, asked for by another sign: a second domain for those who learn two."""

    name: ClassVar[str] = "sort_digits_descending"
    domain: ClassVar[str] = "sorting_descending"
    mark: ClassVar[str] = ">"
    descending: ClassVar[bool] = True
