"""The processes of a training step: what a step asks of them, and the case of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from rolltape.numerics.logprob import TokenLogProbs
from rolltape.numerics.packed import MicroBatch, score_micro_batch
from rolltape.trainers.compute import parameters_as

Result = TypeVar("Result")


class Ranks:
    """One process; :class:`rolltape.trainers.sharded.ShardedRanks` is several, with the models sharded over them.

    A step's loss is a sum of weight times token loss over micro-batches. Each rank computes some of them, and what they
    found is added up.
    """

    rank: int = 0
    num_ranks: int = 1

    def own_parts(self, parts: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches that this rank computes; the same number on every rank."""
        yield from parts

    def forward(
        self, model: nn.Module, function: Callable[[nn.Module], Result], *, dtype: torch.dtype | None = None
    ) -> Result:
        """``function(model)``, with the model's parameters there and, if asked for, cast to ``dtype``.

        What it returns is a tensor, or a tuple of them.
        """
        if dtype is None:
            return function(model)
        with parameters_as(model, dtype):
            return function(model)

    def score(
        self,
        model: nn.Module,
        part: MicroBatch,
        *,
        temperature: float,
        with_entropy: bool = False,
        dtype: torch.dtype | None = None,
    ) -> TokenLogProbs:
        """:func:`rolltape.numerics.packed.score_micro_batch`, in :meth:`forward`."""
        return self.forward(
            model,
            lambda inner: score_micro_batch(inner, part, temperature=temperature, with_entropy=with_entropy),
            dtype=dtype,
        )

    def add_up(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the ranks (for bool: whether any rank has it)."""

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a parameter or gradient."""
        return tensor

    def whole(self, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The same tensors unsharded. Each is gathered when it is read: all ranks must read the same, in one order."""
        return named


ONE_PROCESS: Final = Ranks()


def global_norm(gradients: Iterable[Tensor], ranks: Ranks = ONE_PROCESS) -> float:
    """Norm of all gradients together, each tensor's squares added in float64, tensors in the order given."""
    squares = [ranks.local(gradient).double().square().sum() for gradient in gradients]
    if not squares:
        return 0.0
    per_tensor = torch.stack(squares)
    ranks.add_up(per_tensor)
    return float(per_tensor.sum().sqrt())


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, ranks: Ranks = ONE_PROCESS) -> float:
    """Scale the parameters' gradients to a global norm of at most ``max_norm``; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients, ranks)
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm
