"""Validation: whether each row of a batch keeps its spec. Columnar; a bad row is named, the others go on.

What may be stored although nobody should train on it is *not* refused here: log-probs that are NaN, infinite, null or
positive are kept as they are (design §5.3), and unknown versions, modes or contexts are stored as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from rolltape.schema.columns import Column
from rolltape.schema.envelope import SCHEMA_MAJOR, STAMPED_BY_RECORDER
from rolltape.schema.errors import SchemaVersionError, ValidationError
from rolltape.schema.findings import Findings, Refusal, valid_mask
from rolltape.schema.layout import layout_of
from rolltape.schema.reasons import (
    BAD_VALUE,
    BROKEN_UTF8,
    MISSING_FIELD,
    NEGATIVE_ID,
    OUT_OF_VOCABULARY,
    SCHEMA_VERSION,
    TOO_LARGE,
)
from rolltape.schema.rules import KIND_RULES
from rolltape.schema.stream import kind_of, parse_version

__all__ = ["Limits", "Refusal", "validate"]

_FEW_ROWS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a row may hold at most.

    ``vocab_size``: ids are in [0, vocab_size); ``None``: not checked. ``max_tokens``: elements of one list of one row.
    """

    vocab_size: int | None = None
    max_tokens: int = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which columns of a kind have which property, worked out once."""

    required: tuple[str, ...]
    choices: tuple[Column, ...]
    bounded: tuple[Column, ...]
    floats: tuple[str, ...]
    ids: tuple[str, ...]
    lists: tuple[str, ...]


def validate(batch: pa.RecordBatch, limits: Limits = Limits(), *, stamped: bool = True) -> list[Refusal]:
    """The rows of ``batch`` (of one kind, with that kind's schema) that break its spec, in row order.

    Args:
        batch: rows of one kind.
        limits: what a row may hold.
        stamped: whether the recorder's stamps and ``event_index`` must be there already.

    Raises:
        UnknownKindError: the batch's last column is not named like a kind.
        ValidationError: its schema is not that kind's (conform it first).
    """
    kind = kind_of(batch)
    if not batch.schema.equals(layout_of(kind).schema):
        raise ValidationError(f"expected a batch with the schema of {kind}: conform it first")
    broken = _broken_rows(batch)
    if not broken:
        return _validate_sound(batch, limits, stamped)
    rows = np.delete(np.arange(batch.num_rows), list(broken))
    sound = _validate_sound(batch.take(pa.array(rows)), limits, stamped) if len(rows) else []
    found = broken | {
        int(rows[item.row]): Refusal(row=int(rows[item.row]), reason=item.reason, detail=item.detail) for item in sound
    }
    return [found[row] for row in sorted(found)]


def _broken_rows(batch: pa.RecordBatch) -> dict[int, Refusal]:
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        pass
    else:
        return {}
    broken: dict[int, Refusal] = {}
    for row in range(batch.num_rows):
        try:
            # Taken, not sliced: Arrow checks the children of a sliced struct whole.
            batch.take(pa.array([row])).validate(full=True)
        except pa.ArrowException as error:
            reason = BROKEN_UTF8 if "utf8" in str(error).lower() else BAD_VALUE
            broken[row] = Refusal(row=row, reason=reason, detail=f"{kind_of(batch)} row {row}: {error}")
    return broken


def _validate_sound(batch: pa.RecordBatch, limits: Limits, stamped: bool) -> list[Refusal]:
    found = Findings.of(batch)
    plan = _plan_of(found.kind)
    _check_versions(found)
    _check_required(found, plan, stamped)
    _check_choices(found, plan)
    _check_bounds(found, plan)
    _check_floats(found, plan)
    _check_sizes(found, plan, limits)
    _check_ids(found, plan, limits)
    if (rule := KIND_RULES.get(found.kind)) is not None:
        rule(found)
    return [found.refusals[row] for row in sorted(found.refusals)]


@cache
def _plan_of(kind_name: str) -> _Plan:
    layout = layout_of(kind_name)
    specs = (*layout.top, *layout.children)
    unfilled = {"log_topic", "log_partition", "log_offset"}
    return _Plan(
        required=(*(spec.name for spec in specs if not spec.nullable), *layout.kind.requires),
        choices=tuple(spec for spec in specs if spec.choices),
        bounded=tuple(spec for spec in specs if spec.minimum is not None and spec.name not in unfilled),
        floats=tuple(spec.name for spec in specs if pt.is_floating(spec.type)),
        ids=tuple(spec.name for spec in specs if spec.name.endswith("token_ids") and pt.is_list(spec.type)),
        lists=tuple(spec.name for spec in specs if pt.is_list(spec.type)),
    )


def _check_versions(found: Findings) -> None:
    kinds, versions = found.column("kind"), found.column("schema_version")
    if _distinct(kinds) - {found.kind, None}:
        wrong = pc.fill_null(pc.not_equal(kinds, found.kind), False).to_numpy(zero_copy_only=False)
        found.refuse(np.flatnonzero(wrong), BAD_VALUE, f"kind {found.kind}", kinds)
    unreadable = {text for text in _distinct(versions) if text is not None and not _is_readable(text)}
    if unreadable:
        rows = [row for row, text in enumerate(versions.to_pylist()) if text in unreadable]
        found.refuse(
            np.array(rows),
            SCHEMA_VERSION,
            f"schema version {SCHEMA_MAJOR}.x",
            versions,
        )


def _is_readable(version: str) -> bool:
    try:
        return parse_version(version)[0] == SCHEMA_MAJOR
    except SchemaVersionError:
        return False


def _check_required(found: Findings, plan: _Plan, stamped: bool) -> None:
    for name in plan.required:
        array = found.column(name)
        if array.null_count and (stamped or (name not in STAMPED_BY_RECORDER and name != "event_index")):
            rows = np.flatnonzero(~valid_mask(array))
            found.refuse(rows, MISSING_FIELD, name, "null")
    index = found.column("event_index")
    if not found.layout.kind.indexed and index.null_count < len(index):
        found.refuse(
            np.flatnonzero(valid_mask(index)),
            BAD_VALUE,
            "no event_index outside the rollout plane",
            index,
        )


def _check_choices(found: Findings, plan: _Plan) -> None:
    for spec in plan.choices:
        array = found.column(spec.name)
        if array.null_count == len(array) or _distinct(array) <= {*spec.choices, None}:
            continue
        values = array.to_pylist()
        rows = [row for row, text in enumerate(values) if text is not None and text not in spec.choices]
        found.refuse(
            np.array(rows),
            BAD_VALUE,
            f"{spec.name} among {', '.join(spec.choices)}",
            values,
        )


def _distinct(array: pa.Array) -> set[str | None]:
    return set((array if len(array) <= _FEW_ROWS else pc.unique(array)).to_pylist())


def _check_bounds(found: Findings, plan: _Plan) -> None:
    for spec in plan.bounded:
        array = found.column(spec.name)
        if array.null_count == len(array):
            continue
        values = (array.fill_null(spec.minimum) if array.null_count else array).to_numpy()
        if values.min() < spec.minimum:
            found.refuse(
                np.flatnonzero(values < spec.minimum),
                BAD_VALUE,
                f"{spec.name} ≥ {spec.minimum}",
                array,
            )


def _check_floats(found: Findings, plan: _Plan) -> None:
    """A NaN in a scalar column vanishes under statistics pruning, so it has to be a null; inside lists it is safe."""
    for name in plan.floats:
        array = found.present(name)
        if array is None:
            continue
        nan = np.isnan(array.to_numpy(zero_copy_only=False)) & valid_mask(array)
        if nan.any():
            found.refuse(np.flatnonzero(nan), BAD_VALUE, f"{name} as a number or null", "NaN")


def _check_sizes(found: Findings, plan: _Plan, limits: Limits) -> None:
    for name in plan.lists:
        tokens = found.token_list(name)
        if tokens is not None and len(tokens.values) > limits.max_tokens:
            found.refuse(
                np.flatnonzero(tokens.lengths > limits.max_tokens),
                TOO_LARGE,
                f"at most {limits.max_tokens} elements in {name}",
                tokens.lengths,
            )


def _check_ids(found: Findings, plan: _Plan, limits: Limits) -> None:
    for name in plan.ids:
        tokens = found.token_list(name)
        if tokens is None or not len(tokens.values):
            continue
        ids = (tokens.values.fill_null(0) if tokens.values.null_count else tokens.values).to_numpy()
        if tokens.values.null_count:
            nulls = np.flatnonzero(~valid_mask(tokens.values))
            found.refuse(
                tokens.rows_of(nulls),
                BAD_VALUE,
                f"ids in {name}",
                "a null among them",
            )
        if ids.min() < 0:
            bad = np.flatnonzero(ids < 0)
            found.refuse(
                tokens.rows_of(bad),
                NEGATIVE_ID,
                f"ids ≥ 0 in {name}",
                "a negative one",
            )
        if limits.vocab_size is not None and ids.max() >= limits.vocab_size:
            bad = np.flatnonzero(ids >= limits.vocab_size)
            found.refuse(
                tokens.rows_of(bad),
                OUT_OF_VOCABULARY,
                f"ids < {limits.vocab_size} in {name}",
                "one that is not",
            )
