"""The model that a run begins with: from the seed, or as another run published it."""

from __future__ import annotations

from torch import nn

from rolltape.numerics.models import build_model
from rolltape.numerics.weights import Manifest, load_shards, load_weights
from rolltape.store.lake import Lake
from rolltape.store.published import find_published
from rolltape.trainers.job import TrainerJob


def initial_model(job: TrainerJob) -> nn.Module:
    """The job's model with its first weights, in training mode.

    Raises:
        ConfigError: the initial weights are another model's.
        NotPublishedError: their lake's tape does not have them.
        DigestMismatchError: their files are not what the tape says.
    """
    model = build_model(job.model_name, job.seed)
    if (source := job.initial) is not None:
        found = find_published(Lake.open(source.lake_url, read_only=True), source.run_id, source.version)
        load_weights(model, load_shards(found.location, Manifest.from_fields(found.fields)))
    model.train()
    return model
