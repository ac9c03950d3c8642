"""Environments by name, as a configuration names them; each is imported only when it is asked for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Final

from rolltape.rollout.agent_environment import AgentEnvironment
from rolltape.rollout.environment import Environment
from rolltape.schema.errors import ConfigError

# name -> (module, environment class, class of its options)
ENVIRONMENTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "sort_digits": ("rolltape.rollout.sort_digits", "SortDigits", "SortDigitsConfig"),
    "sort_digits_descending": ("rolltape.rollout.sort_digits", "SortDigitsDescending", "SortDigitsConfig"),
    "tool_digits": ("rolltape.rollout.tool_digits", "ToolDigits", "ToolDigitsConfig"),
    "running_max": ("rolltape.rollout.running_max", "RunningMax", "RunningMaxConfig"),
    "mixture": ("rolltape.rollout.mixture", "Mixture", "MixtureConfig"),
    "gsm8k": ("rolltape.rollout.gsm8k", "Gsm8k", "Gsm8kConfig"),
}


def make_environment(name: str, options: Mapping[str, Any], seed: int) -> Environment | AgentEnvironment:
    """Make the environment that a configuration names.

    Args:
        name: one of :data:`ENVIRONMENTS`.
        options: fields of its configuration class.
        seed: the run's seed; it decides which problems are held out, where the environment draws them.

    Raises:
        ConfigError: no such environment, or an option that it does not have or that is out of range.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError(f"environment.name: expected one of {', '.join(ENVIRONMENTS)}, got {name!r}")
    module_name, class_name, config_name = ENVIRONMENTS[name]
    module = importlib.import_module(module_name)
    config_class = getattr(module, config_name)
    known = [field.name for field in dataclasses.fields(config_class)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"environment.options.{unknown[0]}: unknown; {name} has {', '.join(known)}")
    environment: Environment | AgentEnvironment = getattr(module, class_name)(config_class(**options), seed)
    return environment
