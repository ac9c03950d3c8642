"""The packed batch: what a trainer computes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Rows of a batch, packed without padding; one row is one segment.

    ``N`` tokens in all, ``B`` rows, ``M`` members (trajectories; padding copies count). Masks are aligned to targets:
    ``action_mask[t]`` says that token ``t`` was sampled by the policy in this row, and is to be
    trained; its log-prob scores it given everything before it in its row.
    """

    token_ids: torch.Tensor  # int32 [N], context then response of each row
    cu_seqlens: torch.Tensor  # int64 [B+1], row b is token_ids[cu_seqlens[b]:cu_seqlens[b+1]]
    context_lengths: torch.Tensor  # int64 [B]
    action_mask: torch.Tensor  # bool [N]
    rollout_log_probs: torch.Tensor  # float32 [N], 0 at other tokens, NaN where the tape holds null at an action
    policy_versions: torch.Tensor  # int32 [N], -1 at other tokens
    row_member: torch.Tensor  # int64 [B], index of the member that the row belongs to
    rewards: torch.Tensor  # float64 [M]
    groups: torch.Tensor  # int64 [M], dense group number
    is_padding: torch.Tensor  # bool [M], a copy that fills its group

    @property
    def num_rows(self) -> int:
        """Rows (segments), B."""
        return self.context_lengths.numel()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, N."""
        return self.token_ids.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)

    def row_of_token(self) -> torch.Tensor:
        """Row of each token, int64 [N]."""
        return torch.repeat_interleave(torch.arange(self.num_rows), self.cu_seqlens.diff())
