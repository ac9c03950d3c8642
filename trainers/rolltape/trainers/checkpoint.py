"""Full trainer state on disk: parameters, moments, counters. Written so that it exists whole or not at all.

A checkpoint is a folder ``checkpoints/<run>/<epoch>-<step>/`` of safetensors files and a ``state.json`` that is written
last, names every file with its SHA-256 and makes the checkpoint valid.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import safetensors.torch
import torch

from rolltape.schema.errors import DigestMismatchError, ReplayError
from rolltape.store.location import Location


@dataclass(slots=True, kw_only=True)
class Progress:
    """The counters of a trainer, beside its tensors."""

    step: int = 0
    version: int = 0
    version_run_epoch: int = 1
    weights_digest: str = ""
    stop_average: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """Where a checkpoint lies: path relative to the lake, bytes, digest of ``state.json``."""

    path: str
    num_bytes: int
    digest: str


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).contiguous()
    return tensors


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Named parameters that the optimizer owns, in the model's order (a tied tensor appears once)."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def save_checkpoint(
    root: Location,
    path: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> SavedCheckpoint:
    """Write the full state durably (fsync, rename) under ``root``; ``state.json`` last."""
    named = trainable(model)
    files = {
        "model.safetensors": {name: p.detach().contiguous() for name, p in named},
        "optimizer.safetensors": _optimizer_tensors(optimizer, [name for name, _ in named]),
    }
    folder = root.child(*path.split("/"))
    listed: dict[str, Any] = {}
    num_bytes = 0
    for file_name, tensors in files.items():
        data = safetensors.torch.save(tensors)
        folder.child(file_name).write_bytes(data)
        listed[file_name] = {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
        num_bytes += len(data)
    rng = torch.get_rng_state().numpy().tobytes().hex()
    state = json.dumps({"progress": asdict(progress), "rng_state": rng, "files": listed}, sort_keys=True).encode()
    folder.child("state.json").write_bytes(state)
    return SavedCheckpoint(path=path, num_bytes=num_bytes + len(state), digest=hashlib.sha256(state).hexdigest())


def load_checkpoint(
    root: Location,
    path: str,
    digest: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Load what :func:`save_checkpoint` wrote into ``model`` and ``optimizer``.

    Raises:
        ReplayError: the checkpoint is gone.
        DigestMismatchError: its bytes are not what the tape recorded.
    """
    folder = root.child(*path.split("/"))
    if not folder.child("state.json").exists():
        raise ReplayError(f"the checkpoint {path} is gone; an earlier one would be needed")
    state_bytes = folder.child("state.json").read_bytes()
    if hashlib.sha256(state_bytes).hexdigest() != digest:
        raise DigestMismatchError(f"checkpoint {path}: state.json is not what the tape recorded ({digest})")
    state = json.loads(state_bytes)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for file_name, entry in state["files"].items():
        data = folder.child(file_name).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise DigestMismatchError(f"checkpoint {path}: {file_name} is not what state.json recorded")
        tensors[file_name] = safetensors.torch.load(data)
    named = trainable(model)
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(tensors["model.safetensors"][name])
    _restore_optimizer(optimizer, tensors["optimizer.safetensors"], named)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["rng_state"]), dtype=torch.uint8))
    return Progress(**state["progress"])


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    named: list[tuple[str, torch.nn.Parameter]],
) -> None:
    optimizer.state.clear()
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        entry, name = key.split("/", 1)
        by_parameter.setdefault(name, {})[entry] = value
    for name, parameter in named:
        if name in by_parameter:
            optimizer.state[parameter] = by_parameter[name]
