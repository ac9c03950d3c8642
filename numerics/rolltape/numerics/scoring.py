"""Scoring of given ids: the protocol between whoever has a model and whoever needs its log-probs.

Teachers, references and probes are used through :class:`Scorer`; trainers see nothing of the engine behind one, and a
recipe injects it. :class:`ModelScorer` is the implementation over a model in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rolltape.numerics.models import model_parts
from rolltape.numerics.packed import MicroBatch, micro_batches, packed_log_probs
from rolltape.numerics.weights import named_weights, weights_digest
from rolltape.schema.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerIdentity:
    """What a score depends on, beside the ids. The fields of ``teacher_scored`` are filled from it."""

    weights_digest: str
    engine: str
    """Who computes, as ``transformers``."""
    dtype: str
    """Of the parameters, as ``float32``; log-probs are always float32."""
    logprobs_mode: str
    """``processed_logprobs``: of the distribution at :attr:`temperature`, full support."""
    temperature: float


class Distributions(NamedTuple):
    """Full next-token distributions of some tokens of a packed batch."""

    flat_index: Tensor
    """``[M]`` int64, the tokens that they are the distributions of."""
    log_probs: Tensor
    """``[M, V]`` float32, nat."""


class Scorer(Protocol):
    """Scores exact ids under exact prefixes. Generates nothing, renders nothing, tokenizes nothing."""

    @property
    def identity(self) -> ScorerIdentity:
        """What the scores depend on."""
        ...

    def score(self, token_ids: Tensor, cu_seqlens: Tensor, *, scored: Tensor | None = None) -> Tensor:
        """Log-prob of each token given everything before it in its row; ``[N]`` float32, no gradient.

        Entry 0 of each row, and tokens outside ``scored`` ``[N]`` bool, are 0.
        """
        ...

    def distributions(
        self, token_ids: Tensor, cu_seqlens: Tensor, *, scored: Tensor | None = None
    ) -> Iterator[Distributions]:
        """The full distribution at each scored token, a bounded part at a time: never an event, made on demand."""
        ...


class ModelScorer:
    """A :class:`Scorer` over a causal model in this process."""

    def __init__(self, model: nn.Module, *, temperature: float, token_budget: int, rows_per_part: int = 256) -> None:
        if not temperature > 0.0:
            raise ConfigError(f"temperature: expected > 0, got {temperature}")
        if rows_per_part < 1:
            raise ConfigError(f"rows_per_part: expected >= 1, got {rows_per_part}")
        self._model = model
        self._temperature = temperature
        self._token_budget = token_budget
        self._rows_per_part = rows_per_part
        self._identity = ScorerIdentity(
            weights_digest=weights_digest(named_weights(model)),
            engine="transformers",
            dtype=str(model_parts(model).output_weight.dtype).removeprefix("torch."),
            logprobs_mode="processed_logprobs",
            temperature=temperature,
        )

    @property
    def identity(self) -> ScorerIdentity:
        """As it was when the scorer was made: its model is frozen from then on."""
        return self._identity

    @torch.no_grad()
    def score(self, token_ids: Tensor, cu_seqlens: Tensor, *, scored: Tensor | None = None) -> Tensor:
        """See :meth:`Scorer.score`."""
        return packed_log_probs(
            self._model,
            token_ids,
            cu_seqlens,
            token_budget=self._token_budget,
            temperature=self._temperature,
            scored=scored,
        ).log_probs

    @torch.no_grad()
    def distributions(
        self, token_ids: Tensor, cu_seqlens: Tensor, *, scored: Tensor | None = None
    ) -> Iterator[Distributions]:
        """See :meth:`Scorer.distributions`; at most ``rows_per_part`` tokens at a time."""
        device = model_parts(self._model).output_weight.device
        for batch in micro_batches(
            token_ids, cu_seqlens, token_budget=self._token_budget, scored=scored, device=device
        ):
            yield from self._parts(batch)

    def _parts(self, batch: MicroBatch) -> Iterator[Distributions]:
        backbone, output_weight = model_parts(self._model)
        hidden = backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.source)
        for start in range(0, len(states), self._rows_per_part):
            part = slice(start, start + self._rows_per_part)
            logits = torch.nn.functional.linear(states[part], output_weight).float() / self._temperature
            yield Distributions(batch.flat_index[part], torch.log_softmax(logits, dim=-1))
