"""A task whose history outgrows its context: say after each digit which was the largest so far.

The prompt shows the first digit, ``1=``; each reply is followed by the next one, ``3=``. All digits of an episode
together do not fit into a small context, so the policy has to carry the largest through its own summaries. The request
for one is a second ``=``, and its frame makes the rewritten context look like the beginning of an episode: ``3=`` where
3 was the largest so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import ClassVar, Final

from rolltape.rollout import rewards
from rolltape.rollout.agent_environment import AgentEnvironment, Episode, Observation, Reply
from rolltape.rollout.environment import Problem, Split
from rolltape.rollout.seeds import derived_seed, shuffled
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent

_MOST_SEQUENCES: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMaxConfig:
    """Options of :class:`RunningMax`; the weights are those of the reward's three components and add up to 1."""

    num_rounds: int = 6
    num_digits: int = 4  # digits are 0 to num_digits - 1
    num_problems: int = 240  # as many of each largest digit as there are, at most their share
    num_heldout: int = 32
    rounds_weight: float = 0.3
    exact_weight: float = 0.3

    def __post_init__(self) -> None:
        if not 2 <= self.num_digits <= len("0123456789"):
            raise ConfigError(f"environment.options.num_digits: expected 2 to 10, got {self.num_digits}")
        if not (self.num_rounds >= 2 and self.num_digits**self.num_rounds <= _MOST_SEQUENCES):
            raise ConfigError(
                f"environment.options.num_rounds: expected 2 or more, with at most {_MOST_SEQUENCES} sequences of "
                f"{self.num_digits} digits, got {self.num_rounds}"
            )
        if not self.num_problems >= self.num_digits:
            raise ConfigError(
                f"environment.options.num_problems: expected {self.num_digits} or more, got {self.num_problems}"
            )
        if not self.num_heldout >= 0:
            raise ConfigError(f"environment.options.num_heldout: expected 0 or more, got {self.num_heldout}")
        if not (self.rounds_weight >= 0 and self.exact_weight >= 0 and self.rounds_weight + self.exact_weight <= 1):
            raise ConfigError(
                "environment.options.rounds_weight, environment.options.exact_weight: expected both 0 or more and "
                f"together at most 1, got {self.rounds_weight} and {self.exact_weight}"
            )


class RunningMax(AgentEnvironment):
    """Keep track of the largest digit."""

    name: ClassVar[str] = "running_max"
    version: ClassVar[str] = "1"
    domain: ClassVar[str] = "memory"
    source: ClassVar[str] = "digit sequences drawn by rolltape, their largest digits balanced"
    verifier: ClassVar[str] = "largest_digit"
    summary_instruction: ClassVar[str] = "="
    resume_before: ClassVar[str] = ""
    resume_after: ClassVar[str] = "="

    def __init__(self, config: RunningMaxConfig | None = None, seed: int = 0) -> None:
        self.config = config if config is not None else RunningMaxConfig()
        self._problems = _split_problems(self.config, seed)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Problems of one split, in the order of their digits."""
        return self._problems[split]

    def open(self, problem: Problem, seed: int) -> Episode:
        """An episode; there is no chance in it."""
        del seed
        return _Rounds(problem.problem_id.rpartition("/")[2], self.config)

    def is_correct(self, problem: Problem, components: Sequence[RewardComponent]) -> bool:
        """Whether the last reply, about all digits, was right."""
        del problem
        return any(component.name == "exact" and component.value == 1.0 for component in components)


class _Rounds(Episode):
    """One digit a round."""

    def __init__(self, digits: str, config: RunningMaxConfig) -> None:
        self._digits = digits
        self._expected = list(accumulate(digits, max))
        self._config = config
        self._right: list[float] = []
        self._positions: list[float] = []

    def reply(self, text: str, *, ended: bool) -> Reply:
        """The next digit, whatever the reply was; the end after the last."""
        expected = self._expected[len(self._right)]
        self._right.append(rewards.exact_text(text, expected, ended=ended))
        self._positions.append(rewards.position_share(text, expected, ended=ended))
        if len(self._right) == len(self._digits):
            return Reply(done=True)
        return Reply(observation=Observation(text=f"{self._digits[len(self._right)]}="))

    def judge(self) -> tuple[RewardComponent, ...]:
        """Components ``positions`` and ``rounds``, shares of all rounds, and ``exact``; rounds not reached count 0."""
        total, config = len(self._digits), self._config
        reached_the_end = len(self._right) == total
        values = (
            ("positions", sum(self._positions) / total, 1.0 - config.rounds_weight - config.exact_weight),
            ("rounds", sum(self._right) / total, config.rounds_weight),
            ("exact", self._right[-1] if reached_the_end else 0.0, config.exact_weight),
        )
        return rewards.rule_components(values, scorer=RunningMax.name, version=RunningMax.version)


def _split_problems(config: RunningMaxConfig, seed: int) -> dict[Split, tuple[Problem, ...]]:
    """Sequences with balanced largest digits: of all sequences most would have the largest that there is."""
    digits = "0123456789"[: config.num_digits]
    by_largest: dict[str, list[str]] = {digit: [] for digit in digits}
    for drawn in product(digits, repeat=config.num_rounds):
        by_largest[max(drawn)].append("".join(drawn))
    share = config.num_problems // config.num_digits
    chosen: list[str] = []
    for digit, sequences in by_largest.items():
        order = shuffled(derived_seed("running_max", digit, config.num_rounds, seed), len(sequences))
        chosen += [sequences[place] for place in order[:share].tolist()]
    if config.num_heldout >= len(chosen):
        raise ConfigError(
            f"environment.options.num_heldout: expected less than the {len(chosen)} problems, got {config.num_heldout}"
        )
    order = shuffled(derived_seed("running_max", "heldout", config.num_rounds, seed), len(chosen))
    held_out = {chosen[place] for place in order[: config.num_heldout].tolist()}
    problems: dict[Split, list[Problem]] = {"train": [], "heldout": []}
    for sequence in sorted(chosen):
        split: Split = "heldout" if sequence in held_out else "train"
        problems[split].append(
            Problem(
                problem_id=f"{RunningMax.name}/{sequence}",
                split=split,
                prompt=f"{sequence[0]}=",
                answer=max(sequence),
            )
        )
    return {split: tuple(of_split) for split, of_split in problems.items()}
