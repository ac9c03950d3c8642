"""Log-probs of packed rows through a causal model, in micro-batches of a bounded number of padded tokens.

Packed means: the rows' ids lie one after another in one flat tensor, row ``b`` at ``cu_seqlens[b]:cu_seqlens[b+1]``.
A micro-batch pads its rows on the right; with causal attention no real token ever sees a padded one, so no mask is
needed (and attention may use its causal kernel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rolltape.numerics.logprob import TokenLogProbs, linear_log_probs
from rolltape.numerics.models import model_parts
from rolltape.numerics.support import TokenSupport
from rolltape.schema.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a packed batch, padded to their longest, with the places of the tokens that are scored.

    Example: rows of 3 and 2 tokens ``[5, 6, 7 | 8, 9]`` become ``input_ids = [[5, 6], [8, 0]]`` (a row's last token
    is only ever a target), ``source = [0, 1, 2]``, ``targets = [6, 7, 9]``, ``flat_index = [1, 2, 4]``.
    """

    rows: Tensor
    """``[b]`` int64, row numbers in the batch, ascending by place in the plan."""
    input_ids: Tensor
    """``[b, w]`` int64, right-padded with 0."""
    source: Tensor
    """``[M]`` int64, where in ``input_ids.view(-1)`` the state before each scored token lies."""
    targets: Tensor
    """``[M]`` int64, the scored ids."""
    flat_index: Tensor
    """``[M]`` int64, places of the scored tokens in the flat batch."""
    support: TokenSupport | None = None
    """Of the ``M`` scored tokens; None: all were sampled from the whole vocabulary."""


