"""Digests of tensors, and weights as safetensors shards with a manifest.

A digest covers dtype, shape and bytes; the digest over all weights covers the names too, in name order, so it does not
depend on how a model was sharded or walked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from rolltape.schema.errors import ConfigError, DigestMismatchError

if TYPE_CHECKING:
    from rolltape.store.location import Location

DEFAULT_SHARD_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, as ``float32``."""
    sha256: str
    """:func:`tensor_digest` of it."""
    file: str
    """Shard that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One file of a manifest."""

    file: str
    num_bytes: int
    sha256: str
    """``sha256:<hex>`` over the file's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Where the weights lie and what they must be. Its fields are those of the event ``weights_published``."""

    weights_digest: str
    tensors: tuple[TensorEntry, ...]
    shards: tuple[ShardEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    def to_fields(self) -> dict[str, Any]:
        """The columns ``weights_digest``, ``shards`` and ``manifest`` of ``weights_published``."""
        return {
            "weights_digest": self.weights_digest,
            "shards": [{"file": s.file, "num_bytes": s.num_bytes, "sha256": s.sha256} for s in self.shards],
            "manifest": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "sha256": t.sha256, "file": t.file}
                for t in self.tensors
            ],
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Manifest:
        """From the struct of a ``weights_published`` event."""
        return cls(
            weights_digest=fields["weights_digest"],
            tensors=tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields["manifest"]),
            shards=tuple(ShardEntry(**entry) for entry in fields["shards"]),
        )


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters (tied ones once) and persistent buffers, detached, not copied."""
    persistent = set(model.state_dict(keep_vars=True))
    named: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named.update((name, buffer.detach()) for name, buffer in model.named_buffers() if name in persistent)
    return named


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of all parameters that have one, not copied."""
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def load_weights(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Copy weights into the model in place (its optimizer keeps its parameters).

    Raises:
        ConfigError: names, shapes or dtypes differ from the model's; nothing was copied.
    """
    own = named_weights(model)
    if own.keys() != named.keys():
        missing, unknown = sorted(own.keys() - named.keys()), sorted(named.keys() - own.keys())
        raise ConfigError(f"weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in named.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ConfigError(
                f"weights do not fit the model: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {own[name].dtype} {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in named.items():
            own[name].copy_(tensor)


def tensor_digest(tensor: Tensor) -> str:
    """``sha256:<hex>`` over dtype, shape and the bytes in row-major order: equal digests are equal bits."""
    header = f"{_dtype_name(tensor)} {list(tensor.shape)}\n".encode()
    digest = hashlib.sha256(header)
    digest.update(_bytes_of(tensor))
    return "sha256:" + digest.hexdigest()


def tensor_digests(named: Mapping[str, Tensor]) -> dict[str, str]:
    """:func:`tensor_digest` of each tensor, in name order."""
    return {name: tensor_digest(named[name]) for name in sorted(named)}


def combine_digests(digests: Mapping[str, str]) -> str:
    """``sha256:<hex>`` over names and digests, in name order."""
    lines = "".join(f"{name}\n{digests[name]}\n" for name in sorted(digests))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def weights_digest(named: Mapping[str, Tensor]) -> str:
    """One digest over names, dtypes, shapes and bytes of all tensors."""
    return combine_digests(tensor_digests(named))


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Name of the first tensor (in name order) whose digest differs or that only one side has."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return name
    return None


def save_shards(location: Location, named: Mapping[str, Tensor], *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Manifest:
    """Write weights as safetensors files under ``location``, each durable before the next, and describe them.

    The same weights give the same bytes, so a publication that is made again after a crash changes nothing.

    Raises:
        ConfigError: there is nothing to write, or ``shard_bytes`` is below 1.
    """
    if not named or shard_bytes < 1:
        raise ConfigError(f"expected at least one tensor and shard_bytes >= 1, got {len(named)} and {shard_bytes}")
    digests = tensor_digests(named)
    groups = _split_into_shards(named, shard_bytes)
    tensors: list[TensorEntry] = []
    shards: list[ShardEntry] = []
    for number, names in enumerate(groups, 1):
        file = f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
        data = save_safetensors({name: _plain(named[name]) for name in names})
        location.child(file).write_bytes(data, durable=True)
        shards.append(ShardEntry(file=file, num_bytes=len(data), sha256="sha256:" + hashlib.sha256(data).hexdigest()))
        tensors.extend(
            TensorEntry(
                name=name,
                shape=tuple(named[name].shape),
                dtype=_dtype_name(named[name]),
                sha256=digests[name],
                file=file,
            )
            for name in names
        )
    return Manifest(weights_digest=combine_digests(digests), tensors=tuple(tensors), shards=tuple(shards))


def load_shards(location: Location, manifest: Manifest, *, verify: bool = True) -> dict[str, Tensor]:
    """Read the weights that a manifest describes.

    Raises:
        DigestMismatchError: a file, a tensor, or the whole is not what the manifest says; names it.
    """
    loaded: dict[str, Tensor] = {}
    for shard in manifest.shards:
        data = bytes(location.child(shard.file).read_bytes())
        entries = [entry for entry in manifest.tensors if entry.file == shard.file]
        loaded.update(_read_shard(location, shard, data, entries, verify=verify))
    if verify and combine_digests({t.name: t.sha256 for t in manifest.tensors}) != manifest.weights_digest:
        raise DigestMismatchError(
            f"manifest of {location.url}: its tensors do not add up to weights digest {manifest.weights_digest}"
        )
    return loaded


def _read_shard(
    location: Location, shard: ShardEntry, data: bytes, entries: Sequence[TensorEntry], *, verify: bool
) -> dict[str, Tensor]:
    """One shard's tensors, each compared with its entry, so that damage is named by tensor and not only by file."""
    try:
        found = load_safetensors(data)
    except Exception as error:
        raise DigestMismatchError(
            f"{location.child(shard.file).url}: expected {shard.num_bytes} bytes of safetensors, "
            f"got {len(data)} bytes that cannot be read ({error}); publish the version again"
        ) from error
    for entry in entries:
        if entry.name not in found:
            raise DigestMismatchError(f"{location.child(shard.file).url}: tensor {entry.name} is missing")
        if verify and (came := tensor_digest(found[entry.name])) != entry.sha256:
            raise DigestMismatchError(
                f"{location.child(shard.file).url}: tensor {entry.name} has digest {came}, expected {entry.sha256}"
            )
    if verify and (came := "sha256:" + hashlib.sha256(data).hexdigest()) != shard.sha256:
        raise DigestMismatchError(
            f"{location.child(shard.file).url}: the file has digest {came}, expected {shard.sha256}"
        )
    return {entry.name: found[entry.name] for entry in entries}


def _split_into_shards(named: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut where a shard would exceed its size; a larger tensor has a shard of its own."""
    groups: list[list[str]] = []
    room = 0
    for name in sorted(named):
        size = named[name].numel() * named[name].element_size()
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    return groups


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    return _plain(tensor).reshape(-1).view(torch.uint8).numpy().data
