"""Publishing weights: safetensors shards in the lake, then the event that names them. Published is not in effect."""

from __future__ import annotations

from typing import Any

import torch

from rolltape.numerics.weights import named_weights, save_shards
from rolltape.schema.policy import PolicyVersion
from rolltape.store.lake import Lake


def weights_path(run_id: str, version: PolicyVersion) -> str:
    """Folder of a version's shards, relative to the lake."""
    return f"weights/{run_id}/{version.policy_id}/{version.run_epoch:04d}-{version.version:08d}"


def publish_columns(
    lake: Lake,
    run_id: str,
    model: torch.nn.Module,
    version: PolicyVersion,
    *,
    step: int,
    role: str = "actor",
    shard_bytes: int = 1 << 30,
) -> dict[str, Any]:
    """Write the shards durably and return the columns of the ``weights_published`` event that makes them known."""
    path = weights_path(run_id, version)
    manifest = save_shards(lake.location.child(*path.split("/")), named_weights(model), shard_bytes=shard_bytes)
    return {
        **version.fields,
        "role": role,
        "parent_version": version.version - 1 if version.version else None,
        "step": step,
        "payload": "full",
        "path": path,
        "parallel_layout": "unsharded",
        **manifest.to_fields(),
    }