def plan_micro_batches(lengths: np.ndarray, token_budget: int) -> list[np.ndarray]:
    """Rows of each micro-batch: a function of the lengths alone, so a replay cuts the batch the same way.

    Rows are taken longest first (ties in batch order), as many as fit when padded to the first. A row that is longer
    than the budget is a micro-batch of its own. Empty rows are in none.

    Raises:
        ConfigError: ``token_budget`` is below 1.
    """
    if token_budget < 1:
        raise ConfigError(f"token_budget: expected at least 1, got {token_budget}")
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    order = order[lengths[order] > 0]
    plan: list[np.ndarray] = []
    start = 0
    while start < len(order):
        num_rows = max(1, token_budget // int(lengths[order[start]]))
        plan.append(order[start : start + num_rows])
        start += num_rows
    return plan


def micro_batches(
    token_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    token_budget: int,
    scored: Tensor | None = None,
    device: torch.device | None = None,
    support: TokenSupport | None = None,
) -> Iterator[MicroBatch]:
    """Cut a packed batch into micro-batches, in a fixed order.

    Args:
        token_ids: ``[N]`` integer ids.
        cu_seqlens: ``[B + 1]`` integer row bounds, from 0 to N.
        token_budget: most padded tokens (rows times longest row) of one micro-batch.
        scored: ``[N]`` bool, tokens whose log-prob is wanted; default all. A row's first token has no prefix and is
            never scored. Rows without a scored token are left out.
        device: where the micro-batch's tensors go; default where ``token_ids`` is.
        support: of the ``N`` tokens, on the CPU.

    Raises:
        ConfigError: bounds that do not describe ``token_ids``, or a mask of another length.
    """
    bounds = _checked_bounds(token_ids, cu_seqlens)
    ids = token_ids.detach().cpu().numpy().astype(np.int64, copy=False)
    wanted = np.ones(len(ids), dtype=bool) if scored is None else scored.detach().cpu().numpy().astype(bool)
    if len(wanted) != len(ids):
        raise ConfigError(f"scored: expected {len(ids)} entries, got {len(wanted)}")
    wanted[bounds[:-1][bounds[:-1] < len(ids)]] = False
    lengths = np.diff(bounds)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(row_of[wanted], minlength=len(lengths))
    for rows in plan_micro_batches(np.where(counts > 0, lengths, 0), token_budget):
        yield _build(ids, bounds, wanted, rows, device or token_ids.device, support)


def _checked_bounds(token_ids: Tensor, cu_seqlens: Tensor) -> np.ndarray:
    bounds = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    if bounds.ndim != 1 or len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != len(token_ids):
        raise ConfigError(f"cu_seqlens: expected bounds from 0 to {len(token_ids)}, got {bounds[:4].tolist()} ...")
    if np.any(np.diff(bounds) < 0):
        raise ConfigError("cu_seqlens: expected bounds that never fall")
    return bounds


def _build(
    ids: np.ndarray,
    bounds: np.ndarray,
    wanted: np.ndarray,
    rows: np.ndarray,
    device: torch.device,
    support: TokenSupport | None,
) -> MicroBatch:
    lengths = bounds[rows + 1] - bounds[rows]
    width = max(1, int(lengths.max()) - 1)
    columns = np.arange(width)
    inside = columns[None, :] < (lengths - 1)[:, None]
    flat = bounds[rows][:, None] + columns[None, :]
    padded = np.where(inside, ids[np.where(inside, flat, 0)], 0)
    predicts = inside & wanted[np.where(inside, flat + 1, 0)]
    flat_index = flat[predicts] + 1
    source = np.flatnonzero(predicts)
    return MicroBatch(
        rows=torch.from_numpy(rows.copy()).to(device),
        input_ids=torch.from_numpy(padded).to(device),
        source=torch.from_numpy(source).to(device),
        targets=torch.from_numpy(ids[flat_index]).to(device),
        flat_index=torch.from_numpy(flat_index).to(device),
        support=None if support is None else support.take(torch.from_numpy(flat_index), device=device),
    )


def states_before(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The model's last hidden state before each scored token, ``[M, H]``, with gradient."""
    hidden = model_parts(model).backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    states: Tensor = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.source)
    return states


def score_micro_batch(
    model: nn.Module, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False
) -> TokenLogProbs:
    """Log-probs ``[M]`` (and entropy) of a micro-batch's scored tokens, differentiable in the model's parameters."""
    return linear_log_probs(
        states_before(model, batch),
        model_parts(model).output_weight,
        batch.targets,
        temperature=temperature,
        with_entropy=with_entropy,
        support=batch.support,
    )


def packed_log_probs(
    model: nn.Module,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    token_budget: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    scored: Tensor | None = None,
    support: TokenSupport | None = None,
) -> TokenLogProbs:
    """Log-prob of every token of a packed batch, given everything before it in its row.

    Returns ``[N]`` float32: entry t scores token t, over its ``support`` where it has one; entry 0 of each row, and
    tokens outside ``scored``, are 0.
    Differentiable; for the backward pass of a large batch use :func:`micro_batches` and :func:`score_micro_batch`
    one by one, so that only one micro-batch's activations are held.

    Raises:
        ConfigError: see :func:`micro_batches`.
    """
    indexes: list[Tensor] = []
    log_probs: list[Tensor] = []
    entropies: list[Tensor] = []
    device = model_parts(model).output_weight.device
    parts = micro_batches(
        token_ids, cu_seqlens, token_budget=token_budget, scored=scored, device=device, support=support
    )
    for batch in parts:
        scores = score_micro_batch(model, batch, temperature=temperature, with_entropy=with_entropy)
        indexes.append(batch.flat_index)
        log_probs.append(scores.log_probs)
        if scores.entropy is not None:
            entropies.append(scores.entropy)
    num_tokens = len(token_ids)
    return TokenLogProbs(
        _scatter(num_tokens, indexes, log_probs, device),
        _scatter(num_tokens, indexes, entropies, device) if with_entropy else None,
    )


def _scatter(num_tokens: int, indexes: list[Tensor], values: list[Tensor], device: torch.device) -> Tensor:
    if not values:
        return torch.zeros(num_tokens, device=device)
    flat = torch.cat(values)
    return torch.zeros(num_tokens, dtype=flat.dtype, device=device).index_copy(0, torch.cat(indexes), flat)
