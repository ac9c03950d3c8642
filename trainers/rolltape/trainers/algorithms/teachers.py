"""Teachers' full distributions, made where they are needed and a block at a time: never an event."""

from __future__ import annotations

import torch
from torch import Tensor

from rolltape.numerics.packed import MicroBatch
from rolltape.numerics.scoring import Scorer
from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.trainers.algorithms.base import Method
from rolltape.trainers.batch import PackedBatch, TeacherScores
from rolltape.trainers.reverse_kl import TeacherBlock


class TeacherBlocks:
    """Log-probs over the vocabulary at tokens of a batch, by the teacher of each token's member.

    Raises:
        UntrainableError: a teacher has no scorer.
        ConfigError: a scorer works at another temperature than the rollouts were sampled at.
    """

    def __init__(self, method: Method, teacher: TeacherScores) -> None:
        self._batch = method.batch
        self._teacher_ids = teacher.teacher_ids
        self._scorers = method.scorers
        self._row_of_token = method.batch.row_of_token()
        for name in sorted({name for name in teacher.teacher_ids if name is not None}):
            scorer = method.scorers.get(name)
            if scorer is None:
                raise UntrainableError(
                    f"teacher_unavailable: opd_form full expected a scorer of teacher {name}, got those of "
                    f"{sorted(method.scorers)}; no other teacher stands in"
                )
            if scorer.identity.temperature != method.temperature:
                raise ConfigError(
                    f"teacher {name}: expected scores at the rollouts' temperature {method.temperature}, got a scorer "
                    f"at {scorer.identity.temperature}"
                )

    def of(self, part: MicroBatch, *, num_ids: int) -> TeacherBlock:
        """Blocks of the part's scored tokens, by their places in the part."""
        index = part.flat_index

        def block(begin: int, end: int) -> Tensor:
            return self._log_probs(index[begin:end], num_ids)

        return block

    def _log_probs(self, index: Tensor, num_ids: int) -> Tensor:
        """``[n, V]`` at tokens ``index`` of the batch."""
        found = torch.full((index.numel(), num_ids), torch.nan)
        place = torch.full((self._batch.num_tokens,), -1, dtype=torch.int64)
        place[index] = torch.arange(index.numel())
        rows = torch.unique(self._row_of_token[index])
        members = self._batch.row_member[rows].tolist()
        names = [self._teacher_ids[member] for member in members]
        for name in sorted({name for name in names if name is not None}):
            own = rows[torch.tensor([other == name for other in names])]
            self._fill(found, self._scorers[name], own, place)
        return found

    def _fill(self, found: Tensor, scorer: Scorer, rows: Tensor, place: Tensor) -> None:
        """Write one teacher's distributions of its rows' tokens to their places."""
        at, bounds = packed_rows(self._batch, rows)
        wanted = place[at] >= 0
        for part in scorer.distributions(self._batch.token_ids[at], bounds, scored=wanted):
            if part.log_probs.shape[1] != found.shape[1]:
                raise ConfigError(
                    f"teacher: expected log-probs of {found.shape[1]} ids, got {part.log_probs.shape[1]}; the "
                    "teacher's vocabulary must be the student's"
                )
            found[place[at[part.flat_index]]] = part.log_probs.to(found)


def packed_rows(batch: PackedBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows packed by themselves: places of their tokens in the batch, int64 ``[n]``, and their bounds."""
    lengths = batch.cu_seqlens.diff()[rows]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    shift = torch.repeat_interleave(batch.cu_seqlens[rows] - bounds[:-1], lengths)
    return torch.arange(int(bounds[-1])) + shift, bounds
