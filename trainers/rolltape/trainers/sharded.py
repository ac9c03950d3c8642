"""One training step over several ranks: parameters sharded (FSDP2), rows of the batch dealt out by micro-batch.

Every rank holds the whole packed batch, which is small, and computes advantages and aggregation weights over all of it;
so denominators are the batch's on every rank. The plan of micro-batches is a function of the batch alone, and rank r of
R computes the parts r, r + R, r + 2R … A loss is a sum of weight times token loss, so the ranks' losses and gradients
are added, never averaged: the result does not depend on the number of ranks, beyond the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rolltape.numerics.models import model_parts
from rolltape.numerics.packed import MicroBatch
from rolltape.schema.errors import ConfigError
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.compute import decoder_blocks, recompute_backbone
from rolltape.trainers.critic_model import CriticModel
from rolltape.trainers.ranks import Ranks, Result


class ShardedRanks(Ranks):
    """The ranks of a process group, each with a shard of every parameter of one model, and of its critic.

    Making one shards them in place: parameters become distributed tensors, so make the optimizers afterwards. Models
    are computed with in :meth:`forward` only; outside of it the parameters are not there. Every rank must begin
    with the same weights, and make the same calls in the same order.

    Args:
        model: a causal model on the device that the group works on, the same on every rank.
        critic: the critic's model, if there is one, sharded likewise.
        group: default all ranks.
        compute_dtype: parameters are cast to it for forward and backward passes, and stay as they are for the
            optimizer. Gradients are added up in float32, and log-probs are float32 in any case.

    Raises:
        ConfigError: there is no process group.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        critic: CriticModel | None = None,
        group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "ranks: expected an initialised process group, got none; "
                "start the trainer with torchrun, or train in one process"
            )
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.num_ranks = dist.get_world_size(self._group)
        self._compute_dtype = compute_dtype
        parts = model_parts(model)
        self._device = parts.output_weight.device
        self._roots = {id(model): self._sharded(model, parts.backbone)}
        if critic is not None:
            self._roots[id(critic)] = self._sharded(critic, critic.backbone)

    def _sharded(self, model: nn.Module, backbone: nn.Module) -> _Root:
        """Shard a model in place, block by block, and the rest of it in a root."""
        assert self._group is not None
        root = _Root(model)
        options: dict[str, Any] = {"mesh": DeviceMesh.from_group(self._group, self._device.type)}
        if self._compute_dtype is not None:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)
        for module in [*decoder_blocks(backbone), root]:
            sharded = fully_shard(module, **options)
            assert isinstance(sharded, FSDPModule)
            # Sums, not means: the token weights have the whole batch's denominators.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(enable=True)
        return root

    def own_parts(self, parts: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Every ``num_ranks``-th, and an empty one where this rank lacks one: each forward pass is a common act."""
        number = 0
        for number, part in enumerate(parts, 1):
            if (number - 1) % self.num_ranks == self.rank:
                yield part
        if 0 < number % self.num_ranks <= self.rank:
            yield _empty_part(self._device)

    def forward(
        self, model: nn.Module, function: Callable[[nn.Module], Result], *, dtype: torch.dtype | None = None
    ) -> Result:
        """As in one process; parameters are gathered block by block.

        Raises:
            ConfigError: the model is not one that was sharded, or for another type than that of the shards.
        """
        if id(model) not in self._roots:
            raise ConfigError(f"expected the {type(model).__name__} that was sharded, got another model")
        if dtype not in {None, self._compute_dtype}:
            raise ConfigError(
                f"compute_dtype: expected {self._compute_dtype}, for which the model was sharded, got {dtype}; "
                "make the ranks with the trainer's compute_dtype"
            )
        root = self._roots[id(model)]
        found: Result = root(function)
        if not torch.is_grad_enabled():
            # What no backward pass gives back would stay gathered, and changes of it would not reach the shards.
            assert isinstance(root, FSDPModule)
            root.reshard()
        return found

    def add_up(self, *tensors: Tensor) -> None:
        """See :meth:`rolltape.trainers.ranks.Ranks.add_up`; on every rank afterwards."""
        for tensor in tensors:
            counted = tensor.to(self._device, torch.uint8 if tensor.dtype == torch.bool else tensor.dtype)
            shared = counted.clone() if counted is tensor else counted
            dist.all_reduce(shared, dist.ReduceOp.SUM, self._group)
            tensor.copy_(shared)

    def local(self, tensor: Tensor) -> Tensor:
        """See :meth:`rolltape.trainers.ranks.Ranks.local`."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See :meth:`rolltape.trainers.ranks.Ranks.whole`."""
        return _Gathered(named)


class _Root(nn.Module):
    """The root that FSDP2 gathers embedding, last norm and output layer for: whatever is computed is its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model)


@dataclass(frozen=True, slots=True)
class _Gathered(Mapping[str, Tensor]):
    """Tensors that are gathered one by one, so that only one is whole at a time."""

    shards: Mapping[str, Tensor] = field(repr=False)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.shards[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def recompute_blocks(model: nn.Module) -> None:
    """:func:`rolltape.trainers.compute.recompute_backbone` of a causal model."""
    recompute_backbone(model_parts(model).backbone)


def broadcast_batch(batch: PackedBatch | None, *, group: dist.ProcessGroup | None = None) -> PackedBatch:
    """The batch of the group's first rank, on every rank; the others give ``None``."""
    parcel: list[Any] = [None if batch is None else {f.name: getattr(batch, f.name) for f in fields(batch)}]
    dist.broadcast_object_list(parcel, group_src=0, group=group)
    return PackedBatch(**parcel[0])


def _empty_part(device: torch.device) -> MicroBatch:
    """A micro-batch of one padding token of which nothing is scored: its loss and its gradients are 0."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        rows=nothing,
        input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device),
        source=nothing,
        targets=nothing,
        flat_index=nothing,
    )
