"""Several domains in one run, mixed by ratio: each problem keeps its own environment's rules and domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rolltape.rollout.environment import Answer, Environment, Problem, Split
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import RewardComponent

_PART_FIELDS: Final = frozenset({"name", "options", "weight"})
_SMALLEST_SHARE: Final = 0.01  # a pass over the problems grows as its inverse
_SPLITS: Final[tuple[Split, ...]] = ("train", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Options of :class:`Mixture`.

    Each part is a table of ``name`` and ``options`` of a single-turn environment and its ``weight``: its share of the
    training problems, relative to the others'. With weight 0 a part is evaluated and never trained.
    """

    parts: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = "environment.options.parts"
        if not self.parts:
            raise ConfigError(f"{place}: expected one part or more, got none")
        for index, part in enumerate(self.parts):
            unknown = sorted(set(part) - _PART_FIELDS)
            if unknown or "name" not in part:
                raise ConfigError(
                    f"{place}[{index}]: expected name, and options and weight where wanted, got {', '.join(part)}"
                )
            if not float(part.get("weight", 1.0)) >= 0:
                raise ConfigError(f"{place}[{index}].weight: expected 0 or more, got {part['weight']}")
        weights = [float(part.get("weight", 1.0)) for part in self.parts]
        if not any(weights) or any(0 < weight < _SMALLEST_SHARE * sum(weights) for weight in weights):
            raise ConfigError(
                f"{place}: expected a weight above 0, and each such weight at least {_SMALLEST_SHARE:g} of all "
                f"together, got {', '.join(f'{weight:g}' for weight in weights)}"
            )


class Mixture(Environment):
    """Problems of several environments, each judged by its own.

    A pass over the training problems holds all of them, in the ratio of the weights: those of some parts more than
    once. So every stretch of a run has the ratio but for chance.
    """

    name: ClassVar[str] = "mixture"
    version: ClassVar[str] = "1"
    domain: ClassVar[str] = "mixture"
    source: ClassVar[str] = "the parts' own"
    verifier: ClassVar[str] = "the parts' own"

    def __init__(self, config: MixtureConfig, seed: int = 0) -> None:
        self.config = config
        self._parts = [_part(part, seed) for part in config.parts]
        names = [part.name for part in self._parts]
        if len(set(names)) < len(names):
            raise ConfigError(f"environment.options.parts: expected different environments, got {', '.join(names)}")
        self._owners = {
            problem.problem_id: part for part in self._parts for split in _SPLITS for problem in part.problems(split)
        }
        weights = [float(part.get("weight", 1.0)) for part in config.parts]
        self._train = tuple(_mixed([part.problems("train") for part in self._parts], weights))
        self._heldout = tuple(problem for part in self._parts for problem in part.problems("heldout"))

    def problems(self, split: Split) -> Sequence[Problem]:
        """Training problems by ratio, repeated where the ratio asks for it; all held-out problems of all parts."""
        return self._train if split == "train" else self._heldout

    def judge(self, problem: Problem, answer: Answer) -> tuple[RewardComponent, ...]:
        """The components of the problem's own environment."""
        return self._owners[problem.problem_id].judge(problem, answer)

    def is_correct(self, problem: Problem, answer: Answer) -> bool:
        """By the problem's own environment."""
        return self._owners[problem.problem_id].is_correct(problem, answer)

    def problem_columns(self) -> dict[str, Any]:
        """The parts' problems once each, with their own domains."""
        of_parts = [part.problem_columns() for part in self._parts]
        columns: dict[str, list[Any]] = {name: [] for name in of_parts[0]}
        for part in of_parts:
            size = len(part["problem_id"])
            for name, values in part.items():
                columns[name] += [values] * size if isinstance(values, str) else list(values)
        return dict(columns)


def _part(part: Mapping[str, Any], seed: int) -> Environment:
    from rolltape.rollout.environments import make_environment

    made = make_environment(str(part["name"]), part.get("options", {}), seed)
    if not isinstance(made, Environment):
        raise ConfigError(f"environment.options.parts: expected environments of a single turn, got {made.name}")
    return made


def _mixed(pools: Sequence[Sequence[Problem]], weights: Sequence[float]) -> list[Problem]:
    """A pass: the shortest list that has every problem of every trained pool and the pools in the weights' ratio."""
    shares = [weight / sum(weights) for weight in weights]
    length = max(len(pool) / share for pool, share in zip(pools, shares, strict=True) if share > 0)
    mixed: list[Problem] = []
    for pool, share in zip(pools, shares, strict=True):
        if share > 0 and not pool:
            raise ConfigError(
                "environment.options.parts: expected training problems in each part with a weight above 0"
            )
        mixed += [pool[place % len(pool)] for place in range(round(length * share))]
    return mixed
