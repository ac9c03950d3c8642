"""Grade-school mathematics with a chat model: GSM8K (Cobbe et al. 2021, arXiv:2110.14168).

The package carries the first 64 problems of the test split (MIT licence, ``data/README.md``); a longer file of the same
form can be named in the options. The verifier compares exact numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar, Final

from rolltape.rollout import rewards
from rolltape.rollout.environment import Answer, Environment, Message, Problem, Split
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent

_PACKAGED: Final = "gsm8k_test_64.jsonl"
_INSTRUCTION: Final = (
    "Solve the problem step by step, briefly. End with the final answer on a line of its own, as #### and the number."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kConfig:
    """Options of :class:`Gsm8k`. Weights and bounds of the reward are part of its configuration, hence of the tape."""

    problems_file: str = ""  # JSON lines with question and answer; empty: the packaged problems
    num_train: int = 48  # the first problems of the file
    num_heldout: int = 16  # the next ones
    exact_weight: float = 0.6
    number_weight: float = 0.1
    marked_weight: float = 0.1
    brevity_weight: float = 0.2
    comfortable_characters: int = 200
    longest_characters: int = 1200

    def __post_init__(self) -> None:
        for name in ("exact_weight", "number_weight", "marked_weight", "brevity_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"environment.options.{name}: expected 0 or more, got {getattr(self, name)}")
        if self.num_train < 1 or self.num_heldout < 0:
            raise ConfigError(
                "environment.options: expected num_train of 1 or more and num_heldout of 0 or more, got "
                f"{self.num_train} and {self.num_heldout}"
            )
        if not 0 <= self.comfortable_characters < self.longest_characters:
            raise ConfigError(
                "environment.options: expected 0 <= comfortable_characters < longest_characters, got "
                f"{self.comfortable_characters} and {self.longest_characters}"
            )


class Gsm8k(Environment):
    """Word problems whose answer is one number."""

    name: ClassVar[str] = "gsm8k"
    version: ClassVar[str] = "1"
    domain: ClassVar[str] = "math"
    source: ClassVar[str] = "GSM8K test split, openai/grade-school-math, MIT"
    verifier: ClassVar[str] = "exact_number"

    def __init__(self, config: Gsm8kConfig | None = None, seed: int = 0) -> None:
        del seed  # the split is fixed by the order of the file
        self.config = config if config is not None else Gsm8kConfig()
        self._problems = _read_problems(self.config)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Problems of one split, in the order of the file."""
        return self._problems[split]

    def judge(self, problem: Problem, answer: Answer) -> tuple[RewardComponent, ...]:
        """Components ``exact``, ``number`` (there is a final number), ``marked`` (as asked for) and ``brevity``."""
        config = self.config
        number, marked = rewards.final_number(answer.text)
        short = rewards.brevity(
            answer.text, comfortable=config.comfortable_characters, longest=config.longest_characters
        )
        values = (
            ("exact", float(self.is_correct(problem, answer)), config.exact_weight),
            ("number", float(number is not None), config.number_weight),
            ("marked", float(marked), config.marked_weight),
            ("brevity", short if answer.text else 0.0, config.brevity_weight),
        )
        return tuple(
            rewards.rule_component(name, value, weight, scorer=self.name, version=self.version)
            for name, value, weight in values
        )

    def is_correct(self, problem: Problem, answer: Answer) -> bool:
        """Whether the final number equals the reference exactly."""
        number, _ = rewards.final_number(answer.text)
        return number is not None and number == rewards.as_number(problem.answer)


def reference_answer(solution: str) -> str:
    """The number behind ``####`` of a GSM8K solution.

    Raises:
        ConfigError: the solution has none.
    """
    _, mark, number = solution.rpartition("####")
    if not mark or rewards.as_number(number) is None:
        raise ConfigError(f"expected a GSM8K solution that ends with '#### <number>', got {solution[-80:]!r}")
    return number.strip().replace(",", "")


def _read_problems(config: Gsm8kConfig) -> dict[Split, tuple[Problem, ...]]:
    lines = _lines(config.problems_file)
    wanted = config.num_train + config.num_heldout
    if len(lines) < wanted:
        raise ConfigError(
            f"environment.options: expected {wanted} problems, got a file of {len(lines)}; "
            "lower num_train or num_heldout"
        )
    problems = tuple(
        _problem(index, line, "train" if index < config.num_train else "heldout")
        for index, line in enumerate(lines[:wanted])
    )
    return {"train": problems[: config.num_train], "heldout": problems[config.num_train :]}


def _lines(path: str) -> list[str]:
    if path:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"environment.options.problems_file: cannot read {path}: {error}") from error
    else:
        text = (resources.files("rolltape.rollout") / "data" / _PACKAGED).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def _problem(index: int, line: str, split: Split) -> Problem:
    try:
        row = json.loads(line)
        question, solution = row["question"], row["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "environment.options.problems_file: expected a JSON line with question and answer at line "
            f"{index + 1}: {error}"
        ) from error
    return Problem(
        problem_id=f"{Gsm8k.name}/test/{index}",
        split=split,
        messages=(Message(role="system", content=_INSTRUCTION), Message(role="user", content=question)),
        answer=reference_answer(solution),
        human_reference=solution,
    )
