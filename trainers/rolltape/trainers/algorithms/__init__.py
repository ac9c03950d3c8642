"""The methods by name. Each decides token weights, advantages and the loss; a step does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rolltape.schema.errors import ConfigError
from rolltape.trainers.algorithms.base import Algorithm, Method
from rolltape.trainers.algorithms.distillation import distillation
from rolltape.trainers.algorithms.groups import Dis, Grpo
from rolltape.trainers.algorithms.segments import Compaction
from rolltape.trainers.algorithms.single import Sao

ALGORITHMS: Final[Mapping[str, Callable[[Method], Algorithm]]] = {
    "grpo": Grpo,
    "dis": Dis,
    "opd": distillation,
    "mopd": distillation,
    "sao": Sao,
    "compaction": Compaction,
}


def make_algorithm(method: Method) -> Algorithm:
    """The configured method on a batch.

    Raises:
        ConfigError: no method has this name.
        UntrainableError: the batch lacks what the method learns from.
    """
    name = method.config.algorithm
    if name not in ALGORITHMS:
        raise ConfigError(f"trainer.algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name](method)
