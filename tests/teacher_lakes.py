"""Lakes of runs that have ended, for teachers to come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.models import ModelSpec, build_model, model_parts, model_spec
from rolltape.numerics.weights import named_weights, save_shards
from rolltape.store.lake import Lake
from rolltape.store.location import Location


class EndedRun:
    """A run whose tape holds versions and nothing else; the embedded log's committer runs in this process."""

    def __init__(self, folder: Path, run_id: str, *, model: str | ModelSpec = "char-64x2") -> None:
        self.url = str(folder)
        self.lake = Lake.create(Location.parse(self.url), exist_ok=True)
        self.run_id = run_id
        self._model = model_spec(model)
        self._log = EmbeddedLog(self.lake, committer="thread")
        self.recorder = Recorder(self._log, producer_id=f"trainer-{run_id}", run_id=run_id)
        self.recorder.record("run_started", purpose="train", seed=0, model_name=self._model.name)

    def publish(
        self, version: int, seed: int, *, step: int | None = None, sharpness: float = 1.0, **changes: Any
    ) -> str:
        """Publish weights made from a seed, logits times ``sharpness``; gives their digest."""
        epoch = self.recorder.run_epoch
        path = f"weights/{self.run_id}/{epoch:04d}-{version:08d}"
        model = build_model(self._model, seed)
        with torch.no_grad():
            model_parts(model).output_weight.mul_(sharpness)
        manifest = save_shards(self.lake.location.child(*path.split("/")), named_weights(model))
        fields: dict[str, Any] = {
            "policy_id": "actor", "policy_run_epoch": epoch, "version": version, "role": "actor", "payload": "full",
            "step": version if step is None else step, "path": path, **manifest.to_fields(),
        }  # fmt: skip
        self.recorder.record("weights_published", **{**fields, **changes})
        return manifest.weights_digest

    def complete(self, step: int, *, version_out: int | None = None, final: bool = True) -> None:
        """A completed step, the last one unless told."""
        self.recorder.record(
            "train_step_completed",
            batch_id=f"batch-{step}",
            trainer_id="trainer",
            step=step,
            skipped=False,
            policy_id="actor",
            version_out=step if version_out is None else version_out,
            metrics=[{"name": "final", "value": float(final)}],
        )

    def flush(self) -> None:
        self.recorder.flush("logged")

    def close(self) -> None:
        self.flush()
        self.recorder.close()
        self._log.close()


def ended_run(folder: Path, run_id: str, seed: int, *, sharpness: float = 1.0) -> str:
    """A lake of a run with a first version and a final one made from ``seed``; gives the lake's URL."""
    run = EndedRun(folder, run_id)
    run.publish(0, 1)
    run.publish(1, seed, sharpness=sharpness)
    run.complete(1)
    run.close()
    return run.url
