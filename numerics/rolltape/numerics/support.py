"""Kept supports: the tokens that top-p, top-k or min-p left to sample a token from.

An engine's processed log-probs are renormalised over them, so a model that is to be compared with it has to normalise
over the very same tokens. Which those are is replayed, never computed again: at the edge of a nucleus the last bit of a
probability decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SupportBlock(NamedTuple):
    """Supports of some tokens as a matrix, as wide as the largest of them."""

    ids: Tensor
    """``[b, k]`` int64, 0 behind a token's own."""
    inside: Tensor
    """``[b, k]`` bool, which entries are a token's own."""

    def is_limited(self) -> Tensor:
        """``[b]`` bool: whether a token has a support; without one it was sampled from the whole vocabulary."""
        return self.inside.any(1)

    def holds(self, token_ids: Tensor) -> Tensor:
        """``[b]`` bool: whether each of ``token_ids`` can have been sampled from its support."""
        return ((self.ids == token_ids[:, None]) & self.inside).any(1) | ~self.is_limited()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSupport:
    """Supports of ``N`` tokens: token ``t`` was sampled from ``ids[offsets[t]:offsets[t + 1]]``.

    Ids of one token are distinct. A token without any was sampled from the whole vocabulary.
    """

    ids: Tensor  # int32 or int64 [K]
    offsets: Tensor  # int64 [N+1]

    def take(self, tokens: Tensor, *, device: torch.device | None = None) -> TokenSupport | None:
        """Supports of the tokens at these indexes, in their order; None where none of them has one."""
        starts = self.offsets[:-1][tokens]
        counts = self.offsets.diff()[tokens]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        total = int(offsets[-1])
        if not total:
            return None
        places = torch.repeat_interleave(starts - offsets[:-1], counts) + torch.arange(total)
        return TokenSupport(ids=self.ids[places].long().to(device), offsets=offsets.to(device))

    def block(self, rows: slice) -> SupportBlock:
        """Supports of some tokens in a row, padded to the largest."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        counts = offsets.diff()
        width = max(1, int(counts.max())) if len(counts) else 1
        places = torch.arange(width, device=offsets.device)
        inside = places[None, :] < counts[:, None]
        ids = self.ids[torch.where(inside, offsets[:-1, None] + places, 0)].long()
        return SupportBlock(ids=torch.where(inside, ids, 0), inside=inside)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.ids.nbytes + self.offsets.nbytes
