"""Full trainer state on disk: parameters, moments, counters. Written so that it exists whole or not at all.

A checkpoint is a folder ``checkpoints/<run>/<epoch>-<step>/`` of safetensors files and a ``state.json`` that is written
last, names every file with its SHA-256 and makes the checkpoint valid. A critic has files of its own.
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
from rolltape.trainers.critic import ValueNormaliser
from rolltape.trainers.critic_model import Critic, CriticCounts
from rolltape.trainers.learner import Learner, trainable


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


def save_checkpoint(root: Location, path: str, learner: Learner, progress: Progress) -> SavedCheckpoint:
    """Write the full state durably (fsync, rename) under ``root``; ``state.json`` last."""
    files = _files(learner.model, learner.optimizer)
    entries: dict[str, Any] = {"progress": asdict(progress)}
    if (critic := learner.critic) is not None:
        files |= {f"critic-{name}": tensors for name, tensors in _files(critic.model, critic.optimizer).items()}
        entries["critic"] = _critic_entry(critic)
    folder = root.child(*path.split("/"))
    listed: dict[str, Any] = {}
    num_bytes = 0
    for file_name, tensors in files.items():
        data = safetensors.torch.save(tensors)
        folder.child(file_name).write_bytes(data)
        listed[file_name] = {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
        num_bytes += len(data)
    rng = torch.get_rng_state().numpy().tobytes().hex()
    state = json.dumps({**entries, "rng_state": rng, "files": listed}, sort_keys=True).encode()
    folder.child("state.json").write_bytes(state)
    return SavedCheckpoint(path=path, num_bytes=num_bytes + len(state), digest=hashlib.sha256(state).hexdigest())


def load_checkpoint(root: Location, path: str, digest: str, learner: Learner) -> Progress:
    """Load what :func:`save_checkpoint` wrote into ``learner``.

    Raises:
        ReplayError: the checkpoint is gone, or has no critic where the learner has one.
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
    _restore(learner.model, learner.optimizer, tensors, "")
    if (critic := learner.critic) is not None:
        if "critic" not in state:
            raise ReplayError(f"checkpoint {path}: expected a critic's state, got none; another method saved it")
        _restore(critic.model, critic.optimizer, tensors, "critic-")
        _restore_critic(critic, state["critic"])
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["rng_state"]), dtype=torch.uint8))
    return Progress(**state["progress"])


def _files(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file. Frozen parameters are saved too: they are what the trained ones were trained beside."""
    names = [name for name, _ in trainable(model)]
    return {
        "model.safetensors": {name: p.detach().contiguous() for name, p in model.named_parameters()},
        "optimizer.safetensors": _optimizer_tensors(optimizer, names),
    }


def _restore(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, files: dict[str, dict[str, torch.Tensor]], prefix: str
) -> None:
    saved = files[f"{prefix}model.safetensors"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    _restore_optimizer(optimizer, files[f"{prefix}optimizer.safetensors"], trainable(model))


def _critic_entry(critic: Critic) -> dict[str, Any]:
    """What of a critic is no tensor. Floats come back to the bit from JSON."""
    return {
        "counts": asdict(critic.counts),
        "normaliser": {"mean": critic.normaliser.mean, "std": critic.normaliser.std},
        "version": critic.version,
    }


def _restore_critic(critic: Critic, entry: dict[str, Any]) -> None:
    critic.counts = CriticCounts(**entry["counts"])
    critic.normaliser = ValueNormaliser(**entry["normaliser"])
    critic.version = entry["version"]


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
