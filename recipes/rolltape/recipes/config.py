"""A run's configuration: one frozen dataclass for each component, and the TOML file that maps onto it one to one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from rolltape.recipes.teachers import TeachersSection, check_teachers
from rolltape.rollout.agent_config import AgentConfig
from rolltape.schema.errors import ConfigError
from rolltape.trainers.config import TrainerConfig, of_older_release

T = TypeVar("T")

_SMALLEST_GROUP = 2
_SECRET_WORDS = ("secret", "password", "passwd", "api_key", "apikey", "access_key", "credential", "auth_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialSection:
    """Weights to begin with: ``version`` (a number, or ``final``) of the policy that ``run`` published in ``lake``."""

    lake: str
    run: str
    version: str = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """Which model is trained, and from where it begins: its own initial weights, which the seed makes, or a run's."""

    name: str = "char-64x2"
    initial: InitialSection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection:
    """What it is asked. A secret among the options is written as ``{ from_env = "NAME" }``, never as itself."""

    name: str = "sort_digits"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_plain_secrets(self.options, "environment.options")

    def resolved_options(self) -> dict[str, Any]:
        """The options with the values of the environment variables that they name; for this process only.

        Raises:
            ConfigError: a variable is not set.
        """
        return {key: _resolved(value, f"environment.options.{key}") for key, value in self.options.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """How rollouts are sampled.

    ``max_lead_steps`` 0 is lock step: the rollouts of a step are sampled by the version that the one before made. Above
    0 workers run ahead, by so many steps' worth of groups at most, and the trainer takes groups as they complete.
    """

    num_workers: int = 1
    max_lead_steps: int = 0
    groups_per_step: int = 16
    group_size: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 4
    num_threads: int = 1
    evaluate_heldout: bool = True
    evaluate_initial: bool = False  # version 0 too, so that a report has a before and an after
    shuffle_rewards: bool = False  # a control: rewards of a batch in another order, marked so on the tape

    def __post_init__(self) -> None:
        for name in ("num_workers", "groups_per_step", "group_size", "max_tokens", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}: expected 1 or more, got {getattr(self, name)}")
        if self.max_lead_steps < 0:
            raise ConfigError(f"rollout.max_lead_steps: expected 0 or more, got {self.max_lead_steps}")
        if self.top_k < 0:
            raise ConfigError(f"rollout.top_k: expected 0 (no limit) or more, got {self.top_k}")
        if not self.temperature > 0:
            raise ConfigError(f"rollout.temperature: expected more than 0 for training, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p: expected 0 < top_p <= 1, got {self.top_p}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does. Two runs with equal configurations make equal batches."""

    run_id: str = "run"
    seed: int = 0
    model: ModelSection = field(default_factory=ModelSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    agent: AgentConfig = field(default_factory=AgentConfig)  # budgets of environments of several turns
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    teachers: TeachersSection = field(default_factory=TeachersSection)

    def __post_init__(self) -> None:
        check_teachers(self)
        rollout, trainer = self.rollout, self.trainer
        if trainer.uses_groups and rollout.group_size < _SMALLEST_GROUP:
            raise ConfigError(
                f"rollout.group_size: expected 2 or more with algorithm {trainer.algorithm}, which compares members of "
                f"a group, got {rollout.group_size}"
            )
        limits_support = rollout.top_p < 1 or rollout.top_k > 0
        if limits_support and trainer.uses_ratio and trainer.uses_teacher_scores:
            raise ConfigError(
                f"rollout.top_p, rollout.top_k: expected 1.0 and 0 with algorithm {trainer.algorithm}, whose teachers "
                f"score over the whole vocabulary, got {rollout.top_p} and {rollout.top_k}"
            )

    def to_json(self) -> str:
        """Canonical JSON with secrets redacted, as ``run_started`` stores it."""
        return json.dumps(redacted(dataclasses.asdict(self)), sort_keys=True)

    @property
    def digest(self) -> str:
        """SHA-256 over :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunConfig:
        """Build from nested tables; unknown names and wrong types are refused by name."""
        return _build(cls, data, "")

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """The inverse of :meth:`to_json`."""
        return cls.from_dict(_of_older_release(json.loads(text)))

    @classmethod
    def from_toml(cls, path: str | Path) -> RunConfig:
        """Read a recipe file.

        Raises:
            ConfigError: the file cannot be read, or names an unknown field or a value outside its range.
        """
        try:
            with Path(path).open("rb") as file:
                data = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"expected a TOML recipe at {path}: {error}") from error
        return cls.from_dict(data)


def trainer_options(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Fields of ``[trainer]`` from ``[algorithm.]field=value`` texts, by algorithm; under "" those of all.

    Raises:
        ConfigError: a text is no setting, names no field or one twice, or has a value of another type.
    """
    hints = typing.get_type_hints(TrainerConfig)
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        algorithm, _, field_name = name.strip().rpartition(".")
        if not equals or field_name not in hints:
            near = get_close_matches(field_name, hints, n=3) or sorted(hints)
            raise ConfigError(
                f"--set {setting}: expected [algorithm.]field=value with a field of [trainer], as {', '.join(near)}"
            )
        if field_name in found.get(algorithm, {}):
            raise ConfigError(f"--set {setting}: expected one value for {name.strip()}, got a second one")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # words need no quotes
        found.setdefault(algorithm, {})[field_name] = _coerce(hints[field_name], value, f"trainer.{field_name}")
    return found


def _of_older_release(data: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration under today's names."""
    if not isinstance(data.get("trainer"), dict):
        return data
    return {**data, "trainer": of_older_release(data["trainer"])}


def redacted(value: Any, name: str = "") -> Any:
    """``value`` with everything under a telling name replaced, save a reference to an environment variable."""
    if isinstance(value, dict):
        if _is_reference(value):
            return value
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if value is not None and _is_telling(name):
        return "***"
    if isinstance(value, (list, tuple)):
        return [redacted(item, name) for item in value]
    return value


def _is_telling(name: str) -> bool:
    return any(word in name.lower() for word in _SECRET_WORDS)


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"from_env"}


def _refuse_plain_secrets(options: dict[str, Any], place: str) -> None:
    for key, value in options.items():
        if isinstance(value, dict) and not _is_reference(value):
            _refuse_plain_secrets(value, f"{place}.{key}")
        elif _is_telling(key) and value is not None and not _is_reference(value):
            raise ConfigError(f'{place}.{key}: expected {{ from_env = "NAME" }}, got a plain value (not shown)')


def _resolved(value: Any, place: str) -> Any:
    if _is_reference(value):
        name = str(value["from_env"])
        if name not in os.environ:
            raise ConfigError(f"{place}: expected the environment variable {name}, it is not set")
        return os.environ[name]
    if isinstance(value, dict):
        return {key: _resolved(item, f"{place}.{key}") for key, item in value.items()}
    return value


def _build(cls: type[T], data: dict[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]  # cls is a dataclass; T cannot say so
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(f"unknown field {prefix}{unknown[0]}; expected one of {', '.join(sorted(known))}")
    needed = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]  # type: ignore[arg-type]
    absent = [name for name in needed if name not in data]
    if absent:
        raise ConfigError(f"{prefix}{absent[0]}: expected a value, got none")
    built: dict[str, Any] = {}
    for name, value in data.items():
        built[name] = _coerce(hints[name], value, f"{prefix}{name}")
    return cls(**built)


def _coerce(hint: Any, value: Any, name: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: expected a table, got {value!r}")
        return _build(typing.cast("type[Any]", hint), value, f"{name}.")
    origin = typing.get_origin(hint) or hint
    if origin in {types.UnionType, typing.Union}:
        others = [other for other in typing.get_args(hint) if other is not types.NoneType]
        return value if value is None or len(others) > 1 else _coerce(others[0], value, name)
    if origin is tuple and isinstance(value, list):
        item = typing.get_args(hint)[0]
        return tuple(
            _coerce(item, each, f"{name}[{number}]") if is_dataclass(item) else each
            for number, each in enumerate(value)
        )
    if origin is typing.Literal:
        return value  # the dataclass itself refuses what is not among the choices, by name
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (origin is int and isinstance(value, bool)):
        expected = "a list" if origin is tuple else getattr(origin, "__name__", origin)
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")
    return value
