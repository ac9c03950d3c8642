"""How forward passes are computed: blocks that are computed again, and parameters in another type for the while.

Neither is part of the mathematics. Recomputing changes no bit; a lower precision is for computing alone: parameters,
gradients, moments and log-probs stay float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rolltape.schema.errors import ConfigError


def decoder_blocks(backbone: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: the members of its module lists, in order."""
    return [block for child in backbone.children() if isinstance(child, nn.ModuleList) for block in child]


def recompute_backbone(backbone: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Keep only the inputs of each decoder block for the backward pass, and compute the block again there.

    Changes no number; costs one more forward pass. To be done before the model is sharded.

    Args:
        backbone: its blocks are changed in place.
        dtype: what :func:`parameters_as` casts to around the forward pass, which is over when a block is computed
            again; None for a model that is sharded, or not cast.

    Raises:
        ConfigError: the model has no list of blocks.
    """
    blocks = decoder_blocks(backbone)
    if not blocks:
        raise ConfigError(f"{type(backbone).__name__}: expected a list of decoder blocks to recompute, found none")
    for block in blocks:
        options: dict[str, Any] = {"use_reentrant": False}
        if dtype is not None:
            options["context_fn"] = functools.partial(_first_and_second, block, dtype)
        block.forward = functools.partial(checkpoint, block.forward, **options)


def _first_and_second(
    block: nn.Module, dtype: torch.dtype
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), parameters_as(block, dtype)


@contextlib.contextmanager
def parameters_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, the module computes with its parameters cast to ``dtype``; gradients reach the parameters themselves.

    A tensor that is tied stays tied.
    """
    cast: dict[int, torch.Tensor] = {}
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]
    try:
        for owner, name, parameter in places:
            if id(parameter) not in cast:
                cast[id(parameter)] = parameter.to(dtype)
            # A plain tensor in a parameter's place: the only way in which a module lets itself be lent one.
            owner._parameters[name] = cast[id(parameter)]  # type: ignore[assignment]  # noqa: SLF001
        yield
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter  # noqa: SLF001
