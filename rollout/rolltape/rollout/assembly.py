"""From decode steps to a batch of generations: what each step sampled, kept as columns.

There is no Python per token, except for kept supports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolltape.rollout.engine import (
    FinishReason,
    GenerationBatch,
    GenerationRequest,
    Int32,
    PolicyVersion,
    SamplingConfig,
)
from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import ConfigError

Int64 = npt.NDArray[np.int64]


class BatchAssembly:
    """Collects the tokens of ``B`` rows that decode in step, at most ``T`` each.

    Raises:
        ConfigError: no requests, or an empty context.
    """

    def __init__(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, version: PolicyVersion) -> None:
        if not requests or any(len(request.prompt_token_ids) == 0 for request in requests):
            raise ConfigError("expected one request or more, each with a context of one token or more")
        self._prompts = [np.ascontiguousarray(request.prompt_token_ids, dtype=np.int32) for request in requests]
        self._stop = np.asarray(sampling.stop_token_ids, dtype=np.int64)
        num_rows = len(requests)
        self._tokens_BT = np.zeros((num_rows, sampling.max_tokens), dtype=np.int32)
        self._log_probs_BT = np.zeros((num_rows, sampling.max_tokens), dtype=np.float32)
        self._lengths_B = np.zeros(num_rows, dtype=np.int64)
        self._stopped_B = np.zeros(num_rows, dtype=np.bool_)
        self._interrupted_B = np.zeros(num_rows, dtype=np.bool_)
        self._versions = [version]
        self._switch_places: list[int] = []  # decode step at which versions[1:] took over
        self._support: list[tuple[Int64, npt.NDArray[np.bool_]]] = []
        self._step = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0

    @property
    def version(self) -> PolicyVersion:
        """The version that samples now."""
        return self._versions[-1]

    def contexts(self, rows: Int64 | None = None) -> list[Int32]:
        """Context and tokens so far of each row, int32."""
        chosen = range(len(self._prompts)) if rows is None else rows.tolist()
        return [np.concatenate([self._prompts[r], self._tokens_BT[r, : self._lengths_B[r]]]) for r in chosen]

    def switch(self, version: PolicyVersion) -> None:
        """From the next step on, ``version`` samples."""
        self._versions.append(version)
        self._switch_places.append(self._step)

    def append(
        self,
        rows: Int64,
        token_ids: npt.NDArray[np.integer],
        log_probs: npt.NDArray[np.float32],
        support: npt.NDArray[np.bool_] | None,
    ) -> None:
        """One decode step of the rows ``[A]``; what rows that have stopped would go on with is ignored.

        ``support`` is bool ``[A, V]``: the tokens that top-k and top-p kept, None where they keep all.
        """
        going = self.unfinished(rows)
        taken = rows[going]
        self._tokens_BT[taken, self._step] = token_ids[going]
        self._log_probs_BT[taken, self._step] = log_probs[going]
        self._lengths_B[taken] += 1
        self._stopped_B[taken] = np.isin(token_ids[going], self._stop)
        if support is not None:
            self._support.append((taken, support[going]))
        self._step += 1

    def unfinished(self, rows: Int64) -> npt.NDArray[np.bool_]:
        """Which of the rows have not stopped, bool ``[A]``."""
        return ~(self._stopped_B[rows] | self._interrupted_B[rows])

    def interrupt(self, rows: Int64) -> None:
        """The engine breaks off these rows ``[A]``; what they have is all that comes of them."""
        self._interrupted_B[rows] = True

    def finish(self) -> GenerationBatch:
        """The batch, with the order of the requests."""
        is_token_BT = np.arange(self._tokens_BT.shape[1]) < self._lengths_B[:, None]
        run_offsets, run_starts, run_lengths, run_versions = self._version_runs()
        support_token_ids, support_offsets = self._flat_support()
        digests: dict[bytes, str] = {}
        for prompt in self._prompts:
            if prompt.tobytes() not in digests:
                digests[prompt.tobytes()] = prefix_digest(prompt)
        return GenerationBatch(
            token_ids=self._tokens_BT[is_token_BT],
            log_probs=self._log_probs_BT[is_token_BT],
            offsets=_offsets(self._lengths_B),
            finish_reasons=self._finish_reasons(),
            versions=tuple(self._versions),
            run_offsets=run_offsets,
            run_starts=run_starts,
            run_lengths=run_lengths,
            run_versions=run_versions,
            prefix_lengths=np.array([len(prompt) for prompt in self._prompts], dtype=np.int32),
            prefix_digests=tuple(digests[prompt.tobytes()] for prompt in self._prompts),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            support_token_ids=support_token_ids,
            support_offsets=support_offsets,
        )

    def _finish_reasons(self) -> tuple[FinishReason, ...]:
        flags = zip(self._stopped_B.tolist(), self._interrupted_B.tolist(), strict=True)
        return tuple("stop" if stopped else "abort" if interrupted else "length" for stopped, interrupted in flags)

    def _version_runs(self) -> tuple[Int32, Int32, Int32, Int32]:
        """Offsets, starts, lengths and versions of the runs; a version that gave a row no token has no run there."""
        starts_V = np.array([0, *self._switch_places], dtype=np.int64)
        ends_V = np.array([*self._switch_places, self._step], dtype=np.int64)
        lengths_BV = np.minimum(ends_V, self._lengths_B[:, None]) - np.minimum(starts_V, self._lengths_B[:, None])
        has_run_BV = lengths_BV > 0
        _, versions = np.nonzero(has_run_BV)
        return (
            _offsets(has_run_BV.sum(axis=1)),
            starts_V[versions].astype(np.int32),
            lengths_BV[has_run_BV].astype(np.int32),
            versions.astype(np.int32),
        )

    def _flat_support(self) -> tuple[Int32 | None, Int32 | None]:
        if not self._support:
            return None, None
        by_row: list[list[Int32]] = [[] for _ in self._prompts]
        for rows, support_AV in self._support:
            for row, kept in zip(rows.tolist(), support_AV, strict=True):
                by_row[row].append(np.flatnonzero(kept).astype(np.int32))
        flat = [kept for of_row in by_row for kept in of_row]
        return np.concatenate(flat), _offsets(np.array([len(kept) for kept in flat]))


def _offsets(lengths: npt.NDArray[np.integer]) -> Int32:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
