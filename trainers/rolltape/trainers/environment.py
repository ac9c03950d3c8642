"""What a bit-exact replay depends on: libraries, device, CPU capability, threads (design §5.8)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any, Final

from rolltape.numerics.device import describe_device

_LIBRARIES: Final = ("rolltape", "torch", "transformers", "safetensors", "numpy", "pyarrow", "deltalake", "duckdb")
_BITS_DEPEND_ON: Final = ("torch", "transformers")


def library_versions() -> list[dict[str, str]]:
    """Name and version of each library that a run names."""
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append({"name": name, "version": importlib.metadata.version(name)})
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_environment(num_threads: int | None = None) -> dict[str, Any]:
    """The fields of ``run_started`` that describe where a trainer runs, with ``num_threads`` if not this process's."""
    device = describe_device()
    return {
        "libraries": library_versions(),
        "device": device.type,
        "cpu_capability": device.cpu_capability,
        "num_threads": num_threads or device.num_threads,
        "world_size": 1,
    }


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Each thing on which bits depend that differs between a recorded run and this process, named."""
    found = [
        f"{name}: recorded {recorded[name]}, here {here[name]}"
        for name in ("device", "cpu_capability", "num_threads", "world_size")
        if recorded.get(name) is not None and recorded[name] != here[name]
    ]
    there = {entry["name"]: entry["version"] for entry in recorded.get("libraries") or ()}
    now = {entry["name"]: entry["version"] for entry in here["libraries"]}
    found += [
        f"{name}: recorded {there[name]}, here {now.get(name)}"
        for name in _BITS_DEPEND_ON
        if name in there and there[name] != now.get(name)
    ]
    return found
