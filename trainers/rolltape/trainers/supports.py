"""Kept supports on the way from a fold into a packed batch; nothing of it is paid for where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rolltape.numerics.support import TokenSupport


class RowSupport(NamedTuple):
    """Kept tokens of one segment: how many at each of its ``L`` response tokens (0: all), and their ids in a row."""

    counts: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSupports:
    """Supports of a fold's segments."""

    _rows: Mapping[int, RowSupport]

    @classmethod
    def of(cls, supports: pa.Table) -> Self | None:
        """From a table of ``schema.fold.SUPPORT_SCHEMA``; None where no segment has one."""
        whole = supports.filter(supports["is_whole"])
        if not whole.num_rows:
            return None
        columns = [whole[name].combine_chunks() for name in ("counts", "token_ids")]
        counts, ids = (pc.list_flatten(column).to_numpy() for column in columns)
        bounds = [np.append(0, np.cumsum(pc.list_value_length(column))).tolist() for column in columns]
        rows = {
            segment: RowSupport(counts[bounds[0][row] : bounds[0][row + 1]], ids[bounds[1][row] : bounds[1][row + 1]])
            for row, segment in enumerate(whole["segment"].to_pylist())
        }
        return cls(_rows=rows)

    def of_row(self, segment: int) -> RowSupport | None:
        """Support of one segment; None: all of it was sampled from the whole vocabulary."""
        return self._rows.get(segment)


@dataclass(slots=True)
class SupportPacker:
    """Puts supports of rows, added in their order, together to one of all tokens."""

    _starts: list[int] = field(default_factory=list)
    _rows: list[RowSupport] = field(default_factory=list)

    def add(
        self,
        row: RowSupport,
        start: int,
        token_ids: npt.NDArray[np.int32],
        action_mask: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Add a row whose ``L`` response tokens begin at ``start`` in the batch.

        Kept are the supports of tokens to train that are in them. Returns which tokens to train are not, bool ``[L]``.
        """
        counts, ids = row
        token = np.repeat(np.arange(len(counts)), counts)
        holds = np.zeros(len(counts), np.bool_)
        holds[token[ids == token_ids[token]]] = True
        used = action_mask & holds
        self._starts.append(start)
        self._rows.append(RowSupport(np.where(used, counts, 0).astype(np.int32), ids[used[token]]))
        outside: npt.NDArray[np.bool_] = action_mask & ~holds & (counts > 0)
        return outside

    def finish(self, num_tokens: int) -> TokenSupport | None:
        """Supports of a batch of ``num_tokens`` tokens; None where no token has one."""
        if not any(len(row.token_ids) for row in self._rows):
            return None
        counts = np.zeros(num_tokens, np.int64)
        for start, row in zip(self._starts, self._rows, strict=True):
            counts[start : start + len(row.counts)] = row.counts
        ids = np.concatenate([row.token_ids for row in self._rows])
        return TokenSupport(
            ids=torch.from_numpy(ids), offsets=torch.from_numpy(np.concatenate(([0], np.cumsum(counts))))
        )
