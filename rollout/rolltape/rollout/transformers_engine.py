"""An engine over any causal model of transformers: batched sampling with a key/value cache, exact to the token.

All rows of a batch decode in step. Rows that share a context share its prefill; contexts of different lengths are
padded on the left. Between two decode steps the engine takes new weights if it was asked to, and computes the caches
again: every token's log-prob belongs to the version that its version run names, and to nothing older.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as library_version
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolltape.numerics.models import extend, model_parts
from rolltape.numerics.weights import load_shards, load_weights, named_weights
from rolltape.rollout.assembly import BatchAssembly
from rolltape.rollout.engine import (
    ActivationHook,
    EngineInfo,
    GenerationBatch,
    GenerationRequest,
    Int32,
    PolicyVersion,
    PublishedWeights,
    SamplingConfig,
)
from rolltape.rollout.sampling import Sampled, sample_tokens
from rolltape.rollout.seeds import uniforms
from rolltape.rollout.slots import VersionSlots
from rolltape.schema.errors import EngineError

Weights = dict[str, Tensor]
Int64 = npt.NDArray[np.int64]

_SHRINK_BELOW: Final = 0.5  # share of unfinished rows below which finished ones leave the cache


class TransformersEngine:
    """Samples from a transformers causal language model in this process.

    Staged means verified tensors in memory; the switch copies them into the model's parameters.

    Args:
        model: a causal language model (:func:`rolltape.numerics.models.build_model`), on its device; its weights do not
            matter, since nothing is sampled before a version is activated.
        engine_id: name of the engine on the tape.
        on_activated: records an activation durably, see :class:`rolltape.rollout.engine.Engine`.
    """

    def __init__(self, model: nn.Module, *, engine_id: str, on_activated: ActivationHook) -> None:
        self._model = model.eval()
        weight = model_parts(model).output_weight
        self._device = weight.device
        self._slots = VersionSlots[Weights](self._put_in_place, on_activated, time.perf_counter)
        self.engine_id: Final = engine_id
        self.info: Final = EngineInfo(
            name="transformers",
            version=library_version("transformers"),
            dtype=str(weight.dtype).removeprefix("torch."),
            device=weight.device.type,
            capabilities=("version_runs", "switch_between_decode_steps", "processed_logprobs", "support"),
        )

    @property
    def active_version(self) -> PolicyVersion | None:
        """The version that the next token will carry."""
        return self._slots.active

    def stage(self, published: PublishedWeights) -> None:
        """Load the shards, verify every tensor's digest, and hold them.

        Raises:
            DigestMismatchError: the bytes are not the published ones; names the tensor.
            EngineError: names, shapes or dtypes do not fit the model, or another digest was staged for this version.
        """
        if self._slots.holds(published.version):
            return
        weights = load_shards(published.location, published.manifest, verify=True)
        self._check_fit(weights, published.version)
        self._slots.hold(published.version, weights)

    def activate(self, version: PolicyVersion) -> None:
        """Serve a staged version from the next decode step on.

        Raises:
            EngineError: not staged, or older than the active one.
        """
        self._slots.activate(version)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> GenerationBatch:
        """Continue every request; see :meth:`rolltape.rollout.engine.Engine.generate`."""
        with self._slots.generation() as version, torch.inference_mode():
            assembly = BatchAssembly(requests, sampling, version)
            self._decode(assembly, requests, sampling)
        return assembly.finish()

    def _decode(self, assembly: BatchAssembly, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> None:
        draws = torch.from_numpy(uniforms([r.seed for r in requests], np.arange(sampling.max_tokens)))
        started = time.perf_counter()
        rows = _Rows.prefill(self._model, self._device, np.arange(len(requests)), assembly.contexts())
        assembly.prefill_s = time.perf_counter() - started
        for place in range(sampling.max_tokens):
            switched = self._slots.switch_if_asked()
            if switched is not None:
                assembly.switch(switched)
                numbers = rows.numbers[assembly.unfinished(rows.numbers)]
                rows = _Rows.prefill(self._model, self._device, numbers, assembly.contexts(numbers))
            sampled = sample_tokens(rows.logits, draws[rows.numbers, place].to(self._device), sampling)
            self._append(assembly, rows, sampled)
            unfinished = assembly.unfinished(rows.numbers)
            if not unfinished.any() or place + 1 == sampling.max_tokens:
                break
            token_ids = sampled.token_ids
            if unfinished.mean() < _SHRINK_BELOW:
                kept = torch.from_numpy(np.flatnonzero(unfinished)).to(self._device)
                rows.keep(kept)
                token_ids = token_ids[kept]
            rows.advance(self._model, token_ids)
        assembly.decode_s = time.perf_counter() - started - assembly.prefill_s

    def _append(self, assembly: BatchAssembly, rows: _Rows, sampled: Sampled) -> None:
        log_probs = sampled.log_probs.cpu().numpy()
        if not np.isfinite(log_probs).all():
            raise EngineError(
                f"version {assembly.version.key}: expected finite log-probs of sampled tokens, got "
                f"{int((~np.isfinite(log_probs)).sum())} that are not; the weights or the model are broken"
            )
        support = None if sampled.support is None else sampled.support.cpu().numpy()
        assembly.append(rows.numbers, sampled.token_ids.cpu().numpy(), log_probs, support)

    def _check_fit(self, weights: Weights, version: PolicyVersion) -> None:
        own = named_weights(self._model)
        for name in sorted(own.keys() | weights.keys()):
            expected, came = _kind_of(own.get(name)), _kind_of(weights.get(name))
            if expected != came:
                raise EngineError(
                    f"version {version.key}, tensor {name}: expected {expected}, got {came}; "
                    "trainer and engine have to build the same model"
                )

    def _put_in_place(self, weights: Weights) -> None:
        load_weights(self._model, weights)


def _kind_of(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


@dataclass(slots=True)
class _Rows:
    """Rows that decode in step: their cache and the logits of their next token."""

    numbers: Int64  # [A], row of the batch
    logits: Tensor  # [A, V]
    cache: Any  # the model's own key/value cache
    mask: Tensor | None  # int64 [A, width], 0 at padding; None: no padding
    lengths: Tensor  # int64 [A], real tokens in the cache

    @classmethod
    def prefill(cls, model: nn.Module, device: torch.device, numbers: Int64, contexts: Sequence[Int32]) -> _Rows:
        """Compute contexts from their first token; equal contexts are computed once."""
        places: dict[bytes, int] = {}
        inverse = [places.setdefault(context.tobytes(), len(places)) for context in contexts]
        unique = [np.frombuffer(data, dtype=np.int32) for data in places]
        lengths = torch.tensor([len(context) for context in unique], dtype=torch.int64)
        width = int(lengths.max())
        ids = torch.zeros(len(unique), width, dtype=torch.int64)
        for row, context in enumerate(unique):
            ids[row, width - len(context) :] = torch.from_numpy(context.astype(np.int64))
        lengths = lengths.to(device)
        mask = None
        options: dict[str, Tensor] = {}
        if int(lengths.min()) < width:
            mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
            options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)}
        extension = extend(model, ids.to(device), **options)
        rows = cls(numbers, _last_logits(model, extension.hidden), extension.cache, mask, lengths)
        if len(unique) < len(contexts):
            rows._select(torch.tensor(inverse, device=device))
        return rows

    def advance(self, model: nn.Module, token_ids: Tensor) -> None:
        """Append one token to each row and compute the next logits."""
        options: dict[str, Tensor] = {}
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(token_ids), 1)], dim=1)
            options = {"attention_mask": self.mask, "position_ids": self.lengths[:, None]}
        extension = extend(model, token_ids[:, None], self.cache, **options)
        self.logits, self.cache = _last_logits(model, extension.hidden), extension.cache
        self.lengths = self.lengths + 1

    def keep(self, kept: Tensor) -> None:
        """Let the other rows go."""
        self.numbers = self.numbers[kept.cpu().numpy()]
        self._select(kept)

    def _select(self, index: Tensor) -> None:
        self.cache.batch_select_indices(index)
        self.logits = self.logits[index]
        self.lengths = self.lengths[index]
        self.mask = None if self.mask is None else self.mask[index]


def _last_logits(model: nn.Module, hidden_BTH: Tensor) -> Tensor:
    """Logits [B, V] after each row's last token."""
    return hidden_BTH[:, -1] @ model_parts(model).output_weight.T
