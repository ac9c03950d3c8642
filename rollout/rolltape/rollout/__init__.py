"""Rollouts: engines, environments, rewards, weight loading, and the worker process.

The names below are imported when they are first asked for, so that importing the package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rolltape.rollout.engine import Engine, Generation, GenerationBatch, GenerationRequest, SamplingConfig
    from rolltape.rollout.environment import Answer, Environment, Problem
    from rolltape.rollout.environments import make_environment
    from rolltape.rollout.scripted import ScriptedEngine
    from rolltape.rollout.transformers_engine import TransformersEngine
    from rolltape.rollout.worker import WorkerConfig, run_worker

__all__ = [
    "Answer",
    "Engine",
    "Environment",
    "Generation",
    "GenerationBatch",
    "GenerationRequest",
    "Problem",
    "SamplingConfig",
    "ScriptedEngine",
    "TransformersEngine",
    "WorkerConfig",
    "make_environment",
    "run_worker",
]

_MODULES: Final = {
    "engine": ("Engine", "Generation", "GenerationBatch", "GenerationRequest", "SamplingConfig"),
    "environment": ("Answer", "Environment", "Problem"),
    "environments": ("make_environment",),
    "scripted": ("ScriptedEngine",),
    "transformers_engine": ("TransformersEngine",),
    "worker": ("WorkerConfig", "run_worker"),
}
_HOME: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
