"""Rules that only one kind has: lists that describe the same tokens, runs inside their tokens, sums that must agree."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.findings import Findings, TokenList, integers, valid_mask
from rolltape.schema.reasons import BAD_VALUE, LENGTH_MISMATCH

ORIGINS: Final = frozenset({"sampled", "injected"})
COMPONENT_SOURCES: Final = frozenset({"rule", "orm", "grm", "penalty"})
COMPONENT_STATUSES: Final = frozenset({"ok", "missing", "parse_error", "timeout"})
_DIGEST: Final = re.compile(r"[a-z0-9_-]+:[0-9a-f]{32,128}")


def _action_sampled(found: Findings) -> None:
    ids = found.token_list("token_ids")
    lengths = np.zeros(found.batch.num_rows, np.int64) if ids is None else ids.lengths
    _same_length(found, found.token_list("rollout_log_probs"), lengths, "token_ids")
    for name in ("version_runs", "origin_runs", "media"):
        _runs_within(found, found.token_list(name), lengths, "token_ids")
    _run_texts(found, "origin_runs", "origin", ORIGINS)
    _run_versions(found)
    _support(found, lengths)
    _digests(found, "prefix_digest")
    _prefix_length(found)
    _temperature(found)


def _context_rewritten(found: Findings) -> None:
    context = found.token_list("context_token_ids")
    if context is not None:
        _runs_within(found, found.token_list("provenance"), context.lengths, "context_token_ids")


def _rollout_ended(found: Findings) -> None:
    index, last = found.column("event_index"), found.column("last_event_index")
    differs = pc.fill_null(pc.not_equal(index, last), False).to_numpy(zero_copy_only=False)
    found.refuse(
        np.flatnonzero(differs),
        BAD_VALUE,
        "last_event_index to be its own event_index",
        last,
    )


def _reward_assigned(found: Findings) -> None:
    state, scalar = found.column("state"), found.column("scalar")
    earned = pc.fill_null(pc.equal(state, "earned"), False).to_numpy(zero_copy_only=False)
    finite = pc.fill_null(pc.is_finite(scalar), False).to_numpy(zero_copy_only=False)
    wrong = np.where(earned, ~finite, valid_mask(scalar))
    found.refuse(
        np.flatnonzero(wrong),
        BAD_VALUE,
        "a finite scalar if and only if state is earned",
        _Pairs(state, scalar),
    )
    _run_texts(found, "components", "source", COMPONENT_SOURCES)
    _run_texts(found, "components", "status", COMPONENT_STATUSES)


def _mask_assigned(found: Findings) -> None:
    _runs_within(found, found.token_list("ranges"), None, "")


def _teacher_scored(found: Findings) -> None:
    ids = found.token_list("scored_token_ids")
    if ids is None:
        return
    _same_length(found, found.token_list("log_probs"), ids.lengths, "scored_token_ids")
    _same_length(found, found.token_list("tail_mass"), ids.lengths, "scored_token_ids")
    k = np.maximum(integers(found.column("top_k")), 0)
    for name in ("top_k_token_ids", "top_k_log_probs"):
        _same_length(found, found.token_list(name), ids.lengths * k, "scored_token_ids times top_k")
    _digests(found, "prefix_digest")


_TRAINED_TOKENS: Final = (
    "old_log_probs",
    "current_log_probs",
    "advantages",
    "gate_weights",
    "trusted",
    "task_advantages",
    "teacher_gaps",
    "divergences",
    "values",
    "value_targets",
)


def _tokens_trained(found: Findings) -> None:
    counts = found.token_list("num_tokens")
    if counts is None:
        return
    numbers = integers(counts.values)
    sums = np.concatenate(([0], np.cumsum(numbers)))[counts.offsets]
    totals = np.where(counts.valid, np.diff(sums), 0)
    for name in _TRAINED_TOKENS:
        _same_length(found, found.token_list(name), totals, "the sum of num_tokens")
    _same_length(found, found.token_list("trajectory_ids"), counts.lengths, "num_tokens")


def _dead_letter(found: Findings) -> None:
    for first, last in (("first_lane_seq", "last_lane_seq"), ("first_event_index", "last_event_index")):
        low, high = found.column(first), found.column(last)
        wrong = pc.fill_null(pc.greater(low, high), False).to_numpy(zero_copy_only=False)
        found.refuse(
            np.flatnonzero(wrong),
            BAD_VALUE,
            f"{first} ≤ {last}",
            _Pairs(low, high),
        )


KIND_RULES: Final = MappingProxyType(
    {
        "action_sampled": _action_sampled,
        "context_rewritten": _context_rewritten,
        "rollout_ended": _rollout_ended,
        "reward_assigned": _reward_assigned,
        "mask_assigned": _mask_assigned,
        "teacher_scored": _teacher_scored,
        "tokens_trained": _tokens_trained,
        "dead_letter": _dead_letter,
    }
)
"""Kind → the rule that only it has."""


class _Pairs:
    """Two columns whose values of one row are shown side by side."""

    def __init__(self, one: Any, other: Any) -> None:
        self._one, self._other = one, other

    def __getitem__(self, row: int) -> str:
        return f"{self._one[row]} and {self._other[row]}"


def _same_length(found: Findings, other: TokenList | None, expected: npt.NDArray[np.int64], of: str) -> None:
    if other is None:
        return
    lengths = other.lengths
    wrong = other.valid & (lengths != expected)
    if not wrong.any():
        return
    found.refuse(
        np.flatnonzero(wrong),
        LENGTH_MISMATCH,
        f"as many elements in {other.name} as {of} has",
        _Pairs(lengths, expected),
    )


def _runs_within(found: Findings, runs: TokenList | None, lengths: npt.NDArray[np.int64] | None, of: str) -> None:
    """Runs (start, length) in ascending order, without overlap, inside the tokens of their row (any, if ``None``)."""
    if runs is None or not len(runs.values):
        return
    starts, sizes = integers(_field(runs.values, "start")), integers(_field(runs.values, "length"))
    rows = np.repeat(np.arange(len(runs.valid)), np.diff(runs.offsets))
    ends = starts + sizes
    wrong = (starts < 0) | (sizes < 0)
    if lengths is not None:
        wrong |= ends > lengths[rows]
        wrong[1:] |= (starts[1:] < ends[:-1]) & (rows[1:] == rows[:-1])
    if not wrong.any():
        return
    bad_rows = rows[wrong & runs.valid[rows]]
    limit = f"within the {of} of the row, ascending" if of else "with start and length of 0 or more"
    found.refuse(bad_rows, BAD_VALUE, f"{runs.name} {limit}", found.column(runs.name))


def _run_texts(found: Findings, name: str, field: str, choices: frozenset[str]) -> None:
    runs = found.token_list(name)
    if runs is None or not len(runs.values):
        return
    texts = _field(runs.values, field)
    if texts.null_count == len(texts) or choices.issuperset(pc.unique(texts.drop_null()).to_pylist()):
        return
    wrong = [at for at, text in enumerate(texts.to_pylist()) if text is not None and text not in choices]
    found.refuse(
        runs.rows_of(np.array(wrong, np.int64)),
        BAD_VALUE,
        f"{field} in {name} among {', '.join(sorted(choices))}",
        found.column(name),
    )


def _run_versions(found: Findings) -> None:
    runs = found.token_list("version_runs")
    if runs is None or not len(runs.values):
        return
    versions = _field(runs.values, "version")
    negative = (versions.fill_null(0) if versions.null_count else versions).to_numpy() < 0
    if not negative.any():
        return
    found.refuse(
        runs.rows_of(np.flatnonzero(negative)),
        BAD_VALUE,
        "versions of 0 or more, null where unknown",
        found.column("version_runs"),
    )


def _support(found: Findings, lengths: npt.NDArray[np.int64]) -> None:
    offsets, ids = found.token_list("support_offsets"), found.token_list("support_token_ids")
    if offsets is None:
        _same_length(found, ids, np.zeros(len(lengths), np.int64), "the support that support_offsets describes")
        return
    _same_length(found, offsets, lengths + 1, "token_ids and one more")
    numbers = integers(offsets.values)
    falling = np.flatnonzero(np.diff(numbers) < 0)
    falling = falling[~np.isin(falling + 1, offsets.offsets)]
    found.refuse(offsets.rows_of(falling), BAD_VALUE, "support_offsets that do not fall", "falling ones")
    last = np.zeros(len(lengths), np.int64)
    filled = offsets.lengths > 0
    last[filled] = numbers[offsets.offsets[1:][filled] - 1]
    _same_length(found, ids, last, "the last of support_offsets")


def _digests(found: Findings, name: str) -> None:
    texts = found.present(name)
    if texts is None:
        return
    values = texts.to_pylist()
    wrong = [row for row, text in enumerate(values) if text is not None and not _DIGEST.fullmatch(text)]
    found.refuse(
        np.array(wrong, np.int64),
        BAD_VALUE,
        f"{name} as algorithm:hex, as in sha256:…",
        values,
    )


def _prefix_length(found: Findings) -> None:
    ids = found.token_list("prefix_token_ids")
    if ids is None:
        return
    claimed = found.column("prefix_length")
    wrong = ids.valid & valid_mask(claimed) & (integers(claimed) != ids.lengths)
    found.refuse(
        np.flatnonzero(wrong),
        LENGTH_MISMATCH,
        "prefix_length as prefix_token_ids has elements",
        _Pairs(claimed, ids.lengths),
    )


def _temperature(found: Findings) -> None:
    sampling = found.present("sampling")
    if sampling is None:
        return
    temperatures = _field(sampling, "temperature")
    values = temperatures.to_numpy(zero_copy_only=False)
    wrong = ~(np.isfinite(values) & (values >= 0.0))
    if not wrong.any():
        return
    found.refuse(
        np.flatnonzero(wrong & valid_mask(temperatures) & valid_mask(sampling)),
        BAD_VALUE,
        "a finite temperature of 0 or more, null where unknown",
        temperatures,
    )


def _field(struct: pa.StructArray, name: str) -> pa.Array:
    return struct.field(struct.type.get_field_index(name))
