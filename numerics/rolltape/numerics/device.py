"""The device layer: the only module that knows accelerator names.

Everything else asks this module for a device, for a description of it, for determinism and for the random state.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from rolltape.schema.errors import ConfigError

DEVICE_VARIABLE: Final = "ROLLTAPE_DEVICE"
_NPU: Final = "npu"
_CUDA: Final = "cuda"
_KNOWN: Final = ("cpu", _CUDA, _NPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What must be equal for a replay to give the same bits. Goes into ``run_started``."""

    type: str
    """``cpu``, or the accelerator's type."""
    name: str
    """Model name that the accelerator reports; the machine's word for a CPU is its capability."""
    cpu_capability: str
    """Instruction set that torch selected, as ``AVX2`` or ``AVX512``: their last bits differ."""
    num_threads: int
    """Intra-op threads."""
    torch_version: str

    def differences(self, other: DeviceInfo) -> tuple[str, ...]:
        """Names of the fields that differ from ``other``, in order of declaration."""
        names = ("type", "name", "cpu_capability", "num_threads", "torch_version")
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


def select_device(name: str | None = None) -> torch.device:
    """The device to compute on.

    Args:
        name: ``cpu``, an accelerator's type (with or without an index) or ``auto``. ``None`` reads the environment
            variable ``ROLLTAPE_DEVICE`` and falls back to ``auto``: the accelerator where there is one, else the CPU.

    Raises:
        ConfigError: the name is unknown, or that device is not usable here.
    """
    wanted = name or os.environ.get(DEVICE_VARIABLE) or "auto"
    if wanted == "auto":
        found = _find_accelerator()
        return torch.device(found) if found else torch.device("cpu")
    kind = wanted.partition(":")[0]
    if kind not in _KNOWN:
        raise ConfigError(f"device: expected auto or one of {', '.join(_KNOWN)}, got {wanted!r}")
    if kind == _NPU:
        _load_npu()
    if kind != "cpu" and not _backend(kind).is_available():
        raise ConfigError(f"device: {wanted!r} is not available on this machine; use 'cpu' or 'auto'")
    return torch.device(wanted)


def _find_accelerator() -> str | None:
    if torch.cuda.is_available():
        return _CUDA
    if importlib.util.find_spec("torch_npu") is not None:
        _load_npu()
        return _NPU if _backend(_NPU).is_available() else None
    return None


def _load_npu() -> None:
    """Register the NPU backend with torch; imported here and only where someone asks for it."""
    if hasattr(torch, _NPU):
        return
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"device: {_NPU!r} needs a working torch_npu ({error}); install the extra [npu]") from error


def _backend(device_type: str) -> Any:
    """Module of torch for a device type; they share their function names."""
    return getattr(torch, device_type)


def describe_device(device: torch.device | None = None) -> DeviceInfo:
    """Describe ``device`` (default: the CPU) as far as bits depend on it."""
    device = device or torch.device("cpu")
    capability = torch.backends.cpu.get_cpu_capability()
    return DeviceInfo(
        type=device.type,
        name=capability if device.type == "cpu" else str(_backend(device.type).get_device_name(device)),
        cpu_capability=capability,
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
    )


def set_deterministic(num_threads: int, seed: int) -> None:
    """Make this process repeatable: thread count, deterministic kernels only, and all global generators seeded.

    The thread count is part of the contract: large full sums and LayerNorm's weight gradient are split by threads.

    Raises:
        ConfigError: ``num_threads`` is below 1, or ``seed`` is negative.
    """
    if num_threads < 1:
        raise ConfigError(f"num_threads: expected at least 1, got {num_threads}")
    if seed < 0:
        raise ConfigError(f"seed: expected at least 0, got {seed}")
    torch.set_num_threads(num_threads)
    # cuBLAS reads this at its first call; harmless elsewhere.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor is meant for finding bugs; it costs time at each allocation.
    switches: Any = torch.utils.deterministic
    switches.fill_uninitialized_memory = False
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries that use the global generator must repeat too
    torch.manual_seed(seed)


@contextmanager
def forked_rng(seed: int) -> Iterator[None]:
    """Run a block under its own torch CPU seed and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def rng_state(device: torch.device | None = None) -> dict[str, bytes]:
    """State of the generators that training uses: torch's CPU generator and, on an accelerator, the device's."""
    states = {"cpu": torch.get_rng_state().numpy().tobytes()}
    if device is not None and device.type != "cpu":
        states[device.type] = _backend(device.type).get_rng_state(device).cpu().numpy().tobytes()
    return states


def set_rng_state(states: dict[str, bytes], device: torch.device | None = None) -> None:
    """Restore what :func:`rng_state` returned.

    Raises:
        ConfigError: the states are of another device type.
    """
    expected = {"cpu"} if device is None or device.type == "cpu" else {"cpu", device.type}
    if set(states) != expected:
        raise ConfigError(f"rng state: expected generators {sorted(expected)}, got {sorted(states)}")
    for name, state in states.items():
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(tensor)
        else:
            _backend(name).set_rng_state(tensor, device)


def rng_state_digest(device: torch.device | None = None) -> str:
    """``sha256:<hex>`` over :func:`rng_state`, generators in name order."""
    digest = hashlib.sha256()
    for name, state in sorted(rng_state(device).items()):
        digest.update(name.encode() + b"\0" + state)
    return "sha256:" + digest.hexdigest()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Mixed precision for a block, or nothing when ``dtype`` is ``None`` or float32."""
    if dtype is None or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; nothing to do on a CPU."""
    if device.type != "cpu":
        _backend(device.type).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most bytes the device's allocator held so far, or ``None`` on a CPU, which has no such allocator."""
    if device.type == "cpu":
        return None
    return int(_backend(device.type).max_memory_allocated(device))
