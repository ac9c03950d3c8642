"""Loss aggregation as one tensor of token weights (algorithms.md §2.4).

The weights are computed over the whole batch, before it is cut into micro-batches or ranks; the loss is then the plain
sum of weight times token loss, and any cut gives the same sum. Denominators count every structural action token: one
that a gate rejects stays in them (D3).
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError

Mode = Literal["seq_mean", "token_mean", "seq_sum", "const", "rollout_mean"]
MODES: Final[tuple[str, ...]] = get_args(Mode)


def aggregation_weights(
    rows: Tensor,
    *,
    mode: Mode,
    num_rows: int,
    rollout_of_row: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Weight of each action token, ``[N]`` float32.

    With n_i action tokens in row i, N in all and S rows that have any:

    ============== =========================== =================================================
    mode           weight of a token of row i  meaning
    ============== =========================== =================================================
    seq_mean       1 / (S n_i)                 mean over rows of their token means
    token_mean     1 / N                       mean over all tokens; does not see where rows are cut
    seq_sum        1 / S                       mean over rows of their token sums
    const          1 / (S max_length)          seq_sum over a fixed length
    rollout_mean   1 / (S' n'_i)               seq_mean with a rollout's rows taken as one
    ============== =========================== =================================================

    Args:
        rows: ``[N]`` int64, row of each action token of the whole batch.
        mode: see the table.
        num_rows: B; rows without action tokens have no weight and do not count.
        rollout_of_row: ``[B]`` int64, dense rollout number of each row; needed by ``rollout_mean``.
        max_length: needed by ``const``.

    Raises:
        ConfigError: ``mode`` is unknown, or its argument is missing or out of range.
    """
    if mode not in MODES:
        raise ConfigError(f"aggregation: expected one of {', '.join(MODES)}, got {mode!r}")
    if mode == "token_mean":
        return torch.full(rows.shape, 1.0 / max(1, rows.numel()), dtype=torch.float32, device=rows.device)
    if mode == "rollout_mean":
        if rollout_of_row is None:
            raise ConfigError("aggregation rollout_mean: expected rollout_of_row, got None")
        units = rollout_of_row[rows]
        num_units = int(rollout_of_row.max()) + 1 if rollout_of_row.numel() else 0
    else:
        units, num_units = rows, num_rows
    lengths = torch.bincount(units, minlength=num_units).double()
    num_units_used = lengths.count_nonzero().clamp(min=1).double()
    return (1.0 / (num_units_used * _divisors(mode, lengths, units, max_length))).float()


def _divisors(mode: Mode, lengths: Tensor, units: Tensor, max_length: int | None) -> Tensor:
    """What a token's weight is divided by, beside the number of sequences; ``[N]`` float64."""
    if mode in {"seq_mean", "rollout_mean"}:
        return lengths[units]
    if mode == "seq_sum":
        return torch.ones_like(units, dtype=torch.float64)
    if max_length is None or max_length < 1:
        raise ConfigError(f"aggregation const: expected max_length >= 1, got {max_length}")
    return torch.full_like(units, float(max_length), dtype=torch.float64)
